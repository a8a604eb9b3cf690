"""Lines as a README writes them: what is split, expanded, refused and out of scope."""

import re
import shlex
from pathlib import Path

import pytest

from sightline.errors import UsageError
from sightline.legacy import line, start
from sightline.legacy.command import legacy
from sightline.legacy.line import OutOfScope, logical_lines, read, split
from sightline.legacy.start import Start

VARIABLES = {"PYTHON": "/usr/bin/python3.8", "IMAGENET_HOME": "/data/in", "MPI_ROOT": "/opt/mpi", "SECRET": "x"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("$PYTHON -u train.py --lr=0.1", ["/usr/bin/python3.8", "-u", "train.py", "--lr=0.1"]),
        ("a '--x=$PYTHON; rm' \"b $IMAGENET_HOME\"", ["a", "--x=$PYTHON; rm", "b /data/in"]),
        ("--raw_data_dir=${IMAGENET_HOME}/x # a comment", ["--raw_data_dir=/data/in/x"]),
        ("-np 8 \\ $PYTHON x.py", ["-np", "8", "/usr/bin/python3.8", "x.py"]),
        ("x.py --a \\\n  --b", ["x.py", "--a", "--b"]),
        ("a\\ b c", ["a b", "c"]),
        ("-i '/c/train*' \"~/[x]?\" a~b \\$5 '${HOME%x}'", ["-i", "/c/train*", "~/[x]?", "a~b", "$5", "${HOME%x}"]),
        ("''", [""]),
    ],
)
def test_words_are_those_of_a_shell(text: str, words: list[str]):
    assert split(text, VARIABLES) == words


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train.py $(whoami)", "`$(`"),
        ("train.py --x=`whoami`", "backtick"),
        ('train.py "$(whoami)"', "$(whoami)"),
        ("train.py; rm -rf x", "`;`"),
        ("train.py | tee log", "`|`"),
        ("train.py & ", "`&`"),
        ("train.py && ls", "`&`"),
        ("train.py > log", "`>`"),
        ("train.py 2>&1", "`>`"),
        ("train.py < in", "`<`"),
        ("(train.py)", "`(`"),
        ("train.py --x=$SECRET", "$SECRET is not expanded"),
        ("train.py --x=$HOME", "$HOME is not set"),
        ("ssd.py -e <epoch> -b <batch_size>", "<epoch>, <batch_size> stand for values"),
        ("train.py 'x", "does not close"),
        ("train.py --x=${HOME%x}", "`--x=${HOME%x}`: of `$`, only $NAME and ${NAME} are expanded"),
        ('train.py "${HOME%x}"', "only $NAME and ${NAME} are expanded"),
        ("train.py --x $'a'", "`$`: of `$`"),
        ("train.py ~/x", "`~` is not expanded here; write $HOME"),
        ("TMP_DIR=~/x train.py", "`~` is not expanded"),
        (
            "train.py a*b",
            "replace `*` by names of files, and none is started here; write the names, or quote it: 'a*b'",
        ),
        ("train.py a?b", "replace `?`"),
        ("train.py --x=[ab]", "replace `[`"),
    ],
)
def test_what_only_a_shell_could_do_is_refused_by_name(text: str, named: str):
    with pytest.raises(UsageError) as error:
        split(text, VARIABLES)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "pip install -r x",
        "$PYTHON -m pip install -r requirements.txt",
        "git clone -b [version] https://x && cd y",
        "docker run -it x",
        "sudo apt install x",
        "cd x",
        "wget -qO- https://x | bash",
        "for f in *.tar; do mkdir $d; done",
        "sudo ip link set <interface_name> up",
    ],
)
def test_lines_that_set_up_a_machine_are_out_of_scope(text: str):
    with pytest.raises(OutOfScope, match="out of scope"):
        split(text, VARIABLES)


def test_a_text_becomes_one_line_per_command():
    text = "# note\ncd x \\\n  y\n\nfor f in *; do\n  d=`x`\ndone\n$PYTHON demo.py --a 1\n--b 2\nls\n"
    assert list(logical_lines(text)) == ["cd x    y", "for f in *; do d=`x` done", "$PYTHON demo.py --a 1 --b 2", "ls"]


def test_an_export_holds_where_a_shell_would_take_it_and_as_one_readme_writes_it():
    assert line.export_of("export A=1 B='2 3'", {}) == {"A": "1", "B": "2 3"}
    assert line.export_of('export MPI_TCP_INCLUDE: "eth0"', {}) == {"MPI_TCP_INCLUDE": "eth0"}
    assert line.export_of("export PYTHONPATH=/x:$PYTHONPATH", {}) == {"PYTHONPATH": "/x:"}
    assert line.export_of("python x.py", {}) is None
    with pytest.raises(OutOfScope, match="runs another command"):
        line.export_of("export TMP_DIR=$(mktemp -d)", {})
    with pytest.raises(UsageError, match="write export NAME=VALUE"):
        line.export_of("export A", {})


def started(text: str) -> line.Line:
    return read(split(text, VARIABLES), Start())


def test_mpirun_says_ranks_hosts_networks_and_variables():
    found = started(
        "mpirun --allow-run-as-root --mca plm_rsh_args -p4022 --bind-to core --map-by socket:PE=7 -np 16 "
        "--mca btl_tcp_if_include 192.10.100.174/24 --tag-output --prefix $MPI_ROOT --output-filename /tmp/log "
        "-H a:8,b:8 -x HABANA_LOGS -x HCCL_SOCKET_IFNAME=eth0 -x HCCL_OVER_TCP=1 $PYTHON ssd.py --use_horovod"
    )
    start = found.start
    assert (found.script, found.arguments) == ("ssd.py", ("--use_horovod",))
    assert (start.ranks, start.hosts) == (16, (("a", 8), ("b", 8)))
    assert (
        start.launch_words()
        == (
            "--hosts a:8,b:8 --launcher mpirun --ssh-port 4022 --mpi.networks 192.10.100.174/24 --interfaces eth0 "
            "--mpi.prefix /opt/mpi --mpi.root --output /tmp/log --env HCCL_OVER_TCP=1"
        ).split()
    )


def test_mpirun_on_one_host_and_torchrun_say_ranks_only():
    assert started("mpirun --np 8 python3 ssd.py").start.ranks == 8
    assert started("/usr/bin/mpirun -np 2 -H localhost:2 ssd.py").start.hosts == ()
    assert started("torchrun --nproc_per_node=4 --standalone train.py --x").start.ranks == 4
    assert started("python3 -m torch.distributed.run --nproc-per-node 4 train.py").start.ranks == 4
    assert started("CUDA_VISIBLE_DEVICES=1 -u train.py").start.passed == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("mpirun --rankfile x ssd.py", "mpirun --rankfile"),
        ("mpirun -np eight ssd.py", "-np eight"),
        ("mpirun -np 8 -H a:8,b:8 ssd.py", "-H names 16 slots"),
        ("mpirun --mca orte_base_help_aggregate 0 ssd.py", "orte_base_help_aggregate"),
        ("mpirun -np", "needs 1 value"),
        ("torchrun --nnodes 2 --nproc_per_node 8 train.py", "--nnodes 2"),
        ("FOO=1 train.py", "FOO=1"),
        ("python3 -m http.server", "-m http.server"),
        ("mpirun -np 8", "names no script"),
        ("sightline train resnet50", "one of ours already"),
    ],
)
def test_words_before_a_script_that_cannot_be_kept_are_named(text: str, named: str):
    with pytest.raises(UsageError) as error:
        started(text)
    assert named in str(error.value)


def documented() -> list[str]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "howto" / "legacy.md").read_text(encoding="utf-8")
    return [each for each in re.findall(r"^sightline legacy (.+)", text, re.MULTILINE) if "--from" not in each]


@pytest.mark.parametrize("command", documented())
def test_documented_commands_print_what_they_become(command: str):
    shown: list[str] = []
    legacy(["--print", *shlex.split(command)], shown.append, run=pytest.fail, environ={})
    assert "sightline train" in shown[0] or "ssd.py: " in shown[0]


def test_a_quoted_variable_expands_and_other_signs_stay():
    words = [line.with_listed(word, {}) for word in ("$PYTHON", "${PYTHON}x", "--data=a$b", "$PYTHONS")]
    assert words == ["python3", "python3x", "--data=a$b", "$PYTHONS"]


def test_a_printed_file_continues_after_a_line_to_fill_in_and_lists_all_of_them_at_the_end(tmp_path: Path):
    file = tmp_path / "lines"
    file.write_text(
        "ssd.py -e <epoch> -b 8\nssd.py -e 3\nexport HCCL_SOCKET_IFNAME=<interface_name>\nssd.py --nope\nssd.py -e 4\n"
    )
    shown: list[str] = []
    with pytest.raises(UsageError) as error:
        legacy(["--print", "--from", str(file)], shown.append, run=pytest.fail, environ={})
    epochs = [re.findall(r"--train.epochs (\d+)", text) for text in shown if text.startswith("sightline train")]
    assert epochs == [["3"], ["4"]] and shown[-1] == f"{file}: 2 commands, 0 lines out of scope"
    first, *listed = str(error.value).splitlines()
    assert first == f"{file}: 3 lines cannot be run as written:"
    assert listed[:2] == [
        "  ssd.py -e <epoch> -b 8: <epoch> stands for a value of yours; write it in",
        "  export HCCL_SOCKET_IFNAME=<interface_name>: <interface_name> stands for a value of yours; write it in",
    ]
    assert len(listed) == 3 and listed[2].startswith("  ssd.py --nope: ssd.py: unrecognized arguments: --nope")


def test_a_file_that_is_run_stops_at_a_line_to_fill_in(tmp_path: Path):
    (tmp_path / "lines").write_text("ssd.py -e <epoch>\nssd.py -e 3\n")
    with pytest.raises(UsageError, match="<epoch> stands for a value of yours"):
        legacy(["--from", str(tmp_path / "lines")], print, run=pytest.fail, environ={})


@pytest.mark.parametrize(
    "name",
    [
        *(
            "TORCHINDUCTOR_CACHE_DIR",
            "TORCH_COMPILE_DEBUG_DIR",
            "TORCH_HOME",
            "TORCH_EXTENSIONS_DIR",
            "TRITON_CACHE_DIR",
        ),
        *("CUDA_INJECTION64_PATH", "CUDA_CACHE_PATH", "NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "OMP_TOOL_LIBRARIES"),
        *("LD_PRELOAD", "PATH", "HOME", "SIGHTLINE_STARTER"),
    ],
)
def test_a_line_sets_nothing_that_names_files_or_code(name: str):
    begun = start.with_exports(Start(), {name: "/evil", "OMP_NUM_THREADS": "4"})
    assert begun.passed == {"OMP_NUM_THREADS": "4"}  # export lines of a file
    if name in start.VARIABLES:
        assert start.with_variables(Start(), {name: "/evil"}).passed == {}
    else:
        with pytest.raises(
            UsageError, match=f"{name}=/evil: not a variable of the READMEs, .* export it in your shell"
        ):
            read(split(f"{name}=/evil python3 train.py", {}), Start())


def test_variables_that_a_line_sets_name_no_files():
    assert not [name for name in start.PASSED if re.search("PATH|DIR|FILE|HOME|PLUGIN|LIB|CACHE|INJECT|TOOL", name)]
