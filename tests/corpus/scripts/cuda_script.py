"""Uses CUDA in every way that `sightline migrate scan` knows; never run."""

import apex
import pynvml
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import triton
from apex.parallel import DistributedDataParallel as ApexDDP
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.cpp_extension import load
from torch.utils.data import DataLoader

cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = True
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.cuda.set_device(0)
torch.cuda.manual_seed_all(7)
print(torch.cuda.get_device_name(0), torch.cuda.device_count())
dist.init_process_group("nccl", init_method="env://")
extension = load(name="fast", sources=["fast.cu"])
net = nn.Conv2d(3, 8, 3).cuda()
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to("cuda")
net = DistributedDataParallel(net, device_ids=[0])
both = DataParallel(ApexDDP(net))
half = net.half()
optimizer = apex.optimizers.FusedAdam(net.parameters(), lr=1e-3)
net, optimizer = apex.amp.initialize(net, optimizer, opt_level="O1")
scaler = GradScaler()
loader = DataLoader(range(9), batch_size=3, num_workers=4)
stream = torch.cuda.Stream()
total = torch.zeros(1, device="cuda")
for epoch in range(3):
    for images, labels in loader:
        images = images.cuda()
        labels = labels.to(device)
        optimizer.zero_grad()
        with autocast(), torch.cuda.stream(stream):
            loss = nn.functional.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(epoch, loss.item(), (labels == 1).nonzero())
        if loss.isnan():
            torch.cuda.synchronize()
        total += loss.cpu().cuda()
    torch.save(net.state_dict(), "net.pt")
net.load_state_dict(torch.load("net.pt", map_location="cuda:0"))
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
graph = torch.cuda.CUDAGraph()
with torch.autocast("cuda", dtype=torch.float16), torch.profiler.profile() as profile:
    fast = torch.compile(net, mode="max-autotune")
print(torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved(), profile, handle, graph, both, half, triton)
torch.jit.script(net)
exec("torch.cuda.is_bf16_supported()")
dist.all_reduce(total)
dist.destroy_process_group()
