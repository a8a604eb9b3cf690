"""The doctor's findings: on this machine, and on worse ones where a limit or a part is missing."""

import importlib.util
import math
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sightline import cli
from sightline.commands import doctor_checks as doctor
from sightline.commands.doctor_checks import Check, examine
from sightline.hardware import devices, limits, onednn
from sightline.kernels import cudnn


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict[str, Check]:
    return {check.name: check for check in examine(tmp_path_factory.mktemp("runs"), every=True)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def cgroup(tmp_path, monkeypatch) -> Path:
    """An empty tree of cgroups in which we are /job/step."""
    write(tmp_path / "self", "0::/job/step\n")
    monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "self")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "fs")
    return tmp_path / "fs"


def test_this_machine_can_run_everything(findings):
    failures = [check for check in findings.values() if check.status == "fail"]

    assert failures == []


def test_every_subject_is_examined_and_every_problem_has_a_remedy(findings):
    subjects = ["python", "torch", "torchvision", "numpy", "pillow", *devices.KINDS, "precision"]
    subjects += ["fused convolutions", "oneDNN", "malloc", "cores"]
    subjects += [
        "memory",
        "shared memory",
        "open files",
        "disk space",
        "disk writes",
        "jpeg",
        "loader workers",
    ]
    subjects += ["torch.compile", "collectives", "tensorboard", "nibabel", "faster-coco-eval", "timm", "onnxruntime"]
    subjects += ["onnxscript"]

    assert list(findings) == subjects
    assert all(check.value for check in findings.values())
    assert all(check.remedy for check in findings.values() if check.status in ("warn", "fail"))


def test_what_is_absent_shares_a_line_and_what_nobody_acts_on_has_none(findings, tmp_path, capsys):
    checks = [Check("a", "ok", "1"), Check("b", "absent", "none", "pip install b"), Check("c", "warn", "low", "more")]
    checks.append(Check("d", "absent", "untested"))
    first, warned, last = doctor.as_lines(checks)
    assert first.split() == ["ok", "a", "1"] and warned.endswith("low  -> more")
    assert last.split(maxsplit=2)[2] == "b, d; `sightline doctor --all` has reasons and remedies"
    assert len(doctor.as_lines(checks, every=True)) == 4 and "pip install b" in doctor.as_lines(checks, every=True)[1]
    assert cli.main(["doctor", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(word not in said for word in ("oneDNN", "malloc", "untested", "not available"))
    assert said.count("\nabsent ") == 1 and all(kind in said for kind in devices.KINDS)


def test_versions_devices_and_precision_are_shown(findings):
    device = devices.select("auto")

    assert findings["torch"].value == torch.__version__
    assert findings["cpu"].value.startswith("1 x ")
    assert findings["npu"].status == "absent"
    assert findings["npu"].value == "not available: torch_npu is not installed (and untested by us)"
    assert findings["precision"].value == f"auto is {device.resolve_precision('auto')} on {device.kind}"
    assert "gloo" in findings["collectives"].value


def test_allocators_are_found_in_the_process_and_among_the_libraries_of_the_system(tmp_path):
    maps, cache = tmp_path / "maps", tmp_path / "ld.so.cache"
    lib = "/usr/lib/x86_64-linux-gnu"
    maps.write_text(f"7f1-7f2 r-xp 0 08:01 1 {lib}/libc.so.6\n")
    found = doctor.check_allocator(maps, cache)
    assert found.value.startswith("the C library's, neither jemalloc nor TcMalloc is installed; ")
    cache.write_bytes(
        b"glibc-ld.so.cache1.1\0libtcmalloc_minimal.so.4\0/x/libtcmalloc_minimal.so.4\0libjpeg.so.62\0\xff"
    )
    found = doctor.check_allocator(maps, cache)
    assert found.value.startswith("the C library's, libtcmalloc_minimal.so.4 is installed and not loaded; ")
    maps.write_text(f"{maps.read_text()}7f3-7f4 r-xp 0 08:01 2 {lib}/libjemalloc.so.2\n7f5-7f6 rw-p 0 00:00 0 [heap]\n")
    assert doctor.check_allocator(maps, cache).value.startswith("libjemalloc.so.2 is loaded; ")


def test_nothing_is_printed_or_left_behind(tmp_path, capfd):
    doctor.check_disk_writes(tmp_path)
    doctor.check_workers()

    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "fail"), ("2.11.0a0+git1", "ok"), ("2.11.0", "ok"), ("3.0", "ok"), ("1.13", "fail")],
)
def test_old_versions_fail(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)

    check = doctor.check_package("torch")

    assert check.status == status
    assert status == "ok" or check.remedy == "pip install --upgrade torch>=2.11"


def test_a_package_that_cannot_be_imported_fails(monkeypatch):
    monkeypatch.setitem(doctor.PACKAGES, "no_such_package", ("no-such-package", ()))

    check = doctor.check_package("no_such_package")

    assert check.status == "fail"
    assert check.remedy == "pip install --upgrade no-such-package"


def test_an_untested_device_is_a_warning(monkeypatch):
    real = torch.ones
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: True, device_count=lambda: 2))
    monkeypatch.setattr(torch, "ones", lambda size, device: real(size))

    check = doctor.check_device("xpu")

    assert (check.status, check.value) == ("warn", "2 x xpu, untested")


def test_hardware_that_torch_cannot_use_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = devices.KINDS["cuda"]
    monkeypatch.setitem(devices.KINDS, "cuda", devices.replace(row, node=str(tmp_path / "nvidiactl")))

    check = doctor.check_device("cuda")

    assert check.status == "warn"
    assert "although" in check.value
    assert "driver" in check.remedy
    (tmp_path / "nvidiactl").unlink()
    check = doctor.check_device("cuda")
    assert check.status == "absent" and "although" not in check.value and not check.remedy


def test_a_device_that_cannot_add_fails(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", refuse)

    assert doctor.check_device("cpu").status == "fail"


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 16)])
def test_cores_respect_the_quota_of_cgroup_2(monkeypatch, cgroup, quota, cores):
    monkeypatch.setattr(limits, "bound_cores", lambda: 16)
    write(cgroup / "job/cpu.max", quota)
    write(cgroup / "job/step/cpu.max", "max 100000")

    assert limits.usable_cores() == cores


def test_limits_of_cgroup_1(monkeypatch, tmp_path, cgroup):
    monkeypatch.setattr(limits, "bound_cores", lambda: 16)
    write(tmp_path / "self", "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    write(cgroup / "cpu/cpu.cfs_quota_us", "400000")  # in a container the files lie at the top
    write(cgroup / "cpu/cpu.cfs_period_us", "100000")
    write(cgroup / "memory/memory.limit_in_bytes", str(3 << 30))

    assert limits.usable_cores() == 4
    check = doctor.check_memory()
    assert check.status == "warn"
    assert "cgroup limit 3.0 GiB" in check.value


def test_without_cgroups_there_is_no_limit(cgroup):
    assert limits.quota_cores() == math.inf
    assert limits.memory_limit() == math.inf
    assert limits.usable_cores() == limits.bound_cores()


def test_more_threads_than_cores_is_a_warning(monkeypatch, cgroup):
    write(cgroup / "job/cpu.max", "200000 100000")
    monkeypatch.setattr(limits, "bound_cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)

    assert doctor.check_cores().remedy == "add --run.threads 2"


def test_small_shared_memory_and_disk_are_warnings(monkeypatch, tmp_path):
    usage = SimpleNamespace(total=64 << 20, free=60 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)

    assert "--shm-size" in doctor.check_shared_memory(tmp_path).remedy
    assert doctor.check_disk_space(tmp_path).status == "warn"
    assert doctor.check_shared_memory(tmp_path / "absent").status == "absent"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((256, 4096), ("warn", "256", "ulimit -n 4096")),
        ((1023, 1000), ("warn", "1023", "ulimit -n 1023")),
        ((1023, resource.RLIM_INFINITY), ("warn", "1023", "ulimit -n 1024")),
        ((1024, 4096), ("ok", "1024", "")),
        ((resource.RLIM_INFINITY,) * 2, ("ok", "unlimited", "")),
    ],
)
def test_open_files(monkeypatch, limits, expected):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: limits)
    check = doctor.check_open_files()
    assert (check.status, check.value, check.remedy) == expected


def test_a_folder_to_be_created_is_judged_by_its_parent(tmp_path):
    check = doctor.check_disk_writes(tmp_path / "runs" / "first")

    assert check == Check("disk writes", "ok", f"write, fsync and rename work in {tmp_path}")


def test_a_folder_that_cannot_be_written_fails(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)

    check = doctor.check_disk_writes(tmp_path)

    assert check.status == "fail"
    assert "Read-only file system" in check.value


def test_a_decoder_that_lies_fails(monkeypatch):
    decode = pytest.importorskip("sightline.data.decode")
    monkeypatch.setattr(decode, "decode_rgb", lambda data, name: torch.zeros(32, 48, 3).numpy())

    assert doctor.check_jpeg().value == "decodes to wrong pixels"


def test_a_worker_that_dies_fails():
    check = doctor.check_workers(os.abort)

    assert check.status == "fail"
    assert "ends with -6" in check.value


@pytest.mark.parametrize(
    ("probe", "value"),
    [
        (os.getpid, f"needs no workaround for {onednn.ISSUE}: a probe without it is right"),
        (os.abort, f"the workaround for {onednn.ISSUE} is active: a probe without it ends with -6"),
        (signal.pause, f"the workaround for {onednn.ISSUE} is active: a probe without it hangs"),
    ],
)
def test_the_bug_of_onednn_is_looked_for(monkeypatch, probe, value):
    monkeypatch.setattr(doctor, "WORKER_TIMEOUT_S", 0.5 if probe is signal.pause else 60)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)

    assert doctor.check_onednn(probe) == Check("oneDNN", "ok", value)


def test_a_torch_without_onednn_has_no_bug_of_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)

    assert doctor.check_onednn(os.abort) == Check("oneDNN", "absent", "this torch is built without it")


def test_a_missing_compiler_is_a_warning(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")

    assert "lacks a C++ compiler (no-such-compiler)" in doctor.check_compiler().value


def test_a_missing_collective_backend_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)

    check = doctor.check_collectives()

    assert check.status == "warn"
    assert "lacks gloo" in check.value


def test_extras_say_what_they_are_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    check = doctor.check_extra("faster_coco_eval")

    assert (check.status, check.remedy) == ("absent", "pip install faster-coco-eval")
    assert "not installed; needed only for" in check.value


def test_fused_convolutions_are_tried_and_only_a_hopper_misses_them(monkeypatch):
    monkeypatch.setattr(cudnn, "probe", lambda: "")
    assert doctor.check_fused_convolutions().status == "ok"
    monkeypatch.setattr(cudnn, "probe", lambda: "no engine")
    for capability, status in (((9, 0), "warn"), ((8, 0), "absent")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        found = doctor.check_fused_convolutions()
        assert (found.status, found.value) == (status, "not used: no engine")
        assert bool(found.remedy) == (status == "warn")
