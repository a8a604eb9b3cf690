"""The one downloader: https only, size and checksums compared, resumed when interrupted, renamed when verified.

A partial download is TARGET.part; TARGET.part.json says of what. A file that fails its checksum is kept under another
name, for a person to look at. Nothing beyond the known size is ever written; a size that is not known beforehand is
the one that the server announces first.
"""

from __future__ import annotations

import fcntl
import hashlib
import http
import http.client
import ipaddress
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sightline import __version__, terminal
from sightline.errors import BadData, SightlineError, UsageError
from sightline.files.regular import regular
from sightline.files.typed_json import read_json
from sightline.files.whole import check_room, no_link, replace_text, reporting_disk_errors, unwritable
from sightline.terminal.progress import Progress

_CHUNK = 1 << 18
_REDIRECTS = 5
_MOVED = {301, 302, 303, 307, 308}
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}  # a retry may succeed
_WORTH_A_TRY = 1 << 20  # bytes; a try that brings as many resets the count of tries
_SLOWEST = 1000  # bytes a second, over the time that a silent server has
_UNKNOWN = -1  # a size
MOST_UNKNOWN_BYTES = 16 * 2**30  # of a file whose size is not known beforehand; ViT-H takes 2.5 GB
_Digests = dict[str, "hashlib._Hash"]  # by name
Room = Callable[[int, int], None]  # (bytes of the file, bytes still to come): DiskFull if they do not fit
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.[a-z]+")  # resnet50-11ad3fa6.pth, as torch.hub reads it


@dataclass(frozen=True)
class Patience:
    """Timeout and retries of a download."""

    timeout_s: float = 60
    """Longest wait for a connection, for the start of an answer, or for more of it."""
    tries: int = 6
    """Failed tries in a row, each with less than a megabyte received, before it is an error."""
    wait_s: float = 1
    """Wait before the second try; it doubles with each further one, up to half a minute."""


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True)
class Expected:
    """What is known of a file before it is fetched."""

    size: int | None = None
    """None: the server's is taken, up to `most_bytes`."""
    sha256: str = ""
    """The whole, or its beginning; "" if it is not known."""
    md5: str = ""
    """Compared too, for files that are published with an MD5 alone; "" if it is not known."""
    most_bytes: int = MOST_UNKNOWN_BYTES

    def wrong(self, digests: _Digests) -> str:
        """Return which checksum differs, and how; "" if all are as expected."""
        for name, found in digests.items():
            if not found.hexdigest().startswith(wanted := getattr(self, name)):
                return f"{name} is {found.hexdigest()}, {wanted} was expected"
        return ""

    def digests(self) -> _Digests:
        """Return what hashes the bytes as they come; sha256 in any case, it is recorded."""
        found: _Digests = {"sha256": hashlib.sha256()}
        return {**found, "md5": hashlib.md5(usedforsecurity=False)} if self.md5 else found


class NotFetched(BadData):
    """A file that could not be downloaded, or is not the expected one."""


class _Unreachable(NotFetched):
    """Not to be had from the server; a person may still fetch it."""


class _Cut(Exception):
    """The connection or the server failed in a way that may pass."""


class _NoSuchRange(_Cut):
    """The wanted part of the file is not there: it must have changed."""


def fetch(
    url: str,
    target: Path,
    expected: Expected,
    progress: Progress = lambda what, done, total: None,
    patience: Patience = DEFAULT_PATIENCE,
    *,
    waits: bool = False,
    room: Room | None = None,
) -> str:
    """Make `target` the file that is expected; done at once if it is that already, resumed if begun.

    With `waits`, another process that fetches the same file is waited for. `room` looks whether there is space for so
    many more bytes, in place of the check here. Returns the whole sha256.
    """
    check_url(url, url)
    with _naming_wrong_paths(target):
        return _fetched(url, target, expected, progress, patience, waits, room)


def _fetched(
    url: str, target: Path, expected: Expected, progress: Progress, patience: Patience, waits: bool, room: Room | None
) -> str:
    if target.exists():
        return _check_present(target, expected, progress)
    with _locked(target, waits) as part:
        if target.exists():  # another process was faster
            return _check_present(target, expected, progress)
        room = room or (lambda size, left: check_room(target.parent, left, f"{target}"))
        transfer = _Transfer(url, target, part, expected, progress, patience, room)
        if transfer.size != _UNKNOWN:
            room(transfer.size, transfer.size - transfer.done)
        try:
            transfer.run()
        except _Unreachable as error:
            raise NotFetched(f"{error}; fetch it by hand and put it at {target}, or try again later") from error
        return transfer.put_in_place()


def checksum_in(name: str) -> str:
    """Return the beginning of a sha256 that the name of a file holds; "" if it holds none."""
    found = _HASH_IN_NAME.search(name)
    return found.group(1) if found else ""


def fetch_by_name(
    url: str,
    target: Path,
    progress: Progress = lambda what, done, total: None,
    patience: Patience = DEFAULT_PATIENCE,
    room: Room | None = None,
) -> str:
    """Fetch a file of which at most a part of the checksum is known, that in its name: resnet50-11ad3fa6.pth.

    The first use records size and sha256 in TARGET.sha256.json and returns the sha256; every later use compares them
    and returns "". Processes that want the same file wait for the one that fetches it.
    """
    record = _beside(target, ".sha256.json")
    known = _read_record(record)
    size, sha256 = known.get("size"), known.get("sha256")
    named = checksum_in(target.name)
    if type(size) is int and isinstance(sha256, str) and re.fullmatch(f"(?={named})[0-9a-f]{{64}}", sha256):
        fetch(url, target, Expected(size, sha256), progress, patience, waits=True, room=room)
        return ""
    found = fetch(url, target, Expected(sha256=named), progress, patience, waits=True, room=room)
    values = {"url": shown_address(url), "size": target.stat().st_size, "sha256": found}
    with _naming_wrong_paths(record), reporting_disk_errors(str(record)):
        replace_text(record, json.dumps(values) + "\n")
    return found


@contextmanager
def _naming_wrong_paths(target: Path) -> Iterator[None]:
    """Raise UsageError for a folder or something else that lies where a file should be written."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or target
        raise unwritable(place, error, "move away what lies there, or choose another folder") from error


@dataclass
class _Transfer:
    url: str
    target: Path
    part: BinaryIO
    expected: Expected
    progress: Progress
    patience: Patience
    room: Room

    def __post_init__(self) -> None:
        self.size = _UNKNOWN if self.expected.size is None else self.expected.size
        self.digests, self.done, self.validator, self._told = self.expected.digests(), 0, "", ("", -1)
        self.path = _beside(self.target, ".part")
        self._record = _beside(self.target, ".part.json")
        if os.fstat(self.part.fileno()).st_size == 0:
            return
        found = _read_record(self._record)
        if self.size == _UNKNOWN and type(found.get("size")) is int and 0 < found["size"] <= self.expected.most_bytes:
            self.size = found["size"]
        known = (self.size, self.expected.sha256, self.expected.md5)
        if self.size == _UNKNOWN or (found.get("size"), found.get("sha256"), found.get("md5", "")) != known:
            raise UsageError(
                f"{self.path} exists but is not a partial download of {shown_address(self.url)}; delete it"
            )
        if found.get("url") == shown_address(self.url) and isinstance(found.get("validator"), str):
            self.validator = found["validator"]
        self._take_up()

    def _take_up(self) -> None:
        """Count what an earlier start has left, up to the size that is wanted."""
        self.part.truncate(min(self.size, os.fstat(self.part.fileno()).st_size))
        self.part.seek(0)
        while chunk := self.part.read(_CHUNK):
            self._count(chunk)
            self._show("checking")

    def _count(self, chunk: bytes) -> None:
        for digest in self.digests.values():
            digest.update(chunk)
        self.done += len(chunk)

    def _restart(self) -> None:
        self.digests, self.done = self.expected.digests(), 0
        self.part.seek(0)
        self.part.truncate()

    def _show(self, what: str) -> None:
        now = (what, self.done // 10**6)
        if now != self._told:  # chunks are smaller, and a bar takes longer to draw than they to write
            self._told = now
            self.progress(f"{what} {self.target.name}, MB", now[1], self.size // 10**6)

    def run(self) -> None:
        """Send requests until all bytes are there; raise once `patience` is exhausted."""
        tries, wait_s = 0, self.patience.wait_s
        if self.done != self.size:
            given = f"{self.patience.timeout_s:g} s"
            terminal.say(f"fetching {shown_address(self.url)}; the server has {given} to answer", "stderr")
        while self.size == _UNKNOWN or self.done < self.size:
            before = self.done
            try:
                self._receive()
            except _Cut as cut:
                if self.done - before >= _WORTH_A_TRY:
                    tries, wait_s = 0, self.patience.wait_s
                tries += 1
                if tries >= self.patience.tries:
                    said = f"{shown_address(self.url)}: {cut}; tried {tries} time{'s' * (tries > 1)}"
                    if not self.done:
                        raise _Unreachable(f"{said}; check the network and, behind a proxy, https_proxy") from cut
                    left = f"{self.done} of {self.size} bytes are in {self.path}, the same command resumes from there"
                    raise NotFetched(f"{said}; {left}") from cut
                terminal.say(f"{cut}; try {tries + 1} of {self.patience.tries} in {wait_s:g} s", "stderr")
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 30)

    def _receive(self) -> None:
        """Send one request, for what is missing; _Cut if it brought less."""
        try:
            with _Watch(self) as watch, _opened(self._request(), self.patience.timeout_s, watch) as answer:
                self._prepare_for(answer)
                self._store(answer)
        except _NoSuchRange:
            self._restart()
            raise
        if self.done < self.size:
            raise _Cut(f"the connection ended at {self.done} of {self.size} bytes")

    def _request(self) -> urllib.request.Request:
        headers = {"User-Agent": f"sightline/{__version__}", "Accept-Encoding": "identity"}
        if self.done:
            headers["Range"] = f"bytes={self.done}-"
            if self.validator:
                headers["If-Range"] = self.validator
        return urllib.request.Request(self.url, headers=headers)

    def _prepare_for(self, answer: http.client.HTTPResponse) -> None:
        """Check what the server announces, before a byte of it is taken."""
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            self._refuse(f"the server packs it by {answer.headers['Content-Encoding']}")
        begin = self.done if answer.status == 206 else 0
        if answer.status not in (200, 206) or (answer.status == 206 and not self.done):
            self._refuse(f"the server answers with status {answer.status}")
        announced = answer.headers.get("Content-Length", "")
        if self.size == _UNKNOWN:
            self._take_size(announced)
        if announced and announced != str(self.size - begin):
            self._refuse(f"the server announces {announced[:40]} bytes, {self.size - begin} were expected")
        expected = f"bytes {begin}-{self.size - 1}/{self.size}"
        given = answer.headers.get("Content-Range", "")
        if answer.status == 206 and given != expected:
            raise _NoSuchRange(f"the server answers with {given[:80]!r} where {expected!r} was asked for")
        if answer.status == 200 and self.done:
            self._restart()  # the server knows no ranges, or the file has changed there
        etag = answer.headers.get("ETag", "")
        strong = etag if not etag.startswith("W/") else ""  # a weak one promises no equal bytes
        self.validator = strong or answer.headers.get("Last-Modified", "")
        # Without what follows a "?": a signature there is as good as a password, and another one each time.
        record = {"url": shown_address(self.url), "size": self.size, "validator": self.validator}
        record |= {"sha256": self.expected.sha256, "md5": self.expected.md5}
        with reporting_disk_errors(str(self._record)):
            replace_text(self._record, json.dumps(record))

    def _take_size(self, announced: str) -> None:
        """Let the server say how long a file is, of which nothing else does."""
        if not re.fullmatch("[0-9]{1,12}", announced) or not 0 < int(announced) <= self.expected.most_bytes:
            said = f"announces {announced[:40]} bytes" if announced else "does not announce its size"
            self._refuse(f"the server {said}, 1 to {self.expected.most_bytes} were expected")
        self.size = int(announced)
        self.room(self.size, self.size)

    def _store(self, answer: http.client.HTTPResponse) -> None:
        window, began = 0, time.monotonic()
        while chunk := _read(answer):
            if self.done + len(chunk) > self.size:
                self._refuse(f"the server sends more than the {self.size} bytes that were expected", set_aside=True)
            with reporting_disk_errors(str(self.path)):
                self.part.write(chunk)
            self._count(chunk)
            self._show("fetching")
            window += len(chunk)
            passed = time.monotonic() - began
            if passed > self.patience.timeout_s:
                if window < _SLOWEST * passed:
                    raise _Cut(f"{window} bytes came in {passed:.0f} s")
                window, began = 0, time.monotonic()

    def put_in_place(self) -> str:
        """Give the file its name, if the checksum is the expected one; return it."""
        with reporting_disk_errors(str(self.path)):
            self.part.flush()
            os.fsync(self.part.fileno())
        if wrong := self.expected.wrong(self.digests):
            self._refuse(f"its {wrong}", set_aside=True)
        os.rename(self.path, self.target)
        self._record.unlink(missing_ok=True)
        return self.digests["sha256"].hexdigest()

    def _refuse(self, reason: str, set_aside: bool = False) -> NoReturn:
        kept = ""
        if set_aside:
            self.part.flush()
            wrong = _beside(self.target, f".wrong-{self.digests['sha256'].hexdigest()[:8]}")
            os.rename(self.path, wrong)
            self._record.unlink(missing_ok=True)
            kept = f"; what came is kept as {wrong}"
        raise NotFetched(f"{shown_address(self.url)}: {reason}{kept}; it is not the file that was expected there")


# Files beside the target.


def _check_present(target: Path, expected: Expected, progress: Progress) -> str:
    if not target.is_file():
        raise NotFetched(f"{target} is not a file; move it away, it is not overwritten")
    size, digests, done = target.stat().st_size, expected.digests(), 0
    if expected.size is not None and size != expected.size:
        raise NotFetched(
            f"{target} has {size} bytes, {expected.size} were expected; move it away, it is not overwritten"
        )
    with open(target, "rb", opener=regular) as file:
        while chunk := file.read(_CHUNK):
            for digest in digests.values():
                digest.update(chunk)
            done += len(chunk)
            progress(f"checking {target.name}, MB", done // 10**6, size // 10**6)
    if wrong := expected.wrong(digests):
        raise NotFetched(f"{target}: its {wrong}; move it away, it is not overwritten")
    return digests["sha256"].hexdigest()


@contextmanager
def _locked(target: Path, waits: bool = False) -> Iterator[BinaryIO]:
    """Return TARGET.part, open and ours alone."""
    path = _beside(target, ".part")
    with _lock(path, target, waits) as part:
        try:
            yield part
        finally:
            if _is_at(path, part) and os.fstat(part.fileno()).st_size == 0:  # nothing to resume from
                path.unlink()
                _beside(target, ".part.json").unlink(missing_ok=True)


def _lock(path: Path, target: Path, waits: bool) -> BinaryIO:
    while True:
        try:
            part = os.fdopen(no_link(str(path), os.O_RDWR | os.O_CREAT), "r+b")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}; choose another folder") from error
        try:
            fcntl.flock(part, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            part.close()
            raise UsageError(f"{path} is being written by another process; wait for it") from error
        if _is_at(path, part) or target.exists():
            return part
        part.close()  # its owner gave up and removed it while this process waited


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, 10_000)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# The network.


def check_url(url: str, first: str) -> None:
    """Refuse all but https; http to this machine itself, as the tests do, and never by a redirect from elsewhere."""
    try:
        parts = urllib.parse.urlsplit(url)
        if not url.isascii() or re.search("[\0- \x7f]", url) or parts.port == 0:
            raise ValueError("it holds a space, a letter that addresses spell with %, or port 0")
        local = _is_loopback(parts.hostname or "") and _is_loopback(urllib.parse.urlsplit(first).hostname or "")
    except ValueError as error:
        named = re.sub("//.*@", "//", url.partition("?")[0], flags=re.DOTALL)  # no password is shown
        raise UsageError(f"{named[:200]!r} is not an address: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{shown_address(url)}: an address with a user name or a password is not fetched; leave them out"
        )
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and local)):
        raise UsageError(f"{shown_address(url)}: only https is fetched; give the https address of the file")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def shown_address(url: str) -> str:
    """Return an address without what may be secret in it."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"[:300]


class _Watch:
    """Ends the connection of a try that brings no byte of the file in twice the time that a silent server has: urllib's
    own timeout begins again with every byte, so heads, chunks and trailers that drip would never end."""

    def __init__(self, transfer: _Transfer):
        self.transfer, self.sockets = transfer, list[socket.socket]()
        self.limit_s = 2 * transfer.patience.timeout_s
        self.is_late = False
        self._ended = threading.Event()

    def __enter__(self) -> _Watch:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        if self.is_late and isinstance(error, SightlineError | _Cut):
            raise _Cut(f"no byte of the file came in {self.limit_s:g} s") from error

    def _watch(self) -> None:
        done = self.transfer.done
        while not self._ended.wait(self.limit_s):
            if done == (done := self.transfer.done):
                self.is_late = True
                for each in self.sockets:
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                return

    def handlers(self) -> Iterator[urllib.request.BaseHandler]:
        """Yield what speaks http and https over connections that are watched."""
        watch = self

        class Http(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                watch.sockets.append(self.sock)

        class Https(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                watch.sockets.append(self.sock)

        class HttpHandler(urllib.request.HTTPHandler):
            def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Http, request)

        class HttpsHandler(urllib.request.HTTPSHandler):
            def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Https, request, context=ssl.create_default_context())

        yield from (HttpHandler(), HttpsHandler())


@contextmanager
def _opened(request: urllib.request.Request, timeout_s: float, watch: _Watch) -> Iterator[http.client.HTTPResponse]:
    """Return the answer to a request; _Cut for what may pass, NotFetched for what will not."""
    for _ in range(_REDIRECTS + 1):
        with _network_errors(request.full_url):
            try:
                answer = _opener(request.full_url, watch).open(request, timeout=timeout_s)
            except urllib.error.HTTPError as error:
                # Followed here, not by urllib: it reads the body of a redirect whole, however long that is.
                if error.code not in _MOVED or "Location" not in error.headers:
                    raise
                error.close()
                request = _moved(request, error.headers["Location"])
                continue
        with answer:
            yield answer
        return
    raise NotFetched(f"{shown_address(request.full_url)}: more than {_REDIRECTS} redirects, or a circle of them")


def _opener(url: str, watch: _Watch) -> urllib.request.OpenerDirector:
    """Return one that speaks http and https and nothing else."""
    opener = urllib.request.OpenerDirector()
    # Proxies as the environment says, but never between this machine and itself.
    is_local = _is_loopback(urllib.parse.urlsplit(url).hostname or "")
    for handler in (
        urllib.request.ProxyHandler({} if is_local else None),
        *watch.handlers(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _moved(request: urllib.request.Request, location: str) -> urllib.request.Request:
    try:
        url = urllib.parse.urljoin(request.full_url, location)
        check_url(url, request.full_url)
    except (UsageError, ValueError) as error:
        raise NotFetched(f"{shown_address(request.full_url)} leads to {error}") from error
    return urllib.request.Request(url, headers=dict(request.header_items()))


def _read(answer: http.client.HTTPResponse) -> bytes:
    with _network_errors(""):
        return answer.read1(_CHUNK)


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _NoSuchRange("the server has no such part of the file") from error
        if error.code in _TRANSIENT:
            raise _Cut(f"the server answers {error.code} {error.reason}") from error
        raise _Unreachable(f"{shown_address(url)}: the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError around the reason
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise _Unreachable(
                f"{shown_address(url)}: its certificate is not accepted: {reason.verify_message}"
            ) from error
        raise _Cut(getattr(reason, "strerror", "") or str(reason) or type(reason).__name__) from error
