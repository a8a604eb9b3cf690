"""demo_classification with one convolution on two dozen pixels, and a fault where the variable FAULT wants one.

FAULT="WHAT@WHERE:WHEN,..." e.g. "term@train:3". WHERE is what is counted, WHEN which of them fails, from 1 on:
recipe, open (train, then val), train (losses), eval (predictions), save (tensor files); `load` means the sample of
that index instead, and `sample` the training batch that holds it; `server` is the forkserver of loader workers when it
imports this file. A signal `all-term` goes to the whole process group. `deny-rename-EXDEV` lets the kernel refuse a
system call from then on. Without FAULT it is an ordinary recipe.
"""

import ctypes
import dataclasses
import errno
import os
import platform
import re
import resource
import signal
import struct
import sys
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from torch import nn

from sightline.config import Recipe
from sightline.data.classification import ClassificationData
from sightline.data.classification.dataset import ClassificationDataset
from sightline.engine import checkpoint
from sightline.parts import DataSpec, ModelConfig
from sightline.recipes import demo_classification
from sightline.tasks.classification import Classification

SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SIGNALS |= {"hup": signal.SIGHUP, "segv": signal.SIGSEGV}
CLOCKS = {"back": -86400, "ahead": 2 * 86400}  # seconds that the clock of the machine jumps by
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
# Numbers of system calls: those of x86, then those of ARM.
CALLS = {
    "rename": ((82, 264, 316), (38, 276)),
    "fsync": ((74,), (82,)),
    "open": ((257,), (56,)),
    "write": ((1,), (64,)),
}
SECCOMP = 317, 277
counts: Counter[str] = Counter()


def drop_override() -> None:
    """Obey permissions, as every user does but root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the third version of the call, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    sets[0] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def deny(call: str, number: int) -> None:
    """Let the kernel answer every such call with this error: `open` where it would create a file, `write` of
    more than the bytes by which threads wake each other."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    load, equal, larger, bits, answer = 0x20, 0x15, 0x25, 0x45, 0x06  # of the kernel's filter language
    refused, allowed = (answer, 0, 0, 0x00050000 | number), (answer, 0, 0, 0x7FFF0000)
    test = {"open": [(load, 0, 0, 32), (bits, 0, 1, os.O_CREAT)]}
    test["write"] = [(load, 0, 0, 16), (larger, 0, 3, 2), (load, 0, 0, 32), (larger, 0, 1, 8)]
    filters = [(load, 0, 0, 0)]
    for each in CALLS[call][machine]:
        rule = [*test.get(call, []), refused]
        filters += [(equal, 0, len(rule) + (call in test), each), *rule, *([allowed] if call in test else [])]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in [*filters, allowed]))
    program = struct.pack("HxxxxxxQ", len(filters) + 1, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    assert libc.syscall(SECCOMP[machine], 1, 1, program) == 0, os.strerror(ctypes.get_errno())  # in all threads


def faults(where: str, numbers: set[int] | None = None) -> set[str]:
    """Carry out the fault set for this place; return what the caller has to do itself."""
    counts[where] += 1
    numbers = numbers or {counts[where]}
    left = set()
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        what, place = fault.split("@")
        if place not in {f"{where}:{number}" for number in numbers}:
            continue
        if what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        elif what.startswith("all-"):
            os.kill(0, SIGNALS[what.removeprefix("all-")])
        elif what == "nohup":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        elif what == "oom":
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        elif what == "raise":
            raise RuntimeError("made to fail")
        elif what == "stall":
            with open(os.environ["STALL"], "rb") as fifo:  # as a dead file server: does not return
                fifo.read()
        elif what in CLOCKS:
            time.time = lambda now=time.time, jump=CLOCKS[what]: now() + jump
        elif what == "powerless":
            drop_override()
        elif what.startswith("full"):  # full0 lets no file grow, full5000 none beyond 5000 bytes: EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(what[4:]), resource.RLIM_INFINITY))
        elif what.startswith(("files", "softfiles")):  # files40: at most 40 at once
            most = int(what.rpartition("files")[2])
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if what.startswith("soft") else most
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        elif what.startswith("memory"):  # memory200: 200 MB more than now
            most = psutil.Process().memory_info().vms + (int(what[6:]) << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        elif what.startswith("deny-"):
            call, name = what.split("-")[1:]
            deny(call, getattr(errno, name))
        elif what == "free":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        else:
            left.add(what)
    return left


class Bulk(nn.Module):
    """Takes so many MB for each sample, and changes nothing."""

    def __init__(self, megabytes: int):
        super().__init__()
        self.megabytes = megabytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.empty(len(x), self.megabytes << 18)
        return x


@dataclass(frozen=True)
class Thin(ModelConfig):
    """A convolution with batch-norm and a linear layer, large enough for files of 70 kB."""

    width: int = 8
    """Channels."""
    claimed: int = 0
    """Bytes of a buffer that takes no memory, but would on a disk."""
    bulk: int = 0
    """MB that each sample takes on the way."""
    norm: Literal["batch", "none"] = "batch"
    """Kind of the norm."""

    def build(self, spec: DataSpec) -> nn.Module:
        layers = {"conv": nn.Conv2d(3, self.width, 3, 1, 1), "norm": nn.BatchNorm2d(self.width), "relu": nn.ReLU()}
        layers |= {"flat": nn.Flatten(), "fc": nn.Linear(self.width * 24 * 24, len(spec.classes))}
        layers |= {} if self.norm == "batch" else {"norm": nn.Identity()}
        model = nn.Sequential(OrderedDict(layers | ({"bulk": Bulk(self.bulk)} if self.bulk else {})))
        if self.claimed:
            model.register_buffer("claimed", torch.zeros(1, dtype=torch.uint8).expand(self.claimed))
        return model


class FaultyDataset(ClassificationDataset):
    """Fails in `load`, which may run in a loader worker."""

    def load(self, epoch, index):
        if self.is_training:
            faults("load", {index})
        return super().load(epoch, index)


@dataclass(frozen=True)
class FaultyData(ClassificationData):
    """Fails in `open`, and where the forkserver of loader workers imports this module."""

    worker_modules = (*ClassificationData.worker_modules, "faulty")

    def open(self, split, seed):
        faults("open")
        found = super().open(split, seed)
        return FaultyDataset(self, found.source, split, seed)


@dataclass(frozen=True)
class FaultyTask(Classification):
    """Fails in the forward pass of training or evaluation."""

    def loss(self, model, batch):
        left = faults("train") | faults("sample", set(batch["index"].tolist()))
        if "nan" in left:  # through the network, so that batch-norm statistics see it too
            batch = {**batch, "image": batch["image"] * float("nan")}
        if "spoil" in left:  # what training does not read, so that no loss shows it
            model.norm.running_var.fill_(float("nan"))
        loss = super().loss(model, batch)
        if "infinite" in left:
            loss = dataclasses.replace(loss, total=loss.total * float("inf"))
        if "huge" in left:  # finite itself, but not its gradients in fp16
            loss = dataclasses.replace(loss, total=loss.total * 1e30)
        return loss

    def predict(self, model, batch):
        faults("eval")
        return super().predict(model, batch)


def recipe() -> Recipe:
    """Sixteen steps of eight images in two epochs."""
    faults("recipe")
    if os.environ.get("FAULT"):
        to_host = checkpoint._on_host

        def on_host(named):
            faults("save")
            return to_host(named)

        checkpoint._on_host = on_host
    demo = demo_classification.recipe()
    data = {field.name: getattr(demo.data, field.name) for field in dataclasses.fields(demo.data)}
    data |= {"path": "synthetic:classes=4,samples=64,size=24", "classes": 4}
    data |= {"size": 24, "eval_size": 24, "eval_resize": 24}
    return dataclasses.replace(
        demo,
        name="faulty",
        model=Thin(),
        data=(FaultyData if re.search("@(open|load|server)", os.environ.get("FAULT", "")) else ClassificationData)(
            **data
        ),
        task=FaultyTask(label_smoothing=0.1),
        train=dataclasses.replace(demo.train, epochs=2, global_batch=8, precision="fp32"),
    )


if sys.argv[:1] == ["-c"]:  # as multiprocessing starts the forkserver
    faults("server")
