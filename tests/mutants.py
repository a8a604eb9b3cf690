"""Break a rule of reliability, one at a time, in a copy of the tree, and see the tests that guard it fail.

    .venv/bin/python tests/mutants.py            # all; some seconds each, the stalled worker five minutes
    .venv/bin/python tests/mutants.py fsync lock # those whose name holds one of these words

Only tests of the default set are run: those marked slow are not needed to catch a mutant.

A mutant that survives is a rule without a test: the command ends with exit 1 and its name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A rule, what keeps it as (file, text, what is written instead), and the tests of which one must fail."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


CHECKPOINT, FOLDER, CONTENTS = (
    "sightline/engine/checkpoint.py",
    "sightline/runs/folder.py",
    "sightline/data/contents.py",
)
POWER = ("tests/faults/test_power_loss.py::test_power_cut_at_sampled_moments_of_a_save",)
WRITE = '_write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})\n'
LATE = '_write_json(final / MANIFEST, {"format": FORMAT, "files": state.pop("entries")})\n'
RENAME = "            rename(temporary, final)\n"
MUTANTS = [
    Mutant(
        "fsync does nothing", (("sightline/files/whole.py", "        os.fsync(descriptor)\n", "        pass\n"),), POWER
    ),
    Mutant(
        "fsync of files before the manifest is left out",
        ((CHECKPOINT, "    for path in files:\n        _fsync(path)\n", ""),),
        POWER,
    ),
    Mutant("fsync of the manifest is left out", ((CHECKPOINT, "    _fsync(folder / MANIFEST)\n", ""),), POWER),
    Mutant("fsync of a checkpoint's folder is left out", ((CHECKPOINT, "    _fsync(folder)\n", ""),), POWER),
    Mutant("fsync of the folder of checkpoints is left out", ((CHECKPOINT, "    _fsync(path.parent)\n", ""),), POWER),
    Mutant("fsync of a new run's parents is left out", ((CHECKPOINT, "_fsync(parent)\n", "pass\n"),), POWER),
    Mutant(
        "fsync of a pointer before its rename is left out",
        (("sightline/files/whole.py", "                sync(out.fileno())\n", ""),),
        POWER,
    ),
    Mutant(
        "manifest is written after the rename",
        (
            (CHECKPOINT, f"    {WRITE}    _fsync(folder / MANIFEST)\n", '    state["entries"] = entries\n'),
            (CHECKPOINT, RENAME, f"{RENAME}            {LATE}"),
        ),
        ("tests/faults/test_checkpoint_write.py",),
    ),
    Mutant(
        "manifest is not compared with the files",
        (("sightline/files/checkpoint_folder.py", 'if sha256_of(file) != entry.get("sha256"):', "if False:"),),
        ("tests/faults/test_checkpoint_damage.py::test_one_bit_flipped",),
    ),
    Mutant(
        "lock is not taken",
        ((FOLDER, "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "        pass\n"),),
        ("tests/faults/test_surroundings.py::test_second_run_in_one_folder_is_refused",),
    ),
    Mutant(
        "lock taken over by another attempt is not noticed",
        ((CHECKPOINT, "            self.prove_ours()  # the write may have taken minutes\n", ""),),
        ("tests/faults/test_background_save.py::test_a_folder_that_was_taken_over_during_a_slow_write_is_left_alone",),
    ),
    Mutant(
        "CRC of a record is not compared",
        (
            (
                "sightline/data/formats/records.py",
                'if masked_crc32c(payload) != int.from_bytes(crc, "little"):',
                "if False:",
            ),
        ),
        ("tests/unit/data/formats/test_records.py::test_a_flip_of_any_bit_is_noticed",),
    ),
    Mutant(
        "abandon rule: later checkpoints keep their names",
        ((CHECKPOINT, "            self._abandon_after(step)\n", ""),),
        POWER,
    ),
    Mutant(
        "guard: a step that is not finite counts",
        (("sightline/train/step.py", "            torch._foreach_add_(tensors, old)\n", "            pass\n"),),
        ("tests/unit/train/test_step.py",),
    ),
    Mutant(
        "guard: weights that are not finite are saved",
        (("sightline/train/saver.py", "if not state.weights_are_finite():", "if False:"),),
        ("tests/faults/test_not_finite.py::test_weights_that_are_not_finite_replace_no_checkpoint",),
    ),
    Mutant(
        "guard: the last step is not looked at",
        (("sightline/train/step.py", "        if waits:\n            self._read_copied()\n", ""),),
        ("tests/unit/train/test_step.py",),
    ),
    Mutant(
        "guard: images are decoded whatever their header says",
        (("sightline/data/formats/image_headers.py", "    elif pixels > MAX_PIXELS:", "    elif False:"),),
        ("tests/unit/data/test_decode.py::test_bombs_are_stopped_by_their_header",),
    ),
    Mutant(
        "resume position: an epoch begins again",
        (
            (
                "sightline/train/loop.py",
                '            saver.save_first(resumed)\n            loader.seek("train", progress.step, steps)\n',
                '            saver.save_first(resumed)\n            loader.seek("train", 0, steps)\n',
            ),
        ),
        ("tests/faults/test_kill.py::test_killed_run_ends_with_equal_bits",),
    ),
    Mutant(
        "stall: a frozen machine counts",
        (("sightline/data/loading/stalls.py", "min(waited_s, 1.0)", "waited_s"),),
        ("tests/unit/data/loading/test_loader.py::test_a_frozen_machine_is_not_a_stalled_worker",),
    ),
    Mutant(
        "report: its process imports from the current folder",
        (("sightline/report/refresh.py", ', "PYTHONSAFEPATH": "1"', ""),),
        ("tests/unit/report/test_refresh.py",),
    ),
    Mutant(
        "report: quotes are not escaped",
        (("sightline/report/html.py", '"backslashreplace").decode())', '"backslashreplace").decode(), quote=False)'),),
        ("tests/unit/report/test_html.py",),
    ),
    Mutant(
        "damaged best checkpoint stays the best",
        ((CHECKPOINT, "        if best_step < 0 or path == loaded:\n", "        if True:\n"),),
        ("tests/faults/test_checkpoint_damage.py",),
    ),
    Mutant(
        "errors of fsync are passed over",
        (("sightline/files/whole.py", "        if error.errno not in _CANNOT_SYNC:\n", "        if False:\n"),),
        ("tests/faults/test_disk_errors.py",),
    ),
    Mutant(
        "stall: a worker that stands still is waited for",
        (("sightline/data/loading/stalls.py", "        if self._still_s > limit:", "        if False:"),),
        ("tests/faults/test_workers.py::test_stopped_worker_of_a_single_rank_ends_the_run",),
    ),
    Mutant(
        "fingerprint: other contents are not noticed",
        ((CONTENTS, "                    if then != today:", "                    if False:"),),
        ("tests/unit/data/test_contents.py",),
    ),
    Mutant(
        "fingerprint: nothing is compared on resume",
        (("sightline/train/saver.py", "        if self.world.largest(int(bool(changed))):", "        if False:"),),
        ("tests/faults/test_changes.py::test_replaced_file_of_equal_size_is_refused_by_name",),
    ),
    Mutant(
        "room: a run starts however small the disk is",
        (("sightline/train/loop.py", "    if not over:\n        saver.prove_room()\n", ""),),
        ("tests/faults/test_room.py::test_no_room_for_two_checkpoints_is_refused_before_the_first_step",),
    ),
    Mutant(
        "room: descriptors are not counted",
        (("sightline/hardware/limits.py", "if soft == resource.RLIM_INFINITY or needed <= soft:", "if True:"),),
        ("tests/faults/test_room.py::test_too_few_descriptors_are_refused_with_their_number",),
    ),
    Mutant(
        "room: a deleted run folder is not noticed",
        ((FOLDER, "        if self.is_gone():\n            raise", "        if False:\n            raise"),),
        ("tests/faults/test_room.py::test_run_folder_that_vanishes_ends_the_run",),
    ),
    Mutant(
        "room: a folder that an evaluation cannot write is not refused",
        (("sightline/inference/checkpoints.py", "    with log.folder.must_be_writable():\n", "    if folder:\n"),),
        ("tests/faults/test_room.py::test_read_only_run_is_evaluated_into_another_folder",),
    ),
    Mutant(
        "memory: batch-norm statistics change without a word",
        (("sightline/train/batch_size.py", "    if found > 1 and shares:", "    if False:"),),
        ("tests/faults/test_memory.py::test_batch_norm_is_not_changed_without_a_word",),
    ),
    Mutant(
        "memory: parts are measured again by every start",
        (("sightline/train/start.py", '0 if run.override else _stored_number(stored, "accumulation")', "0"),),
        ("tests/faults/test_memory.py::test_batch_that_does_not_fit_is_cut_where_that_changes_no_result",),
    ),
]


def is_caught(mutant: Mutant, tree: Path) -> bool:
    """Write the mutant into the copy, run its tests, and undo it."""
    sources = {file: (tree / file).read_text("utf-8") for file, _, _ in mutant.edits}
    changed = dict(sources)
    for file, text, instead in mutant.edits:
        if changed[file].count(text) != 1:
            sys.exit(f"'{mutant.name}': {file} holds {text!r} {changed[file].count(text)} times, expected once")
        changed[file] = changed[file].replace(text, instead)
    for file, source in changed.items():
        (tree / file).write_text(source, "utf-8")
    try:
        return not passes(mutant.tests, tree)
    finally:
        for file, source in sources.items():
            (tree / file).write_text(source, "utf-8")


def passes(tests: Iterable[str], tree: Path) -> bool:
    """Run tests in the copy; exit where pytest itself fails, which says nothing about a rule."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--durations=0", "-p", "no:cacheprovider"]
    environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([*words, *tests], cwd=tree, env=environ, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        sys.exit(f"pytest ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return ended.returncode == 0


def main(words: list[str]) -> int:
    """Try the mutants whose names hold one of the words, or all; return 1 where one survives."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in ("sightline", "tests"):
            shutil.copytree(REPO / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPO / "pyproject.toml", folder)
        if not passes(dict.fromkeys(test for mutant in chosen for test in mutant.tests), Path(folder)):
            sys.exit("a test fails without any mutant; run these tests by themselves first")
        for mutant in chosen:
            caught = is_caught(mutant, Path(folder))
            survivors += [] if caught else [mutant.name]
            print(f"{'caught' if caught else 'SURVIVED'}: {mutant.name}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
