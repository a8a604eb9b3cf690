"""Execute the steps of the Dockerfile in a chroot, on a machine without docker, then commands by its entry point.

As root, from the repository; ROOT is changed, and a second start executes all steps again:
    debootstrap --variant=minbase bookworm ROOT
    python tests/dockerfile.py ROOT doctor "prepare shapes --out shapes" "train ..."
--share PATH, before ROOT, shows a folder of this machine there, read-only (package indexes); PIP_* are passed to RUN.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHM = "64m"  # Docker's default
# In a mount and pid namespace of its own, which ends with the command: nothing stays mounted, no process is left.
MOUNT = f"""set -e
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do
    touch "$root/dev/$name" && mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm" && mount -t tmpfs -o size={SHM},mode=1777 tmpfs "$root/dev/shm"
for path in $shared; do
    mkdir -p "$root$path" && mount --rbind -o ro "$path" "$root$path"
done
exec chroot --userspec="$user" "$root" "$@"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (INSTRUCTION, its argument); comments and continued lines as Docker reads them."""
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    for whole in re.split(r"(?<!\\)\n", "\n".join(lines)):
        word, _, argument = whole.replace("\\\n", " ").strip().partition(" ")
        yield word.upper(), argument.strip()


def is_sent(path: str, rules: Sequence[str]) -> bool:
    """Return whether .dockerignore lets the builder see a path: the last rule for it, or for a parent, decides."""
    parts, sent = path.split("/"), True
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for rule in rules:
        pattern = re.escape(rule.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, each) for each in above):
            sent = rule.startswith("!")
    return sent


def context() -> list[str]:
    """Return the files that a build would send, relative to the repository; of folders at its top that are sent."""
    lines = (REPO / ".dockerignore").read_text().splitlines()
    rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    top = [path for path in REPO.iterdir() if is_sent(path.name, rules)]
    files = [path for each in top for path in (each.rglob("*") if each.is_dir() else [each]) if path.is_file()]
    return sorted(name for path in files if is_sent(name := path.relative_to(REPO).as_posix(), rules))


@dataclass
class Image:
    """What the steps so far have made: a folder and the settings of the next step."""

    root: Path
    shared: Sequence[str]
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    folder: str = "/"
    entry: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def step(self, word: str, argument: str) -> None:
        if word == "FROM":
            release = (self.root / "etc/os-release").read_text()
            name = argument.partition(":")[2].partition("-")[0]
            assert f"VERSION_CODENAME={name}\n" in release, f"{self.root} is not Debian {name}"
        elif word == "ENV":
            self.environ |= dict(pair.split("=", 1) for pair in shlex.split(argument))
        elif word == "RUN":
            given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
            self.run(["/bin/sh", "-c", argument], given)
        elif word == "COPY":
            *sources, target = argument.split()
            self.copy(sources, target)
        elif word == "USER":
            self.user = argument
        elif word == "WORKDIR":
            self.folder = argument
            (self.root / argument.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "ENTRYPOINT":
            self.entry = json.loads(argument)
        elif word == "CMD":
            self.words = json.loads(argument)
        else:
            raise SystemExit(f"{word} is not understood here; add it to {__file__}")

    def copy(self, sources: Sequence[str], target: str) -> None:
        assert target.endswith("/"), "this script copies into folders only"
        sent = context()
        for source in sources:
            names = [name for name in sent if name == source or name.startswith(f"{source}/")]
            assert names, f"COPY {source}: .dockerignore keeps it away, or it is not there"
            for name in names:
                below = name[len(source) + 1 :] if name != source else Path(name).name
                to = self.root / self.folder.lstrip("/") / target / below
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPO / name, to)

    def run(self, command: Sequence[str], more: dict[str, str]) -> None:
        home = "/root" if self.user == "0:0" else "/home/sightline"
        settings = {**self.environ, "HOME": home, **more}
        inside = ["env", "-i", *(f"{name}={value}" for name, value in settings.items())]
        inside += ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *command]
        outside = {"root": str(self.root), "user": self.user, "shared": " ".join(self.shared)}
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", MOUNT, "sh", *inside]
        subprocess.run(words, check=True, env={"PATH": os.environ["PATH"], **outside})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("commands", nargs="*", help="arguments of the entry point; without any, those of CMD")
    parser.add_argument("--share", action="append", default=[])
    parser.add_argument("--built", action="store_true", help="the steps were executed before; only run the commands")
    asked = parser.parse_args()
    image = Image(asked.root.resolve(), asked.share)
    shutil.copy("/etc/resolv.conf", image.root / "etc/resolv.conf")  # as docker does
    (image.root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    for word, argument in instructions((REPO / "Dockerfile").read_text()):
        if asked.built and word in ("RUN", "COPY"):
            continue
        print(f"\n=== {word} {argument}", flush=True)
        began = time.monotonic()
        image.step(word, argument)
        print(f"=== done in {time.monotonic() - began:.0f} s", flush=True)
    for words in [shlex.split(each) for each in asked.commands] or [image.words]:
        print(f"\n=== {shlex.join([*image.entry, *words])}  (user {image.user}, in {image.folder})", flush=True)
        image.run([*image.entry, *words], {})


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"exit code {error.returncode}")
