"""`launch --check`: whether hosts can be reached, hold the same software, have the interfaces and a free port."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from sightline import __version__
from sightline.hardware.launch.plan import Host, LaunchPlan, in_shell, is_here
from sightline.hardware.launch.ssh import CONNECT_TIMEOUT_S, login

# Runs on the host with the Python that will train there; plain, since Sightline itself may be what is missing.
PROBE = """
import importlib.util, json, os, socket, sys
port = int(sys.argv[1])
version = ""
if importlib.util.find_spec("sightline"):
    import sightline
    version = sightline.__version__
net = "/sys/class/net"
names = sorted(os.listdir(net)) if os.path.isdir(net) else []
free = True
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
    except OSError:
        free = False
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "version": version, "interfaces": names, "free": free}))
"""
PROBE_TIMEOUT_S = 60


@dataclass(frozen=True)
class HostCheck:
    """One thing looked at; `remedy` is empty where all is well."""

    host: str
    what: str
    found: str
    remedy: str = ""


def examine(plan: LaunchPlan, uses_ssh: bool) -> list[HostCheck]:
    """Examine every host; this machine directly, unless the launcher too would come by ssh."""
    findings: list[HostCheck] = []
    for host in plan.hosts:
        findings += _examine_host(plan, host, uses_ssh or not is_here(host.name))
    return [*findings, _reach(plan)]


def _examine_host(plan: LaunchPlan, host: Host, by_ssh: bool) -> list[HostCheck]:
    words = [plan.python, "-c", PROBE, str(plan.port)]
    command = login(plan, host, [in_shell(plan, words)]) if by_ssh else words
    how = "ssh" if by_ssh else "python"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, cwd="/"
        )
    except FileNotFoundError:
        return [
            HostCheck(host.name, how, f"{command[0]} is not installed here", "install it, or name it with --python")
        ]
    except subprocess.TimeoutExpired:
        return [HostCheck(host.name, how, f"no answer in {PROBE_TIMEOUT_S} s", "look at the host")]
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        remedy = f"`ssh -p {plan.ssh_port} {host.name}` must work without a question" if by_ssh else "name --python"
        return [HostCheck(host.name, how, f"exit code {done.returncode}: {said}", remedy)]
    try:
        seen = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return [HostCheck(host.name, how, f"unexpected output: {done.stdout[-200:]!r}", "silence its shell profile")]
    return [HostCheck(host.name, how, f"reached, Python {seen['python']}"), *_judge(plan, host, seen)]


def _judge(plan: LaunchPlan, host: Host, seen: dict[str, object]) -> list[HostCheck]:
    version = str(seen["version"])
    remedy = "" if version == __version__ else f"install sightline {__version__} for {plan.python} there"
    found = [HostCheck(host.name, "sightline", version or "not installed", remedy)]
    names = [str(name) for name in seen["interfaces"]] if isinstance(seen["interfaces"], list) else []
    for wanted in plan.interfaces.split(",") if plan.interfaces else ():
        # The libraries take a prefix: eth means eth0 and eth1.
        is_there = any(name.startswith(wanted) for name in names)
        remedy = "" if is_there else f"it has {', '.join(names) or 'none'}; name one of them with --interfaces"
        found.append(HostCheck(host.name, "interface", wanted if is_there else f"no {wanted}", remedy))
    if host is plan.hosts[0]:
        remedy = "" if seen["free"] else "choose another with --port"
        found.append(HostCheck(host.name, "port", f"{plan.port} is {'free' if seen['free'] else 'in use'}", remedy))
    return found


def _reach(plan: LaunchPlan) -> HostCheck:
    """Try to connect. Nothing listens before a run, so a refused connection means that the host can be reached."""
    first = plan.hosts[0].name
    try:
        with socket.create_connection((first, plan.port), timeout=CONNECT_TIMEOUT_S):
            return HostCheck(first, "way", f"something answers at port {plan.port}", "choose another with --port")
    except ConnectionRefusedError:
        return HostCheck(first, "way", f"port {plan.port} can be reached from here")
    except OSError as error:
        return HostCheck(first, "way", f"port {plan.port}: {error}", "open it in the firewall, or look at the name")


def try_scheduler(command: Sequence[str], text: str) -> HostCheck:
    """Let the scheduler itself check the file, without starting anything."""
    if not shutil.which(command[0]):
        return HostCheck("here", command[0], "not installed", "check where it is, or carry the file there with --print")
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    said = (done.stdout + done.stderr).strip() or "nothing"
    return HostCheck("here", command[0], said, "" if done.returncode == 0 else "fix what it says")


def as_text(findings: Sequence[HostCheck]) -> str:
    """Format one line per finding, as `sightline doctor` writes them."""
    return "\n".join(
        f"{'fail' if each.remedy else 'ok':5} {each.host:16} {each.what:10} {each.found}"
        + (f"  -> {each.remedy}" if each.remedy else "")
        for each in findings
    )
