"""Trains on CUDA with all that `sightline migrate scan --advise` has a word about; never run."""

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

options = {"lr": 0.1}
size, batch = (514, 3), 64
images, labels = torch.randn(size), torch.zeros(514)
held = torch.full((100, 3), 1.0)
data = TensorDataset(images, labels)
ragged = DataLoader(data, batch, shuffle=True)
even = DataLoader(TensorDataset(torch.rand(size=[512, 3])), batch_size=64, shuffle=True, pin_memory=True)
kept = DataLoader(TensorDataset(held), batch_size=30, shuffle=True, drop_last=True, num_workers=0)
single = DataLoader(TensorDataset(torch.arange(7)), shuffle=True)
span = DataLoader(TensorDataset(torch.arange(1, 7)), batch_size=4, shuffle=True)
files = DataLoader(dataset=range(9), batch_size=batch, shuffle=True, num_workers=0)
workers = DataLoader(range(9), batch_size=batch, num_workers=4, pin_memory=True)
unknown = DataLoader(data, **options)
sampler = DistributedSampler(data)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to("cuda")
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
third = torch.optim.Adam(model.parameters(), foreach=False)
schedule = CosineAnnealingLR(optimizer, 90)
scaler = GradScaler()
print(images.sum().item())
for epoch in range(90):
    total = torch.zeros(1).cuda()
    for step, (image, label) in enumerate(ragged):
        image, label = image.to(device="cuda"), label.cuda(non_blocking=True)
        loss = model(image).sum()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        if step % 50 == 0:
            print(loss.item())
        if loss > 3:
            print(loss.tolist(), loss.numpy())

        def show(loss=loss):
            print(loss.item(), dist.get_rank())

        total += loss
    schedule.step()
    print(epoch, total)
