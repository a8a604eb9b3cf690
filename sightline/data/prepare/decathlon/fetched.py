"""`prepare decathlon --download`: fetch the tar of a task from the public bucket, or any tar, and check it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from sightline import terminal
from sightline.data.volumes.plan import TASKS
from sightline.errors import UsageError
from sightline.files.download import Expected, check_url, fetch, fetch_by_name
from sightline.files.whole import check_room, nearest
from sightline.terminal.progress import Progress

BUCKET = "https://msd-for-monai.s3-us-west-2.amazonaws.com"
# Of the tars in that bucket, as MONAI's apps/datasets.py compares them; nobody publishes a sha256.
MD5 = {
    "01": "240a19d752f0d9e9101544901065d872",
    "02": "06ee59366e1e5124267b774dbd654057",
    "03": "a90ec6c4aa7f6a3d087205e23d4e6397",
    "04": "9d24dba78a72977dbd1d2e110310f31b",
    "05": "35138f08b1efaef89d7424d2bcc928db",
    "06": "8afd997733c7fc0432f71255ba4e52dc",
    "07": "4f7080cfca169fa8066d17ce6eb061e4",
    "08": "641d79e80ec66453921d997fbf12a29c",
    "09": "410d4a301da4e5b2f6f86ec3ddba524e",
    "10": "bad7a188931dc2f6acf72b08eb6202d0",
}
_MOST_BYTES = 64 * 2**30  # of a tar with a known checksum; all of the ten are smaller


def check_asked(download: bool, task: str, url: str, sha256: str, size_bytes: int) -> None:
    """Raise UsageError if these options cannot be meant together."""
    if not download and (url or sha256 or size_bytes):
        raise UsageError("--url, --sha256 and --size-bytes are of what --download fetches; add it or leave them out")
    if not download:
        return
    if url:
        check_url(url, url)
    if task not in TASKS and not _is_tar(url):
        raise UsageError(
            f"--download needs --task 01 to 10, not {task}, or with --url the address of a tar: "
            "https://HOST/Dataset027_ACDC.tar"
        )
    if (sha256 or size_bytes) and (size_bytes < 0 or not re.fullmatch("[0-9a-fA-F]{64}", sha256)):
        raise UsageError(
            f"--sha256 '{sha256}' must have 64 hexadecimal digits, and --size-bytes {size_bytes} beside it must not be "
            "negative; leave both out if you do not know them"
        )


def _is_tar(path: str) -> bool:
    return PurePosixPath(urlsplit(path).path).suffix == ".tar"


def fetch_tar(source: Path, out: Path, task: str, url: str, expected: Expected, progress: Progress) -> Path:
    """Put the tar into `source`, or make it `source` if that is the name of a tar; return the tar.

    Nothing is fetched if the task lies in `source` unpacked; then `source` is returned.
    """
    url = url or BUCKET
    if not _is_tar(url):
        url = f"{url.rstrip('/')}/{TASKS[task].folder}.tar"
    name = PurePosixPath(urlsplit(url).path).name
    target = source if _is_tar(source.name) else source / name
    if target != source and any(os.path.isfile(source / each / "dataset.json") for each in (".", name[: -len(".tar")])):
        return source
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target.parent} cannot be written: {error.strerror}; choose another --source") from error

    def room(size: int, left: int) -> None:
        """Look before the first byte comes: for the tar, and for as much again, which unpacking takes."""
        if nearest(target.parent).stat().st_dev == nearest(out).stat().st_dev:
            check_room(target.parent, left + size, f"{target}, to be unpacked in {out},")
        else:
            check_room(target.parent, left, f"{target}")
            check_room(out, size, f"{target}, to be unpacked in {out},")

    if expected.sha256 or task in MD5:
        md5 = "" if expected.sha256 else MD5[task]
        fetch(url, target, replace(expected, md5=md5, most_bytes=_MOST_BYTES), progress, room=room)
    elif sha256 := fetch_by_name(url, target, progress, room=room):
        terminal.say(
            f"{target}: this first download could not be checked, since no checksum of it is known. Its sha256 "
            f"{sha256} is recorded in {target.name}.sha256.json; later downloads to this place are compared with it"
        )
    return target
