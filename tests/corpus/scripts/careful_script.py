"""Trains on CUDA with nothing to advise; never run."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

data = TensorDataset(torch.randn(512, 3))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler, pin_memory=True)
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
model = DistributedDataParallel(model.to("cuda", memory_format=torch.channels_last))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
warmup = SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 90)], [5])
for epoch in range(90):
    sampler.set_epoch(epoch)
    for step, (images,) in enumerate(loader):
        loss = model(images.to("cuda", non_blocking=True)).sum()
        loss.backward()
        if step % 50 == 0:
            print(loss.item())
