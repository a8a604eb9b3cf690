"""The place of a process from each launcher's variables, which are those that its documents name."""

import os

import pytest

from sightline.errors import UsageError
from sightline.hardware import launch, world
from sightline.hardware.launch.slurm import hosts_of
from sightline.hardware.world import World

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-5226@1",
}
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "first"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_STEP_NODELIST": "gpu[007-008,011]",
    "SLURM_JOB_NODELIST": "gpu[001-064]",
    "SLURM_NTASKS": "512",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "64"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TRAIN_JOB = POD | {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "2",
}
PYTORCH_JOB = POD | {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
INDEXED_JOB = POD | {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job"}


def place_of(environ: dict[str, str]) -> tuple | None:
    found = launch.detect(environ)
    return found and (found.rank, found.size, found.local_rank, found.local_size, found.master_address)


@pytest.mark.parametrize(
    ("environ", "expected", "launcher"),
    [
        (TORCHRUN, (11, 16, 3, 8, "first"), "torchrun"),
        (OPEN_MPI, (1, 2, 1, 2, "127.0.0.1"), "Open MPI"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "first"}, (1, 4, 1, 2, "first"), "Open MPI"),
        (INTEL_MPI, (5, 8, 1, 4, "first"), "MPICH or Intel MPI"),
        (MVAPICH, (1, 2, 1, 2, "127.0.0.1"), "MVAPICH"),
        (SRUN, (9, 20, 1, 8, "gpu007"), "srun"),
        (SRUN | {"MASTER_ADDR": "given"}, (9, 20, 1, 8, "given"), "srun"),
        (SRUN | {"SLURM_NODEID": "2", "SLURM_PROCID": "19", "SLURM_LOCALID": "3"}, (19, 20, 3, 4, "gpu007"), "srun"),
        (TRAIN_JOB, (2, 4, 0, 1, "job-node-0-0.job"), "Kubeflow's operator"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "auto"}, (2, 4, 0, 1, "job-node-0-0.job"), "Kubeflow's operator"),
        (PYTORCH_JOB, (1, 4, 0, 1, "job-master-0"), "Kubernetes"),
        (INDEXED_JOB, (3, 4, 0, 1, "job-0.job"), "Kubernetes"),
    ],
)
def test_each_launcher_tells_the_place(environ: dict[str, str], expected: tuple, launcher: str):
    assert place_of(environ) == expected
    assert launch.detect(environ).launcher == launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "left", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
        BATCH_SCRIPT,  # the script itself is one process, however many tasks it may start
        POD,
        POD | {"JOB_COMPLETION_INDEX": "3"},  # one of many runs that have nothing to do with each other
    ],
)
def test_a_process_that_was_simply_started_has_no_place(environ: dict[str, str]):
    assert launch.detect(environ) is None


# The inner launcher is said first.
@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (TORCHRUN, SRUN),
        (TORCHRUN, OPEN_MPI),
        (TORCHRUN, TRAIN_JOB),
        (TORCHRUN, INDEXED_JOB),
        (OPEN_MPI, SRUN),
        (OPEN_MPI, BATCH_SCRIPT),
        (OPEN_MPI, POD | {"JOB_COMPLETION_INDEX": "0"}),
        (INTEL_MPI, SRUN),
        (SRUN, POD | {"JOB_COMPLETION_INDEX": "0"}),
        # srun --mpi=pmi2 and --mpi=pmix say a part of the same in other words
        (SRUN, {"PMI_RANK": "9", "PMI_SIZE": "20"}),
        (SRUN, {"PMIX_RANK": "9", "PMIX_NAMESPACE": "slurm.pmix.4711.0"}),
    ],
)
def test_of_two_launchers_the_inner_one_counts(inner: dict[str, str], outer: dict[str, str]):
    assert launch.detect(outer | inner) == launch.detect(inner)


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        *[(OPEN_MPI, name) for name in OPEN_MPI if name.startswith("OMPI")],
        *[(INTEL_MPI, name) for name in INTEL_MPI if name != "MASTER_ADDR"],
        *[(SRUN, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")],
        *[(TRAIN_JOB, name) for name in ("PET_NODE_RANK", "PET_NNODES")],
        *[(PYTORCH_JOB, name) for name in ("RANK", "WORLD_SIZE")],
        (INDEXED_JOB, "WORLD_SIZE"),
    ],
)
def test_a_half_set_environment_names_what_is_missing(environ: dict[str, str], missing: str):
    for rest in ({}, {missing: ""}):
        with pytest.raises(UsageError, match=rf"half set by .*: {missing} missing"):
            launch.detect({name: value for name, value in environ.items() if name != missing} | rest)


def test_a_list_of_nodes_that_is_missing_is_named():
    rest = {name: value for name, value in SRUN.items() if not name.endswith("NODELIST")}
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST missing"):
        launch.detect(rest)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "two"}, "OMPI_COMM_WORLD_RANK='two' must be a whole number"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "rank 2 of 2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "local rank -1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "several hosts .* set MASTER_ADDR"),
        (OPEN_MPI | {"MASTER_PORT": "70000"}, "MASTER_PORT must be in 1..65535"),
        (OPEN_MPI | {"MASTER_PORT": "http"}, "MASTER_PORT='http' must be a whole number"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "local rank 3 of 3"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "some"}, "must be whole numbers.*'LOCAL_WORLD_SIZE': 'some'"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 is set, but OMPI_COMM_WORLD_SIZE"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "do not fit 20 tasks"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "eight"}, "must be like 8"),
        (SRUN | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[1-"}, "brackets that do not close"),
        (TRAIN_JOB | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8: .* expects torchrun"),
        (TRAIN_JOB | {"PET_MASTER_ADDR": ""}, "set MASTER_ADDR"),
        (POD | {"PET_RDZV_ENDPOINT": "job:1"}, "PET_RDZV_ENDPOINT=job:1 .* only torchrun understands"),
        (INDEXED_JOB | {"MASTER_ADDR": ""}, "set MASTER_ADDR"),
        (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "4"}, "rank 4 of 4"),
    ],
)
def test_a_wrong_environment_is_refused(environ: dict[str, str], text: str):
    with pytest.raises(UsageError, match=text):
        launch.detect(environ)


def test_the_port_follows_from_the_job():
    """All ranks of a job have the same, another job most likely has another, and what is given is taken."""
    ports = {launch.detect(SRUN | {"SLURM_PROCID": str(8 + n), "SLURM_LOCALID": str(n)}).master_port for n in range(8)}
    assert len(ports) == 1
    other = launch.detect(SRUN | {"SLURM_JOB_ID": "4712"}).master_port
    assert other not in ports and all(20000 <= port < 32000 for port in {other, *ports})
    assert launch.detect(SRUN | {"MASTER_PORT": "5"}).master_port == 5
    assert launch.detect(OPEN_MPI).master_port != launch.detect(OPEN_MPI | {"PMIX_NAMESPACE": "else"}).master_port
    assert launch.detect(TRAIN_JOB).master_port == 29400
    assert launch.detect(INDEXED_JOB).master_port == 29500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[008-011,20]", ["gpu008", "gpu009", "gpu010", "gpu011", "gpu20"]),
        ("a[1,3],b,c[09-10]-ib", ["a1", "a3", "b", "c09-ib", "c10-ib"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_host_lists_of_slurm(text: str, expected: list[str]):
    assert list(hosts_of(text)) == expected


@pytest.mark.parametrize("text", ["a[1-2", "a]1[", "a[x]", "a[1-b]", "a[[1]]", "a[]"])
def test_a_host_list_that_is_none_is_refused(text: str):
    with pytest.raises(UsageError, match="host list"):
        list(hosts_of(text))


def test_only_the_first_of_very_many_hosts_is_looked_at():
    assert next(hosts_of("n[1-999999999999]")) == "n1"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Nothing but what a launcher sets, put back afterwards with all that is written there."""

    def set_to(values: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", dict(values))

    return set_to


def test_torch_gets_the_place_in_its_own_variables(environment):
    """Its rendezvous, and what it starts, read torchrun's names."""
    environment(OPEN_MPI)
    assert world.detect() == World(1, 2, 1)
    told = dict(os.environ)
    assert {name: told[name] for name in TORCHRUN if name != "MASTER_PORT"} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert world.detect() == World(1, 2, 1) and world.local_size(World(1, 2, 1)) == 2
    assert dict(os.environ) == told


def test_one_rank_alone_changes_nothing(environment):
    environment(OPEN_MPI | dict(zip([n for n in OPEN_MPI if n.startswith("OMPI")], "0101", strict=True)))
    before = dict(os.environ)
    assert world.detect() == World() and dict(os.environ) == before
