"""Who starts how many ranks where: the words before a script, mpirun's and torchrun's options, and the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sightline.errors import UsageError

Row = tuple[str, str, str]  # old, new, effect
NETWORK = re.compile(r"[0-9.]+/\d+")
SSH_PORT = 3022  # of the vendor's containers

# name -> (what it becomes, why); "" where it has no meaning here.
VARIABLES: dict[str, tuple[str, str]] = {
    "MULTI_HLS_IPS": ("launch --hosts", "the hosts, each with --num_workers_per_hls ranks"),
    "MPI_TCP_INCLUDE": ("--mpi.networks, --interfaces", "networks or interfaces between hosts"),
    "HCCL_SOCKET_IFNAME": ("--interfaces", "for NCCL, gloo and HCCL alike"),
    "HCCL_OVER_TCP": ("--env", "carried along to every host; other backends choose their transport"),
    "DOCKER_SSHD_PORT": ("--ssh-port", "of the hosts; 3022 if unset, as there"),
    "MPI_ROOT": ("--mpi.prefix", "folder of Open MPI on the hosts"),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": ("--run.reduce hierarchical", "within a host, then between hosts"),
    "FORCE_HABANA_IMAGENET_LOADER_FALLBACK": ("--data.decoder cpu", "and the TFRecords of --data_dir"),
    "PT_HPU_MEDIA_PIPE": ("--data.decoder cpu", "when 0, f or false"),
    "PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION": ("--train.precision bf16", "what --amp then means"),
    "PT_HPU_LAZY_MODE": ("", "lazy and eager graphs are the vendor's; --run.compile and --run.graph decide here"),
    "PT_HPU_GPU_MIGRATION": ("", "a recipe runs on any device; `sightline migrate` is for scripts of your own"),
    "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": ("", "shapes are static here"),
    "GPU_MIGRATION_LOG_LEVEL": ("", "nothing is rewritten, so there is nothing to log"),
    "DATALOADER_FALLBACK_EN": ("", "--data.decoder auto falls back and says why"),
    "HCL_CONFIG_PATH": ("", "ranks find each other without a file"),
    "HABANA_HCCL_COMM_API": ("", "torch.distributed chooses the backend"),
    "HABANA_NCCL_COMM_API": ("", "torch.distributed chooses the backend"),
    "HABANA_LOGS": ("", "logs lie in the run folder"),
    "GC_KERNEL_PATH": ("", "kernels of the vendor's graph compiler"),
    "LD_PRELOAD": ("", "jemalloc and TcMalloc are not needed: batches lie in buffers that are reused"),
    "PYTHONPATH": ("", "the originals' code is not imported"),
    "PYTHON": ("", "this Python runs"),
    "HBN_TF_REGISTER_DATASETOPS": ("", "TensorFlow's; --run.device-prefetch is on"),
    "TF_BF16_CONVERSION": ("", "TensorFlow's; --train.precision decides"),
    "TF_ENABLE_BF16_CONVERSION": ("", "TensorFlow's; --train.precision decides"),
    "TF_DISABLE_SCOPED_ALLOCATOR": ("", "TensorFlow's; gradients travel in buckets (--run.bucket-mb)"),
    "TF_DISABLE_MKL": ("", "TensorFlow's"),
    "TF_DONT_CLUSTER": ("", "TensorFlow's"),
    "TF_RECIPE_CACHE_PATH": ("", "compiled graphs are cached by torch"),
}
# Variables that a line may set and that our processes read as they are: devices, threads, networks. A file of lines may
# be a stranger's, so none here names a file, a folder or a library (CUDA_INJECTION64_PATH, OMP_TOOL_LIBRARIES and
# NCCL_NET_PLUGIN load code, TORCHINDUCTOR_CACHE_DIR has some, NCCL_DEBUG_FILE is written).
PASSED = frozenset(
    """
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    HABANA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES
    OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES OMP_DYNAMIC OMP_WAIT_POLICY MKL_NUM_THREADS MKL_DYNAMIC
    MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME
    NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_NET_GDR_LEVEL NCCL_ALGO
    NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_TC NCCL_PROTO
    NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_BUFFSIZE NCCL_DEBUG
    NCCL_DEBUG_SUBSYS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_DISTRIBUTED_DEBUG
    """.split()
)

BOUND = (
    "ranks on several hosts are bound to their share of the cores (launch --cores); on one: "
    "--set run.affinity=socket_unique_continuous"
)
# mpirun's options: how many values, and what becomes of them ("" is handled by name below).
MPIRUN: dict[str, tuple[int, str]] = {
    "-np": (1, ""),
    "--np": (1, ""),
    "-n": (1, ""),
    "--n": (1, ""),
    "-H": (1, ""),
    "-host": (1, ""),
    "--host": (1, ""),
    "-x": (1, ""),
    "--mca": (2, ""),
    "-mca": (2, ""),
    "--prefix": (1, ""),
    "--output-filename": (1, ""),
    "--allow-run-as-root": (0, ""),
    "--bind-to": (1, BOUND),
    "--map-by": (1, BOUND),
    "--tag-output": (0, "rank 0 speaks for all; --set run.rank-output=all tags every rank's lines"),
    "--merge-stderr-to-stdout": (0, "both go to the terminal"),
    "--report-bindings": (0, "bindings are not shown"),
    "--oversubscribe": (0, "any number of CPU ranks may start"),
}
MCA = {"plm_rsh_args", "plm_ssh_args", "btl_tcp_if_include", "oob_tcp_if_include"}


@dataclass(frozen=True)
class Start:
    """The ranks that a command line starts, and where."""

    launcher: str = ""
    """mpirun or torchrun, where the line begins with one."""
    ranks: int = 0
    """Number on all hosts; 0 if neither the line nor the environment gives it."""
    is_rank: bool = False
    """A launcher has started this process as one of the ranks already."""
    rank: int = 0
    hosts: tuple[tuple[str, int], ...] = ()
    """Name and ranks of each, if there are several."""
    networks: str = ""
    interfaces: str = ""
    ssh_port: int = 0
    prefix: str = ""
    is_root: bool = False
    output: str = ""
    """Folder for the output of each rank."""
    device: str = ""
    """cpu, or one by its number; "" is what the machine has."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the line and of this process that VARIABLES or PASSED list."""
    rows: tuple[Row, ...] = ()
    """Rows of the table for the words before the script."""

    @property
    def passed(self) -> dict[str, str]:
        """Return variables that our processes read."""
        return {name: value for name, value in self.variables.items() if name in PASSED}

    def launch_words(self) -> list[str]:
        """Return options of `sightline launch` for several hosts."""
        words = ["--hosts", ",".join(f"{name}:{slots}" for name, slots in self.hosts), "--launcher", "mpirun"]
        words += ["--ssh-port", str(self.ssh_port)] if self.ssh_port else []
        words += ["--mpi.networks", self.networks] if self.networks else []
        words += ["--interfaces", self.interfaces] if self.interfaces else []
        words += ["--mpi.prefix", self.prefix] if self.prefix else []
        words += ["--mpi.root"] if self.is_root else []
        words += ["--output", self.output] if self.output else []
        env = {**self.passed, **{n: v for n, v in self.variables.items() if n == "HCCL_OVER_TCP"}}
        for name, value in env.items():
            words += ["--env", f"{name}={value}"]
        return words


def of_environment(environ: Mapping[str, str]) -> Start:
    """Return what the environment of this process says: its variables that act here, and ranks that are started."""
    from sightline.hardware.launch import detect

    known = {name: environ[name] for name, (new, _) in VARIABLES.items() if new and environ.get(name)}
    place = detect(environ)
    if place is None or (place.size == 1 and place.launcher != "torchrun"):
        return Start(variables=known)
    return Start(ranks=place.size, is_rank=True, rank=place.rank, variables=known)


def with_exports(start: Start, exported: Mapping[str, str]) -> Start:
    """Take over what earlier `export` lines of a file set, as far as it is known here."""
    return with_variables(start, {n: v for n, v in exported.items() if n in VARIABLES or n in PASSED})


def with_variables(start: Start, variables: Mapping[str, str]) -> Start:
    """Take over variables that a line sets; unknown ones are refused by name."""
    rows = list(start.rows)
    for name, value in variables.items():
        if name in VARIABLES:
            rows.append((f"{name}={value}", VARIABLES[name][0] or "-", VARIABLES[name][1]))
        elif name not in PASSED:
            raise UsageError(
                f"{name}={value}: not a variable of the READMEs, nor of those that a line may set; leave it out, or "
                f"export it in your shell before"
            )
    return replace(start, variables={**start.variables, **variables}, rows=tuple(rows))


def read_mpirun(words: Sequence[str], start: Start) -> tuple[Start, list[str]]:
    """Read mpirun's options; return the start and the words behind them."""
    rest = list(words)
    rows: list[Row] = []
    found: dict[str, str] = {}
    variables: dict[str, str] = {}
    mca: dict[str, str] = {}
    while rest and rest[0].startswith("-"):
        option, equals, attached = rest.pop(0).partition("=")
        if option not in MPIRUN:
            raise UsageError(f"mpirun {option}: not an option that the READMEs use; known: {', '.join(MPIRUN)}")
        count, why = MPIRUN[option]
        values = [attached] if equals else rest[:count]
        del rest[: 0 if equals else count]
        if len(values) < count:
            raise UsageError(f"mpirun {option} needs {count} value{'s' * (count > 1)}, and the line ends")
        if why:
            rows.append((" ".join([option, *values]), "-", why))
        elif option == "-x":
            name, has_value, value = values[0].partition("=")
            if has_value:
                variables[name] = value
            else:
                rows.append((f"-x {name}", "-", "variables that ranks need go along by themselves (launch --forward)"))
        elif option.endswith("mca"):
            if values[0] not in MCA:
                raise UsageError(f"mpirun {option} {values[0]}: not a parameter that the READMEs use; leave it out")
            mca[values[0]] = values[1]
        else:
            found["host" if option == "-H" else option.lstrip("-")] = " ".join(values)
    start = with_variables(replace(start, launcher="mpirun", rows=(*start.rows, *rows)), variables)
    return _with_options(start, found, mca), rest


def _with_options(start: Start, found: Mapping[str, str], mca: Mapping[str, str]) -> Start:
    """Apply the options for hosts and numbers of ranks."""
    counts = [found[name] for name in ("np", "n") if name in found]
    hosts = _hosts(found.get("host", ""))
    if counts and not (counts[0].isdecimal() and int(counts[0])):
        raise UsageError(f"mpirun -np {counts[0]}: expected a number of ranks, e.g. -np 8")
    ranks = int(counts[0]) if counts else sum(slots for _, slots in hosts) or 1
    if hosts and sum(slots for _, slots in hosts) != ranks:
        raise UsageError(f"mpirun -np {ranks}, but -H names {sum(s for _, s in hosts)} slots; make them equal")
    rows: list[Row] = [("mpirun", "-", "our own launcher starts the ranks")]
    include = mca.get("btl_tcp_if_include", mca.get("oob_tcp_if_include", ""))
    port = mca.get("plm_rsh_args", mca.get("plm_ssh_args", "")).removeprefix("-p").strip()
    if port and not port.isdecimal():
        raise UsageError(f"mpirun --mca plm_rsh_args '{mca.get('plm_rsh_args')}': expected a port, e.g. -p3022")
    start = with_networks(start, include)
    return replace(
        start,
        ranks=ranks,
        hosts=hosts if len(hosts) > 1 else (),
        ssh_port=int(port or 0),
        prefix=found.get("prefix", ""),
        is_root="allow-run-as-root" in found,
        output=found.get("output-filename", ""),
        rows=(*start.rows, *rows),
    )


def with_networks(start: Start, include: str) -> Start:
    """Set networks such as 10.0.0.0/24, for mpirun only, or interfaces by name, for all backends."""
    interfaces = start.variables.get("HCCL_SOCKET_IFNAME", "")
    if not include:
        return replace(start, interfaces=interfaces)
    if all(NETWORK.fullmatch(part) for part in include.split(",")):
        return replace(start, networks=include, interfaces=interfaces)
    return replace(start, interfaces=interfaces or include)


def _hosts(text: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for part in text.split(",") if text else ():
        name, colon, slots = part.partition(":")
        if not name or (colon and not slots.isdecimal()):
            raise UsageError(f"mpirun -H {text}: '{part}' is not HOST:RANKS, e.g. 192.10.100.174:8")
        hosts.append((name, int(slots) if colon else 1))
    return tuple(hosts)


TORCHRUN_ALONE = {"--standalone", "--no-python", "--no_python"}


def read_torchrun(words: Sequence[str], start: Start) -> tuple[Start, list[str]]:
    """Read torchrun's options; return the start and the words behind them."""
    rest = list(words)
    ranks = 1
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in TORCHRUN_ALONE:
            continue
        if not equals:
            if not rest:
                raise UsageError(f"torchrun {option} needs a value, and the line ends")
            value = rest.pop(0)
        name = option.replace("_", "-")
        if name == "--nproc-per-node":
            if not (value.isdecimal() and int(value)):
                raise UsageError(f"torchrun {option} {value}: expected a number of ranks, e.g. 8")
            ranks = int(value)
        elif name == "--nnodes" and value not in ("1", "1:1"):
            raise UsageError(
                f"torchrun --nnodes {value}: a line for one host does not name the others; start `torchrun ... -m "
                "sightline legacy SCRIPT ARGS` on each of them, or write mpirun -H a:8,b:8"
            )
        elif name == "-m":
            raise UsageError(f"torchrun -m {value}: expected an original script, e.g. train.py")
    row = ("torchrun", f"--run.devices {ranks}" if ranks > 1 else "-", "our own launcher starts the ranks")
    return replace(start, launcher="torchrun", ranks=ranks, rows=(*start.rows, row)), rest
