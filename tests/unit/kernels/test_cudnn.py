"""The layer over cuDNN's graph API: plans are built for a GPU that is not here, and what won is kept in files."""

import contextlib
import ctypes
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sightline.kernels import cudnn
from sightline.kernels.cudnn import graphs, plans, records
from sightline.kernels.cudnn.backend import CudnnError, Library
from sightline.kernels.cudnn.graphs import Convolution
from sightline.kernels.cudnn.plans import Engine

H200 = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "l2CacheSize": 62914560,
    "totalGlobalMem": 150_000_000_000,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
}


@pytest.fixture(scope="module")
def library() -> Library:
    """The libcudnn of torch's wheel; absent from builds for the CPU alone."""
    package = find_spec("nvidia.cudnn")
    found = sorted(Path(package.submodule_search_locations[0]).glob("lib/libcudnn.so.9")) if package else []
    if not found:
        pytest.skip("no libcudnn beside this torch")
    try:
        return Library(str(found[0]), json.dumps(H200))
    except (OSError, CudnnError) as error:
        pytest.skip(f"this libcudnn describes no absent device: {error}")


# Shapes of ResNet-50: 1x1 up, 3x3, 3x3 with stride, the last 1x1 at an odd batch.
SHAPES = [
    Convolution(256, 64, 256, 1, 1, 56, 56),
    Convolution(512, 64, 64, 3, 1, 56, 56),
    Convolution(256, 128, 128, 3, 2, 56, 56),
    Convolution(7, 512, 2048, 1, 1, 7, 7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_operation_has_engines_and_each_is_built_again_from_its_knobs(library, shape):
    for graph in (
        graphs.forward(library, shape, normed=False),
        graphs.forward(library, shape, normed=True),
        graphs.wgrad(library, shape),
        graphs.dgrad(library, shape),
        graphs.added_dgrad(library, shape),
    ):
        found = plans.candidates(graph, 4)
        assert found and any(plan.engine.knobs for plan in found)
        for plan in found:
            again = plans.rebuild(graph, plan.engine)
            assert (again.engine, again.workspace) == (plan.engine, plan.workspace)


def test_cudnn_refuses_in_words_and_the_layer_raises(library):
    with pytest.raises(CudnnError, match="engine 999"):
        plans.rebuild(graphs.wgrad(library, SHAPES[0]), Engine(999))
    assert plans.candidates(graphs.wgrad(library, SHAPES[0]), 1)  # and works afterwards


def test_sizes_are_those_of_torch():
    for shape in SHAPES:
        with torch.device("meta"):
            x, weight = torch.empty(shape.input), torch.empty(shape.weight)
            y = torch.nn.functional.conv2d(x, weight, stride=shape.stride, padding=shape.kernel // 2)
        assert shape.output == list(y.shape) and Convolution.of(x, weight, shape.stride) == shape


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sightline" / "cudnn"


def test_what_won_is_kept_and_found_again(cache):
    record = records.Record("a key", {"dgrad": Engine(2, {2: 4, 25: 1}), "wgrad": None}, {"plain": 0.25})
    assert records.read("a key") is None
    records.write(record)
    assert records.read("a key") == record
    assert records.read("another key") is None


def test_a_damaged_record_is_measured_again(cache):
    record = records.Record("a key", {"forward": Engine(2)}, {})
    records.write(record)
    (file,) = cache.iterdir()
    whole = file.read_text()
    for text in (
        "",
        whole[:40],
        "[]",
        whole.replace('"a key"', '"other"'),
        whole.replace('"number": 2', '"number": {}'),
        whole.replace('"number": 2', f'"number": {10**30}'),  # more than 64 bits
        whole.replace('"knobs": {}', '"knobs": {"1": Infinity}'),
        whole.replace('"times_ms": {}', f'"times_ms": {{"plain": {10**400}}}'),
    ):
        assert text != whole
        file.write_text(text)
        assert records.read("a key") is None
    records.write(record)
    assert records.read("a key") == record


def test_what_comes_with_the_package_is_used_until_this_machine_has_measured(cache):
    key, shipped = next((key, record) for key, record in records.known().items() if record.engines.get("plan"))
    assert records.read(key) == shipped
    measured = records.Record(key, {"plan": None}, {"plain": 0.25})
    records.write(measured)
    assert records.read(key) == measured
    (file,) = cache.iterdir()
    file.write_text("{")
    assert records.read(key) == shipped


def test_each_record_of_the_package_names_the_fastest_of_what_was_timed():
    """For gradients two ways are chosen together, from more times than two."""
    found = records.known()
    assert found
    for key, record in found.items():
        operation, _, machine = key.partition(" of ")
        assert " on NVIDIA " in machine and " with cuDNN 9" in machine, key
        assert all(engine is None or (engine.number >= 0 and engine.knobs) for engine in record.engines.values()), key
        if "plan" in record.engines:
            fused = {ms for name, ms in record.times_ms.items() if name.startswith("fused ")} or {float("inf")}
            assert (record.engines["plan"] is not None) == (min(fused) < record.times_ms["plain"]), key
        else:
            assert record.engines.keys() == {"dgrad", "wgrad"} and operation.startswith("gradients"), key


def test_a_cache_that_cannot_be_written_is_not_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    records.write(records.Record("a key", {}, {}))
    assert records.read("a key") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so():
    assert cudnn.unavailable_because() == cudnn.probe() == "no CUDA"


def test_guards_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert "Hopper" in cudnn._try(0) and "A100" in cudnn._try(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 81000)
    assert "cuDNN 9" in cudnn._try(0) and "81000" in cudnn._try(0)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(cudnn.backend, "find_library", lambda: "")
    assert "was not found" in cudnn._try(0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(cudnn.backend, "find_library", lambda: "/nowhere/libcudnn.so.9")
    assert "/nowhere/libcudnn.so.9" in cudnn._try(0)


def test_a_library_that_is_loaded_is_found(library):
    path = cudnn.backend.find_library()
    assert path.endswith("libcudnn.so.9") and ctypes.CDLL(path)
