"""Links between devices, and the time of an all-reduce over them: ring, tree, and two levels.

Below `scaling.py`. Bandwidths are bytes per second in one direction and per device, as collectives reach them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from sightline.errors import UsageError

# NCCL's maintainers of NVLink 4: 370 of 450 GB/s are left of the line rate after the protocol's share
# (github.com/NVIDIA/nccl-tests/issues/212). Taken for every link of the table that was not measured.
ACHIEVED = 0.8
# Seconds a ring takes per hop and to start, in NCCL's own cost model (src/graph/tuning.cc, protocol Simple).
NVLINK_HOP_S, PCIE_HOP_S, NETWORK_HOP_S = 3.4e-6, 5.7e-6, 14.0e-6
NCCL_START_S = 8.4e-6
# An assumption: through the kernel's sockets instead of RDMA a hop costs some system calls and interrupts more.
SOCKET_HOP_S = 50e-6
UNITS = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8}


@dataclass(frozen=True)
class Link:
    """One kind of connection."""

    name: str
    bandwidth: float
    hop_s: float  # from one device to the next
    start_s: float  # of every collective
    overlaps: bool = True  # False where the processor that computes is also the one that sends


def _line(name: str, rate: float, hop_s: float) -> Link:
    return Link(name, rate * ACHIEVED, hop_s, NCCL_START_S)


LINKS = {
    link.name: link
    for link in (
        _line("nvlink2", 150e9, NVLINK_HOP_S),  # V100: 300 GB/s in both directions together (V100 data sheet)
        _line("nvlink3", 300e9, NVLINK_HOP_S),  # A100: 600 GB/s in both (A100 data sheet)
        _line("nvlink4", 450e9, NVLINK_HOP_S),  # H100, H200: 900 GB/s in both (H100 data sheet)
        _line("pcie5", 63e9, PCIE_HOP_S),  # 16 lanes of 32 GT/s, 128b/130b (PCI-SIG)
        _line("ib400", 50e9, NETWORK_HOP_S),  # NDR InfiniBand or RoCE, one 400 Gbit/s port per device
        _line("ib200", 25e9, NETWORK_HOP_S),  # HDR
        _line("eth100", 12.5e9, SOCKET_HOP_S),  # TCP, one port per device
        _line("eth25", 3.125e9, SOCKET_HOP_S),
        # Gaudi has ten 100 Gbit/s RoCE ports (habana.ai/gaudi-integrated-roce); in an HLS-1 seven of them go to the
        # seven neighbours and three out of the box.
        _line("gaudi1-inside", 7 * 12.5e9, NETWORK_HOP_S),
        _line("gaudi1-between", 3 * 12.5e9, NETWORK_HOP_S),
        # Measured by benchmarks/scaling.py between two processes of one host, see docs/why/scaling.md.
        Link("gloo-loopback", 0.9e9, 0.0, 240e-6, overlaps=False),
    )
}


def parse(text: str) -> Link:
    """Parse a known link, or an own name with its speed: `nvlink4`, `rail,45GB/s`, `wan,1Gbit/s,2000us`."""
    name, *rest = text.split(",")
    if not rest:
        if name not in LINKS:
            raise UsageError(
                f"--links {text} is unknown; known: {', '.join(LINKS)}; or name one with its speed, e.g. {name},45GB/s"
            )
        return LINKS[name]
    speed = re.fullmatch(rf"([0-9.]+)({'|'.join(UNITS)})", rest[0])
    hop = re.fullmatch(r"([0-9.]+)us", rest[1]) if len(rest) == 2 else None
    if len(rest) > 2 or speed is None or (len(rest) == 2 and hop is None):
        raise UsageError(
            f"--links {text} must be NAME,SPEED or NAME,SPEED,LATENCY with a speed in {', '.join(UNITS)} and a latency "
            f"in us, e.g. nvlink4,400GB/s or rail,45GB/s,14us"
        )
    base = LINKS.get(name)
    bandwidth = _positive(text, speed[1]) * UNITS[speed[2]]
    hop_s = _positive(text, hop[1]) * 1e-6 if hop else base.hop_s if base else NETWORK_HOP_S
    return Link(name, bandwidth, hop_s, base.start_s if base else NCCL_START_S, base.overlaps if base else True)


def _positive(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise UsageError(f"--links {text}: {number} is not a positive number")
    return value


@dataclass(frozen=True)
class Cluster:
    """Hosts of `per_host` devices each."""

    inside: Link
    between: Link
    per_host: int

    def split(self, devices: int) -> tuple[int, int]:
        """Return (hosts, devices of each) that this many devices lie on; the last host may be half full."""
        local = min(devices, self.per_host)
        return -(-devices // local), local

    def overlaps(self, devices: int) -> bool:
        """Return whether gradients travel while the device computes."""
        return self.inside.overlaps and (devices <= self.per_host or self.between.overlaps)


def ring_s(devices: int, size: float, cluster: Cluster) -> float:
    """Return seconds of one ring over all devices (many hosts: as many rings as ports); every byte passes twice."""
    hosts, _ = cluster.split(devices)
    hops = (devices - hosts) * cluster.inside.hop_s + (hosts - 1) * cluster.between.hop_s
    return _start(devices, cluster) + 2 * hops + 2 * (devices - 1) / devices * size / _through(devices, cluster)


def tree_s(devices: int, size: float, cluster: Cluster) -> float:
    """Return seconds of a chain inside each host and a tree over hosts (two share the bytes, to use every port)."""
    hosts, local = cluster.split(devices)
    hops = (local - 1) * cluster.inside.hop_s + math.ceil(math.log2(hosts)) * cluster.between.hop_s
    return _start(devices, cluster) + 2 * hops + 2 * size / _through(devices, cluster)


def hierarchical_s(devices: int, size: float, cluster: Cluster) -> float:
    """Return seconds of reduce-scatter inside each host, a ring over hosts for each part, all-gather inside."""
    hosts, local = cluster.split(devices)
    inside, between = cluster.inside, cluster.between
    within = 2 * (local - 1) * (inside.hop_s + size / local / inside.bandwidth)
    across = 2 * (hosts - 1) * (between.hop_s + size / local / hosts / between.bandwidth)
    return 3 * _start(devices, cluster) + within + across


ALGORITHMS: dict[str, Callable[[int, float, Cluster], float]] = {
    "ring": ring_s,
    "tree": tree_s,
    "two-level": hierarchical_s,
}


def all_reduce_s(devices: int, size: float, cluster: Cluster) -> float:
    """Return seconds to sum `size` bytes over devices by the fastest algorithm, as the libraries choose."""
    return min(seconds(devices, size, cluster) for seconds in ALGORITHMS.values()) if devices > 1 else 0.0


def all_reduce_by(devices: int, size: float, cluster: Cluster) -> str:
    """Name the fastest algorithm."""
    return min(ALGORITHMS, key=lambda name: ALGORITHMS[name](devices, size, cluster)) if devices > 1 else "none"


def _start(devices: int, cluster: Cluster) -> float:
    return cluster.inside.start_s if devices <= cluster.per_host else cluster.between.start_s


def _through(devices: int, cluster: Cluster) -> float:
    """Return bytes per second of the bottleneck: a host's ports together, or the links inside."""
    hosts, local = cluster.split(devices)
    ports = local * cluster.between.bandwidth
    if hosts == 1:
        return cluster.inside.bandwidth
    return min(cluster.inside.bandwidth, ports) if local > 1 else ports
