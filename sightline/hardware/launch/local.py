"""`--run.devices N`: this command once more for each of N local ranks, by torchrun's own agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence

import psutil
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sightline.errors import Interrupted, PeerLost, RankFailed, UsageError
from sightline.hardware import devices, launch
from sightline.hardware.launch.place import LOOPBACK, STORE
from sightline.hardware.launch.plan import SECONDS_TO_SAVE, hangup

SIGNALS = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1")  # torchrun's, and the one by which schedulers announce the end
ELASTIC = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")  # the second has its own level
RENDEZVOUS = "sightline"
STARTER = "SIGHTLINE_STARTER"  # pid of the process that started this rank
LOOK_S = 1.0


class OneHost(RendezvousHandler):
    """Rendezvous of an agent that is alone: it opens no socket and unpickles nothing. torch's own listens on all
    interfaces and unpickles what anybody writes there."""

    def __init__(self, parameters: RendezvousParameters):
        self.run_id = parameters.run_id

    def get_backend(self) -> str:
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()  # in the memory of this process; ranks meet in a file
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, LOOPBACK))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def start(count: int, device: str, arguments: Sequence[str]) -> bool:
    """Run `sightline ARGUMENTS` as `count` ranks to their end; False, at once, where this process is one of them."""
    place = launch.detect(os.environ)
    if place is not None and (place.size > 1 or place.launcher == "torchrun"):
        refuse_other_count(count, place.local_size, place.launcher)
        starter = int(os.environ.pop(STARTER, "0"))
        if starter and (os.getppid() == starter or not psutil.pid_exists(starter)):  # not of another launcher between
            threading.Thread(target=_end_with, args=(starter,), daemon=True).start()
        return False
    _refuse_too_many(count, device)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the cores are shared
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))  # torch's own 30 is short
    os.environ[STARTER] = str(os.getpid())
    for name in ELASTIC:  # our own lines say who ended, and why
        logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register(RENDEZVOUS, OneHost)
    # Mode 0700: nobody else may read or change what ranks exchange.
    with tempfile.TemporaryDirectory(prefix="sightline-") as folder:
        os.environ[STORE] = os.path.join(folder, "store")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend=RENDEZVOUS,
            local_addr=LOOPBACK,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(folder),
            signals_to_handle=",".join([*SIGNALS, *(number.name for number in hangup())]),
        )
        try:
            _run(config, count, arguments)
        finally:
            del os.environ[STARTER]
    return True


def _end_with(starter: int) -> None:
    """Stop this rank, saved, once the process that started it is gone: killed, it could not stop its ranks."""
    while os.getppid() == starter:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _run(config: LaunchConfig, count: int, arguments: Sequence[str]) -> None:
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "sightline", *arguments)
    except SignalException as error:
        raise Interrupted(error.sigval, f"all {count} ranks have ended") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            remedy = "resumes from the last checkpoint" if arguments[0] == "train" else "starts again"
            raise PeerLost(
                f"rank {rank} of {count} was ended by signal {-failure.exitcode}; the others were stopped, and the "
                f"same command {remedy}"
            ) from None
        raise RankFailed(
            failure.exitcode, f"rank {rank} of {count} ended with exit code {failure.exitcode}; its error is above"
        ) from None


def refuse_other_count(count: int, local_size: int, launcher: str) -> None:
    """Refuse another number of ranks than was asked for."""
    if local_size != count:
        raise UsageError(
            f"--run.devices {count}, but {launcher} has started {local_size} on this host; leave --run.devices out and "
            f"let {launcher} start {count}, or run the command without it"
        )


def _refuse_too_many(count: int, device: str) -> None:
    chosen = devices.select(device, local_size=count)
    if not (chosen.is_shared or chosen.sharers > 1) and count > chosen.count():
        share = f"; --run.device {chosen.kind}:0 lets all ranks share one" if chosen.shared_backend else ""
        raise UsageError(
            f"--run.devices {count}, but there are {chosen.count()} of {chosen.kind} here; use at most "
            f"{chosen.count()}, or --run.device cpu{share}"
        )
