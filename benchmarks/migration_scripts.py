"""Run public training scripts, unmodified, under `sightline migrate` on a CPU, and beside it in their own CPU mode.

    git clone https://github.com/pytorch/examples repositories/pytorch/examples     # and the others of the table
    python benchmarks/migration_scripts.py --repositories repositories
    python benchmarks/migration_scripts.py --repositories repositories --only pytorch/vision --keep

migration_scripts.toml names repository, commit, script, arguments and data. No script is part of this repository: the
reader clones them. Data are tiny and made here. Both runs start with the same seed; the numbers that follow words such
as loss and acc are compared one by one. The table goes to standard output, a JSON to --out.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import pickle
import random
import re
import runpy
import shlex
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
MODES = ("migrated", "own")
SOURCES = {".py", ".yaml", ".yml", ".json", ".toml", ".cfg"}
NUMBERS = re.compile(
    r"(?i)(?:loss\w*|acc\w*(?:@\d)?|prec\w*|ppl|perplexity|err\w*|kl\w*|reconst\w*)[^\d\n-]{0,14}"
    r"(-?\d+\.\d+(?:e[-+]?\d+)?|nan)"
)


def images(folder: Path, classes: int = 6, train: int = 12, val: int = 6) -> None:
    """Make classes of small JPEG files: train and val."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            place = folder / "images" / split / f"class{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 255, (48, 48, 3), np.uint8)
                pixels[..., label % 3] = np.minimum(255, pixels[..., label % 3].astype(int) // 2 + 40 * label)
                Image.fromarray(pixels).save(place / f"{number}.jpg", quality=90)


def few_images(folder: Path) -> None:
    """Make two classes of four images, for scripts that crop to 224 pixels."""
    images(folder, classes=2, train=4, val=2)


def mnist(folder: Path) -> None:
    """Make the four files of MNIST, with 128 and 64 digits of noise, where torchvision looks for them."""
    import numpy as np

    noise = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 128), ("t10k", 64)):
        pixels = noise.integers(0, 255, (count, 28, 28), np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes())
        labels = noise.integers(0, 10, count, np.uint8)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def cifar(folder: Path) -> None:
    """Make the files of CIFAR-10 and CIFAR-100 with 80 and 20 images of noise; see accept_cifar."""
    import numpy as np

    noise = np.random.default_rng(0)
    ten, hundred = folder / "cifar-10-batches-py", folder / "cifar-100-python"
    names = {f"data_batch_{number}": 16 for number in range(1, 6)} | {"test_batch": 20}
    for place, counts, key, classes in (
        (ten, names, "labels", 10), (hundred, {"train": 80, "test": 20}, "fine_labels", 100),
    ):  # fmt: skip
        place.mkdir(parents=True)
        for name, count in counts.items():
            content = {
                "data": noise.integers(0, 255, (count, 3072), np.uint8),
                key: [n % classes for n in range(count)],
            }
            (place / name).write_bytes(pickle.dumps(content))
    (ten / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(n) for n in range(10)]}))
    (hundred / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(n) for n in range(100)]}))


def accept_cifar() -> None:
    """Let torchvision read the files of `cifar`, whose checksums are not those of the real ones."""
    from torchvision.datasets import cifar as reader

    reader.check_integrity = lambda path, md5=None: os.path.isfile(path)


def citations(folder: Path) -> None:
    """Make a graph of 1600 papers in the format of Cora."""
    import numpy as np

    noise = np.random.default_rng(0)
    folder.mkdir(parents=True)
    words = noise.integers(0, 2, (1600, 12))
    papers = [f"{number}\t" + "\t".join(map(str, row)) + f"\tclass{number % 7}" for number, row in enumerate(words)]
    (folder / "cora.content").write_text("\n".join(papers) + "\n")
    links = [f"{a}\t{b}" for a, b in noise.integers(0, 1600, (3000, 2))]
    (folder / "cora.cites").write_text("\n".join(links) + "\n")


def characters(folder: Path) -> None:
    """Make train.bin, val.bin and meta.pkl of nanoGPT, and a plain text."""
    import numpy as np

    noise = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        noise.integers(0, 65, 4000).astype(np.uint16).tofile(folder / f"{split}.bin")
    letters = [chr(32 + number) for number in range(65)]
    meta = {"vocab_size": 65, "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    words = [" ".join(noise.choice(["a", "tree", "grows", "near", "the", "old", "mill"], 12)) for _ in range(60)]
    for name in ("train.txt", "valid.txt", "test.txt", "input.txt"):
        (folder / name).write_text("\n".join(words) + "\n")


DATA: dict[str, Callable[[Path], None]] = {
    "images": images, "few_images": few_images, "mnist": mnist, "cifar": cifar, "citations": citations,
    "characters": characters,
}  # fmt: skip


def run_seeded(words: list[str]) -> None:
    """Become `python script args` with fixed seeds; the script itself is not touched."""
    import numpy as np
    import torch

    random.seed(0), torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  scripts draw from the global generator
    if os.environ["MIGRATION_DATA"] == "cifar":
        accept_cifar()
    atexit.register(lambda: Path(os.environ["MIGRATION_TIMES"]).write_text(f"{sum(os.times()[:4]):.1f}"))
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def git_folder(repositories: Path, name: str) -> Path | None:
    """Return the git folder of a clone (owner/name) or of a mirror (owner+name/repo)."""
    mirror = repositories / name.replace("/", "+") / "repo"
    for path in (repositories / name / ".git", repositories / name, mirror, mirror / ".git"):
        if (path / "HEAD").exists():
            return path
    return None


def check_out(git: Path, commit: str, folder: Path) -> None:
    """Write source and settings of a commit; images and weights of a repository stay where they are."""
    ask = ["git", f"--git-dir={git}"]
    listed = subprocess.run([*ask, "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if Path(name).suffix in SOURCES]
    wanted = "".join(f"{commit}:{name}\n" for name in names).encode()
    content = subprocess.run([*ask, "cat-file", "--batch"], input=wanted, capture_output=True, check=True).stdout
    for name in names:
        head, _, content = content.partition(b"\n")  # `<object> blob <bytes>`, the bytes, a newline
        if head.endswith(b" missing"):
            continue
        size = int(head.rsplit(b" ", 1)[1])
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[:size])
        content = content[size + 1 :]


def run(entry: dict[str, Any], arguments: str, folder: Path, flags: list[str] | None, timeout: int) -> dict[str, Any]:
    """Run one script in a fresh copy; `flags` of `sightline migrate`, or None for the script's own CPU mode."""
    source, script = folder / "source", folder / "source" / entry["path"]
    check_out(entry["git"], entry["commit"], source)
    places = [source / place for place in entry.get("places", ["data"])]
    for place in places if entry.get("data") else []:
        DATA[entry["data"]](place)
    for name in ("../out", *entry.get("folders", [])):  # folders that the repository keeps empty
        (source / name).mkdir(parents=True, exist_ok=True)
    named = {"data": places[0] / "images" if "images" in entry.get("data", "") else places[0],
             "out": folder / "out", "source": source}  # fmt: skip
    words = shlex.split(arguments.format(**named))
    migrate = [] if flags is None else ["-m", "sightline", "migrate", "--target", "cpu", "--log", str(folder / "log")]
    command = [sys.executable, *migrate, *(flags or []), str(Path(__file__).resolve()), "--seeded", str(script), *words]
    hidden = "none" if flags is not None else ""
    installed = [str(source)] if entry.get("is_package") else []  # as after `pip install -e .`
    path = os.pathsep.join([str(REPO), str(REPO / "packages" / "migrate"), *installed])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": hidden}
    environment |= {"PYTHONHASHSEED": "0"}  # some scripts number their classes in the order of a set
    environment |= {"MIGRATION_DATA": entry.get("data", ""), "MIGRATION_TIMES": str(folder / "times")}
    environment |= {name: value.format(**named) for name, value in entry.get("environment", {}).items()}
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, errors="replace",
            timeout=timeout, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        code, text, error = done.returncode, done.stdout + done.stderr, done.stderr
    except subprocess.TimeoutExpired:
        code, text, error = -1, "", f"not done after {timeout} s"
    seconds = time.perf_counter() - begin
    written = [path for pattern in entry.get("logs", []) for path in sorted(source.glob(pattern))]
    text += "".join(path.read_text() for path in written)
    (folder / "output.txt").write_text(text + error)
    busy = float((folder / "times").read_text()) if (folder / "times").exists() else None
    found = {"code": code, "seconds": round(seconds, 1), "cpu_seconds": busy}
    return found | {"numbers": numbers_in(text), "error": why(error)}


def numbers_in(text: str) -> list[str]:
    """Return the numbers after words such as loss, but for warnings; without any, all that are not times."""
    lines = [line for line in text.splitlines() if not re.search(r"(?i)warn|deprecated|sightline migrate", line)]
    plain = [line for line in lines if not re.search(r"(?i)time|sec|eta|/s\b|\d s\b|\ds/", line)]
    return NUMBERS.findall("\n".join(lines)) or re.findall(r"-?\d+\.\d+", "\n".join(plain))


def why(error: str) -> str:
    """Return the last line that names an error."""
    named = [
        line for line in error.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b|not done|.* error: ", line)
    ]
    return named[-1][:160] if named else ""


def compared(migrated: dict[str, Any], own: dict[str, Any] | None) -> str:
    if own is None:
        return "no CPU mode"
    if own["code"] or migrated["code"]:
        return "-" if migrated["code"] else f"own CPU mode fails: {own['error']}"
    if not migrated["numbers"]:
        return "prints none"
    pairs = zip(migrated["numbers"], own["numbers"], strict=False)
    differing = sum(a != b for a, b in pairs) + abs(len(migrated["numbers"]) - len(own["numbers"]))
    return f"{differing} of {len(own['numbers'])} differ" if differing else f"{len(own['numbers'])} equal"


def measure(entry: dict[str, Any], repositories: Path, folder: Path, timeout: int) -> dict[str, Any]:
    entry["git"] = git_folder(repositories, entry["repository"])
    if entry["git"] is None:
        raise SystemExit(f"{entry['repository']} is not in {repositories}: clone it, or leave it out with --only")
    flags = shlex.split(entry.get("flags", ""))
    migrated = run(entry, entry["arguments"], folder / "migrated", flags, timeout)
    own = None
    if entry.get("cpu", True):
        cpu = entry["cpu"] if isinstance(entry.get("cpu"), str) else entry["arguments"]
        own = run(entry, cpu, folder / "own", None, timeout)
    row = {name: entry[name] for name in ("repository", "commit", "path", "arguments")}
    row |= {"migrated": migrated, "own": own, "is_new": entry.get("is_new", False)}
    return row | {"numbers": compared(migrated, own), "note": entry.get("note", "")}


def fault(row: dict[str, Any]) -> str:
    """Say whose fault a failure is: the script's, if its own CPU mode fails as well; else migration's."""
    if row["note"] or not row["migrated"]["code"]:
        return str(row["note"]) if row["migrated"]["code"] else ""
    error = row["migrated"]["error"].replace("|", "/")
    if row["own"] is None:
        return error
    return f"{'the script' if row['own']['code'] else 'migration'}: {error}"


def as_row(row: dict[str, Any]) -> str:
    ran = "yes" if row["migrated"]["code"] == 0 else "**no**"
    migrated, own = (str((found or {}).get("cpu_seconds") or "-") for found in map(row.get, MODES))
    return "| " + " | ".join((row["repository"], row["path"], ran, row["numbers"], migrated, own, fault(row))) + " |"


def by_repository(rows: list[dict[str, Any]]) -> str:
    """Return a table with one line per repository; CPU seconds are summed over commands that ended in both modes."""
    lines = ["| repository | commands | ended | equal numbers | CPU s | own CPU mode, s | why not |", "|" + "---|" * 7]
    for name in dict.fromkeys(row["repository"] for row in rows):
        of_it = [row for row in rows if row["repository"] == name]
        ended = [row for row in of_it if row["migrated"]["code"] == 0]
        both = [row for row in ended if row["own"] and row["own"]["code"] == 0]
        sums = [f"{sum(row[mode]['cpu_seconds'] or 0 for row in both):.0f}" if both else "-" for mode in MODES]
        same = f"{sum(row['numbers'].endswith(' equal') for row in ended)} of {len(both)}"
        equal = same if both else "no CPU mode" if ended else "-"
        why_not = "; ".join(dict.fromkeys(fault(row) for row in of_it if row not in ended))
        lines.append("| " + " | ".join((name, str(len(of_it)), str(len(ended)), equal, *sums, why_not)) + " |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--seeded"]:
        run_seeded(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True, help="folder with clones: OWNER/NAME")
    parser.add_argument("--only", default="", help="entries whose repository or path contains this")
    parser.add_argument("--timeout", type=int, default=300, help="seconds per run")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--keep", type=Path, help="keep outputs and logs in this folder")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["script"]
    chosen = [entry for entry in entries if args.only in f"{entry['repository']}/{entry['path']}"]
    print("| repository | script | ran | numbers | CPU s migrated | CPU s own CPU mode | why not |\n|" + "---|" * 7)
    with ThreadPoolExecutor(args.jobs) as pool, tempfile.TemporaryDirectory() as folder:
        places = [(args.keep or Path(folder)) / f"{number:02}" for number in range(len(chosen))]
        measured = pool.map(lambda entry, place: measure(entry, args.repositories, place, args.timeout), chosen, places)
        rows = []
        for row in measured:
            print(as_row(row), flush=True)
            rows.append(row)
    ended = [row for row in rows if row["migrated"]["code"] == 0]
    same = sum(row["numbers"].endswith(" equal") for row in ended)
    repositories = len({row["repository"] for row in rows})
    print(f"\n{by_repository(rows)}")
    print(f"\n{len(ended)} of {len(rows)} scripts of {repositories} repositories ended, {same} with equal numbers")
    write(rows, args.out)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    from sightline.hardware import devices
    from sightline.measure.provenance import provenance, result_file

    device, now = devices.select("cpu"), datetime.now(UTC)
    out.mkdir(parents=True, exist_ok=True)
    path = result_file(out, "migration-scripts", device, now)
    found = {"time": now.isoformat(timespec="seconds"), "device": device.name(), "rows": rows, **provenance(device)}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
