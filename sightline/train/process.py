"""One start of a run: its place among the ranks, its log, the training, and how it ended, for whoever asks later."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from sightline import terminal
from sightline.engine.setup import set_up
from sightline.engine.signals import ignore_stops, leaving_at_once
from sightline.errors import DiskError, OutOfMemory, PeerLost, SightlineError, unforeseen_disk_error
from sightline.files.our_folders import refuse_among_data
from sightline.hardware import world
from sightline.hardware.devices import is_out_of_memory
from sightline.hardware.watchdog import Watchdog
from sightline.parts import NOTHING_OPENED, DataFacts
from sightline.recipe import store
from sightline.recipe.recipe import Recipe, Run
from sightline.results import TrainResult
from sightline.runs import attempts, trackers
from sightline.runs.benchmark_log import BenchmarkLog
from sightline.runs.log import RunLog
from sightline.runs.loggers import Logger
from sightline.runs.page import Page
from sightline.runs.screen import Screen
from sightline.train import loop, memory, start
from sightline.train.session import Session


def train_here(
    recipe: Recipe,
    run: Run,
    loggers: Sequence[Logger] = (),
    page: Callable[[Path], Page] | None = None,
    facts: DataFacts = NOTHING_OPENED,
) -> TrainResult:
    """Train on this process's device, together with the other ranks if a launcher started several; `page`
    makes the page of the run. `facts` hold the data that were opened on the way."""
    folder, page = Path(run.out or f"runs/{recipe.name}"), page if run.report == "auto" else None
    refuse_among_data(folder, str(getattr(recipe.data, "path", "")), recipe.data.file_suffixes)
    recipe, run = store.at_absolute_paths(recipe, run)  # `folder` is shown as it was typed
    attempt = attempts.detect()
    attempt.obey(folder)
    here, device, _ = set_up(recipe, run)
    # Before the folder is claimed: where the package is missing, the run stays as it was.
    tracked = trackers.opened(run) if here.is_main else []
    screen, rank_logs = Screen(run.progress, here.rank, run.rank_output), Path(run.rank_logs) if run.rank_logs else None
    log = RunLog(folder, screen, here.rank, attempt, page=page, rank_logs=rank_logs)
    for logger in (*tracked, *loggers):
        log.add_logger(logger)
    code, reason = 1, "crashed"
    watchdog: Watchdog | None = None

    def on_lost(message: str, speaks_for_all: bool) -> None:
        if speaks_for_all:
            terminal.say(f"error: {message}", "stderr")
        log.tell_exit(PeerLost.exit_code, message, speaks_for_all)  # the process ends now

    try:
        here = world.connect(here, device)
        if here.is_main and (place := world.meeting_place(here)):
            log.say(place)
        if here.is_main and (note := device.sharing_note()):
            log.say(note)
        watchdog = Watchdog(
            here, run.timeout_s, log.events.dump_stacks, on_lost, str((rank_logs or folder) / "rank_*.log")
        )
        here = dataclasses.replace(here, beat=watchdog.beat)
        with watchdog, log.taking_warnings():
            with leaving_at_once():
                session = start.settle(Session(recipe, run, device, here, log))
            if run.benchmark_log and here.is_main:
                values = store.leaves(session.recipe, run)
                log.events.add(BenchmarkLog(Path(run.benchmark_log), recipe.name, values, run.test_id))
            result = loop.train(session, facts)
        code, reason = 0, "finished"
        return result
    except SightlineError as error:
        code, reason = error.exit_code, str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            code, reason = OutOfMemory.exit_code, memory.told(error, device, memory.starting())
            raise OutOfMemory(reason) from error
        if failed := unforeseen_disk_error(error):
            code, reason = failed.exit_code, str(failed)
            raise failed from error
        if isinstance(error, KeyboardInterrupt):
            code, reason = 128 + signal.SIGINT, str(error) or "stopped by Ctrl-C before the first step"
        if not world.is_loss(error):
            raise
        ignore_stops()  # also where ranks have not met yet
        code, reason = PeerLost.exit_code, watchdog.explain(error) if watchdog else f"no rank could be met: {error}"
        raise PeerLost(reason) from error
    finally:
        if unwritten := _close(log, code, reason):  # before other ranks hear of it: they leave what it writes alone
            code, reason = unwritten.exit_code, str(unwritten)
        if watchdog:
            watchdog.tell_end(code, reason)
        here.close(is_lost=code == PeerLost.exit_code)
        if log.page and (log.has_started or code == 0):
            log.page.ended()
        for problem in trackers.leave(tracked, folder / "report.html"):
            log.screen.say(f"warning: {problem}")
        if unwritten:
            raise unwritten


def _close(log: RunLog, code: int, reason: str) -> DiskError | None:
    """Tell how the run ended; return an error if it ended well and the disk does not take it. A run that did not end
    well has an error of its own."""
    try:
        log.close(code, reason)
    except DiskError as error:
        if code == 0:
            return DiskError(f"training is done and its checkpoints are saved, but {error}")
        log.screen.say(f"warning: {error}")
    return None
