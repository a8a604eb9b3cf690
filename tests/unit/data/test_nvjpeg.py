"""Where libnvjpeg is found, without torchvision being imported; what it does is seen on a GPU (tests/device)."""

import os
from pathlib import Path

import pytest
import torch
import warm

from sightline.data.gpu import nvjpeg
from sightline.data.gpu.nvjpeg import NvjpegError

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")


@needs_cuda_build
def test_nvidias_wheel_goes_before_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = tmp_path / "nvidia" / "cu99" / "lib" / "libnvjpeg.so.99"
    torchvisions = tmp_path / "torchvision.libs" / "libnvjpeg.0123abcd.so.99"
    for file in (wheel, torchvisions, tmp_path / "torchvision" / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    here = tmp_path / "here"
    here.mkdir()
    (here / "program.py").write_text("from sightline.data.gpu import nvjpeg; print(*nvjpeg._places('99'), sep='\\n')")
    done = warm.python(here, "program.py", environ={"PYTHONPATH": f"{tmp_path}:{warm.HERE.parent}"})
    assert done.stdout.splitlines() == [str(wheel), "libnvjpeg.so.99", str(torchvisions)], done.stderr


@needs_cuda_build
def test_the_library_has_all_that_is_called_and_is_found_without_torchvision(tmp_path: Path):
    (tmp_path / "program.py").write_text(
        "import inspect, re, sys; from sightline.data.gpu import nvjpeg; library, _ = nvjpeg._libraries();"
        "names = set(re.findall(r'nvjpeg[A-Z]\\w+', inspect.getsource(nvjpeg.Decoder)));"
        "missing = [name for name in names if name[6] != 'I' and not hasattr(library, name)];"
        "print(len(names) > 15, missing, 'torchvision' in sys.modules)"
    )
    done = warm.python(tmp_path, "program.py", environ={**os.environ, "PYTHONPATH": str(warm.HERE.parent)})
    if "no libnvjpeg" in done.stderr:
        pytest.skip("no libnvjpeg here")
    assert done.stdout.split() == ["True", "[]", "False"]


def test_a_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvjpeg, "_places", lambda major: iter([f"/nowhere/libnvjpeg.so.{major}"]))
    wheels = {"13.2": "pip install nvidia-nvjpeg$", "12.8": "pip install nvidia-nvjpeg-cu12$", None: "without CUDA"}
    for cuda, words in wheels.items():
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(NvjpegError, match=words):
            nvjpeg._libraries.__wrapped__()
