"""Add to sightline/kernels/cudnn/known.jsonl the records that a machine measured: `python benchmarks/cudnn_records.py
~/.cache/sightline/cudnn`. Take them from a machine that does nothing else; a record of the same key is replaced."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sightline.kernels.cudnn.records import KNOWN


def main(folder: Path) -> None:
    """Merge the records of a cache folder into the package's file, sorted by key, each in one line."""
    texts = KNOWN.read_text(encoding="utf-8").splitlines()
    texts += [path.read_text(encoding="utf-8") for path in folder.glob("*.json")]
    found = {record["key"]: record for record in map(json.loads, texts)}
    for record in found.values():
        record["times_ms"] = {name: round(ms, 4) for name, ms in record["times_ms"].items() if ms < float("inf")}
    lines = [
        json.dumps({name: record[name] for name in ("key", "engines", "times_ms")})
        for _, record in sorted(found.items())
    ]
    KNOWN.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} records in {KNOWN}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
