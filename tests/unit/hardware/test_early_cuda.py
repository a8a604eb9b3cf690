"""CUDA starts beside the imports, only in a process that trains on it, and fails without a word."""

import subprocess
import sys
from pathlib import Path

import pytest

# `torch` here is a folder with the libraries of a build with CUDA; nothing imports it. There is no driver.
BEGIN = """
import os, sys, threading
from sightline import terminal
from sightline.hardware import early_cuda
from sightline.recipe.recipe import Run
early_cuda.NODE = os.devnull
{call}
print(early_cuda.has_begun(), "torch" in sys.modules, file=sys.stderr)
for thread in threading.enumerate():
    if thread is not threading.current_thread(): thread.join()
"""
TRAIN = "from sightline.cli import main; main(['train', 'demo_classification', {}])"


@pytest.fixture
def with_cuda(tmp_path: Path) -> Path:
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(bytes(2**16))
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    return tmp_path


def begun(folder: Path, call: str) -> tuple[str, str]:
    """Return whether CUDA was begun and torch imported, and what was said before that."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + BEGIN.format(call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, _, last = done.stderr.rstrip().rpartition("\n")
    return last, said


def test_a_machine_without_a_driver_says_nothing(with_cuda: Path):
    assert begun(with_cuda, "early_cuda.begin(Run())") == ("True False", "")


def test_the_number_of_queues_is_set_before_cuda_reads_it(with_cuda: Path):
    call = "early_cuda.begin(Run()); print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], file=sys.stderr)"
    assert begun(with_cuda, call) == ("True False", "32")


NOT_BEGUN = """
from sightline.cli import main
early_cuda.begin(Run(device='cpu'))
early_cuda.begin(Run(devices=2))  # its ranks start CUDA
early_cuda.begin(Run(device='cuda:1', affinity='single'))  # threads inherit CPUs, which are not chosen yet
main(['train', 'demo_classification', '--help'])
main(['train', 'demo_classification', '--data', '/dev', '--device', 'cpu'])
main(['train', 'demo_classification', '--no-such-flag', '1'])
main(['check', 'demo_classification', '--no-such-flag', '1'])
early_cuda.NODE = '/dev/none'
early_cuda.begin(Run())
"""


def test_only_a_process_that_trains_on_it_begins_cuda(with_cuda: Path):
    assert begun(with_cuda, NOT_BEGUN)[0] == "False False"


def test_refused_data_are_refused_as_before(with_cuda: Path):
    last, said = begun(with_cuda, TRAIN.format(f"'--data', {str(with_cuda)!r}"))
    assert last == "True False" and said.startswith(f"error: --data.path '{with_cuda}' holds nothing that"), said
