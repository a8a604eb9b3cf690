"""What an export refuses to leave behind: a file that computes otherwise, an error of the disk that torch hides."""

import errno
from pathlib import Path

import pytest
import torch

from sightline.errors import DiskError, SightlineError
from sightline.export import run

INPUTS = {"zeros": torch.zeros(1, 3), "ones": torch.ones(1, 3)}


def served(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (2 * image,)


served.names = ("logits",)  # type: ignore[attr-defined]


def test_a_file_that_computes_as_the_network_says_how_well():
    said = list(run._compare_raw(lambda image: (2 * image,), served, INPUTS, Path("a.onnx")))
    assert said == [f"{name}: largest relative difference of logits 0.0e+00" for name in INPUTS]


@pytest.mark.parametrize("wrong", [1.5, float("nan")])
def test_a_file_that_computes_otherwise_is_not_kept(wrong: float):
    with pytest.raises(SightlineError, match="a.onnx computes otherwise than the network: .* on ones, at most"):
        list(
            run._compare_raw(
                lambda image: (2 * image + wrong * image,), served, {"ones": INPUTS["ones"]}, Path("a.onnx")
            )
        )


def test_boxes_that_differ_are_not_kept():
    boxes = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]]])
    answer = (boxes, torch.tensor([[0.9, 0.8]]), torch.tensor([[1, 2]]))
    other = (boxes, torch.tensor([[0.9, 0.8]]), torch.tensor([[2, 1]]))
    said = run._compare_boxes(lambda image: answer, lambda image: answer, INPUTS, Path("a.onnx"))
    assert said == "after NMS: 4 of 4 boxes match, scores and corners to 0.0e+00"
    with pytest.raises(SightlineError, match="a.onnx finds other boxes than the network: 0 of 4 boxes match"):
        run._compare_boxes(lambda image: other, lambda image: answer, INPUTS, Path("a.onnx"))


def test_an_error_of_the_disk_is_found_behind_those_of_an_exporter():
    full = OSError(errno.ENOSPC, "No space left on device")
    hidden = RuntimeError("export failed")
    hidden.__cause__ = ValueError("inner")
    hidden.__cause__.__context__ = full
    with pytest.raises(OSError, match="No space left") as raised:
        run._raise_of_disk(hidden)
    assert raised.value is full
    lost = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    with pytest.raises(DiskError, match="torch needs room for temporary files .* name another folder in .* TMPDIR"):
        run._raise_of_disk(lost)
    gone = FileNotFoundError(errno.ENOENT, "No such file")
    with pytest.raises(FileNotFoundError) as found:
        run._raise_of_disk(gone)
    assert found.value is gone
    run._raise_of_disk(RuntimeError("of the network itself"))
