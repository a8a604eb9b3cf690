"""The downloader against servers on this machine: honest ones, and such as cut, lie, loop, stall or never end."""

import fcntl
import hashlib
import http.server
import json
import os
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from sightline.errors import DiskFull, UsageError
from sightline.files import download
from sightline.files.download import Expected, NotFetched, Patience, fetch, fetch_by_name

DATA = bytes(range(256)) * 4000  # a megabyte
SHA256 = hashlib.sha256(DATA).hexdigest()
QUICK = Patience(timeout_s=0.3, tries=3, wait_s=0.001)


class Server(http.server.ThreadingHTTPServer):
    """Answers by `answer(handler)`; keeps the headers of every request."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.released = answer, [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection ends with its answer

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        try:
            self.server.answer(self)
        except OSError:  # the client has had enough
            self.close_connection = True

    def log_message(self, *_):
        """Silent."""

    def reply(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)


def ranges(data: bytes = DATA, etag: str = '"one"'):
    """An honest server, as S3 is."""

    def answer(handler: Handler) -> None:
        asked = handler.headers.get("Range")
        if asked and handler.headers.get("If-Range", etag) == etag:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
            if begin >= len(data):
                handler.reply(416, Content_Range=f"bytes */{len(data)}")
                return
            body, where = data[begin:], f"bytes {begin}-{len(data) - 1}/{len(data)}"
            handler.reply(206, body, Content_Length=len(body), Content_Range=where, ETag=etag)
        else:
            handler.reply(200, data, Content_Length=len(data), ETag=etag)

    return answer


def first(*some):
    """The first request meets the first of these, and so on; the last stays."""
    left = list(some)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def cut(count: int, etag: str = '"one"'):
    """Announce all and send a part."""
    return lambda handler: handler.reply(200, DATA[:count], Content_Length=len(DATA), ETag=etag)


@pytest.fixture
def serve():
    servers = []

    def start(answer) -> Server:
        server = Server(answer)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "train.zip"


def names(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def get(server: Server, target: Path, size: int = len(DATA), sha256: str = SHA256, path: str = "/train.zip") -> None:
    fetch(server.url + path, target, Expected(size, sha256), patience=QUICK)


def test_whole(serve, target):
    server, shown = serve(ranges()), []
    fetch(f"{server.url}/train.zip?x=1", target, Expected(len(DATA), SHA256), lambda *row: shown.append(row), QUICK)
    assert target.read_bytes() == DATA and names(target) == ["train.zip"]
    [(path, headers)] = server.asked
    assert path == "/train.zip?x=1" and "Range" not in headers and headers["Accept-Encoding"] == "identity"
    assert shown[-1] == ("fetching train.zip, MB", 1, 1)


def test_what_is_there_is_checked_and_not_fetched(serve, target):
    server = serve(ranges())
    target.write_bytes(DATA)
    get(server, target)
    assert server.asked == []
    for wrong, said in ((DATA[:-1], "1023999 bytes, 1024000 were expected"), (DATA[:-1] + b"x", "sha256")):
        target.write_bytes(wrong)
        with pytest.raises(NotFetched, match=said):
            get(server, target)
        assert target.read_bytes() == wrong and server.asked == []


@pytest.mark.parametrize("count", [1, 70_000, len(DATA) - 1])
def test_resumed_within_one_call(serve, target, count):
    server = serve(first(cut(count), ranges()))
    get(server, target)
    assert target.read_bytes() == DATA and names(target) == ["train.zip"]
    assert server.asked[1][1]["Range"] == f"bytes={count}-" and server.asked[1][1]["If-Range"] == '"one"'


def test_resumed_by_a_second_call(serve, target):
    server = serve(cut(50_000))
    with pytest.raises(NotFetched, match=r"tried 3 times; 50000 of 1024000 bytes are in .*train.zip.part"):
        get(server, target)
    assert names(target) == ["train.zip.part", "train.zip.part.json"]
    assert target.with_name("train.zip.part").read_bytes() == DATA[:50_000]
    server.answer = ranges()
    get(server, target)
    assert server.asked[-1][1]["Range"] == "bytes=50000-"
    assert target.read_bytes() == DATA and names(target) == ["train.zip"]


def test_all_bytes_there_but_not_yet_in_place(serve, target):
    """Killed between the last byte and the renaming."""
    server = serve(ranges())
    target.with_name("train.zip.part").write_bytes(DATA)
    record = {"url": f"{server.url}/train.zip", "size": len(DATA), "sha256": SHA256, "validator": ""}
    target.with_name("train.zip.part.json").write_text(json.dumps(record))
    get(server, target)
    assert target.read_bytes() == DATA and server.asked == []


def test_bytes_beyond_the_end_are_cut_off(serve, target):
    """As a file system that loses power may leave them."""
    server = serve(ranges())
    target.with_name("train.zip.part").write_bytes(DATA + b"rubbish")
    record = {"url": f"{server.url}/train.zip", "size": len(DATA), "sha256": SHA256, "validator": ""}
    target.with_name("train.zip.part.json").write_text(json.dumps(record))
    get(server, target)
    assert target.read_bytes() == DATA and server.asked == []


@pytest.mark.parametrize("record", [b"", b"[" * 9_000, b"{}" * 9_000, b"\xff", b"7", b'{"size": [[]], "sha256": {}}'])
def test_a_record_that_says_nothing_leaves_what_was_begun_alone(serve, target, record):
    part = target.with_name("train.zip.part")
    part.write_bytes(DATA[:1000])
    target.with_name("train.zip.part.json").write_bytes(record)
    with pytest.raises(UsageError, match="train.zip.part exists but is not a partial download of"):
        get(serve(ranges()), target)
    assert part.read_bytes() == DATA[:1000]


def test_a_server_without_ranges_starts_again(serve, target):
    def whole(handler: Handler) -> None:
        handler.reply(200, DATA, Content_Length=len(DATA))

    server = serve(first(cut(50_000), whole))
    get(server, target)
    assert target.read_bytes() == DATA and len(server.asked) == 2


def test_a_file_that_changed_on_the_server_starts_again(serve, target):
    server = serve(first(cut(50_000, etag='"old"'), ranges()))
    get(server, target)
    assert server.asked[1][1]["If-Range"] == '"old"'
    assert target.read_bytes() == DATA


def test_a_weak_etag_is_not_a_validator(serve, target):
    date = "Wed, 21 Oct 2015 07:28:00 GMT"

    def weak(handler: Handler) -> None:
        handler.reply(200, DATA[:5000], Content_Length=len(DATA), ETag='W/"one"', Last_Modified=date)

    server = serve(first(weak, ranges(etag=date)))
    get(server, target)
    assert server.asked[1][1]["If-Range"] == date and target.read_bytes() == DATA


@pytest.mark.parametrize("given", ["bytes 0-1023999/1024000", "bytes 5000-1023999/*", ""])
def test_another_range_than_asked_for_starts_again(serve, target, given):
    def wrong(handler: Handler) -> None:
        handler.reply(206, DATA[5000:], Content_Length=len(DATA) - 5000, Content_Range=given)

    server = serve(first(cut(5000), wrong, ranges()))
    get(server, target)
    assert target.read_bytes() == DATA and "Range" not in server.asked[2][1]


def test_range_not_satisfiable_starts_again(serve, target):
    server = serve(first(cut(5000), lambda handler: handler.reply(416), ranges()))
    get(server, target)
    assert target.read_bytes() == DATA and "Range" not in server.asked[2][1]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_errors_that_pass_are_tried_again(serve, target, status):
    server = serve(first(lambda handler: handler.reply(status), lambda handler: handler.reply(status), ranges()))
    get(server, target)
    assert target.read_bytes() == DATA and len(server.asked) == 3


def test_patience_ends(serve, target):
    server = serve(lambda handler: handler.reply(503))
    with pytest.raises(NotFetched, match="503 Service Unavailable; tried 3 times"):
        get(server, target)
    assert len(server.asked) == 3 and names(target) == []


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_errors_that_stay_are_reported_at_once(serve, target, status):
    server = serve(lambda handler: handler.reply(status, b"<html>"))
    with pytest.raises(NotFetched, match=f"answers {status} .*; fetch it by hand and put it at {target}"):
        get(server, target)
    assert len(server.asked) == 1 and names(target) == []


@pytest.mark.parametrize("body", [DATA + b"x", DATA[:-1], b"<html>no such file</html>", b""])
def test_wrong_size_is_reported_before_a_byte_is_taken(serve, target, body):
    server = serve(lambda handler: handler.reply(200, body, Content_Length=len(body)))
    with pytest.raises(NotFetched, match=f"announces {len(body)} bytes, 1024000 were expected"):
        get(server, target)
    assert names(target) == []


def test_a_page_in_the_place_of_the_file_leaves_what_was_fetched(serve, target):
    """A hotel's login page must not cost the first 18 GB."""
    server = serve(first(cut(50_000), lambda handler: handler.reply(200, b"<html>", Content_Length=6)))
    with pytest.raises(NotFetched, match="announces 6 bytes"):
        get(server, target)
    assert target.with_name("train.zip.part").stat().st_size == 50_000


def test_wrong_checksum_keeps_the_file_under_another_name(serve, target):
    other = DATA[:-1] + b"x"
    server = serve(ranges(other))
    digest = hashlib.sha256(other).hexdigest()
    with pytest.raises(NotFetched, match=f"sha256 is {digest}, {SHA256} was expected; what came is kept as .*wrong-"):
        get(server, target)
    [name] = names(target)
    assert name == f"train.zip.wrong-{digest[:8]}" and target.with_name(name).read_bytes() == other
    server.answer = ranges()
    get(server, target)
    assert target.read_bytes() == DATA


def test_endless_body(serve, target):
    def endless(handler: Handler) -> None:
        handler.reply(200)
        while not handler.server.released.is_set():
            handler.wfile.write(DATA)

    server = serve(endless)
    with pytest.raises(NotFetched, match="sends more than the 1024000 bytes"):
        get(server, target)
    [kept] = names(target)
    assert kept.startswith("train.zip.wrong-") and target.with_name(kept).stat().st_size <= len(DATA)


def test_body_of_unknown_length(serve, target):
    """Neither Content-Length nor chunks: the end of the connection is the end of the file, or a cut."""
    server = serve(first(lambda handler: handler.reply(200, DATA[:5000]), lambda handler: handler.reply(200, DATA)))
    get(server, target)
    assert target.read_bytes() == DATA and len(server.asked) == 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects(serve, target, status):
    def answer(handler: Handler) -> None:
        if handler.path == "/train.zip":
            handler.reply(status, b"moved", Location="/elsewhere/file")
        else:
            ranges()(handler)

    server = serve(answer)
    get(server, target)
    assert target.read_bytes() == DATA and [path for path, _ in server.asked] == ["/train.zip", "/elsewhere/file"]


@pytest.mark.parametrize("location", ["/train.zip", "/a/../x"])
def test_redirects_without_an_end(serve, target, location):
    server = serve(lambda handler: handler.reply(302, Location=location))
    with pytest.raises(NotFetched, match="more than 5 redirects"):
        get(server, target)
    assert len(server.asked) == 6 and names(target) == []


def test_endless_body_of_a_redirect_is_not_read(serve, target):
    def answer(handler: Handler) -> None:
        if handler.path != "/train.zip":
            return ranges()(handler)
        handler.reply(302, Location="/there")
        while not handler.server.released.is_set():
            handler.wfile.write(DATA)

    server = serve(answer)
    get(server, target)
    assert target.read_bytes() == DATA


@pytest.mark.parametrize(
    "location", ["http://example.com/train.zip", "ftp://127.0.0.1/train.zip", "file:///etc/passwd", "https://a:b@c/d"]
)
def test_redirects_to_where_nothing_is_fetched(serve, target, location):
    server = serve(lambda handler: handler.reply(302, Location=location))
    with pytest.raises(NotFetched, match="leads to"):
        get(server, target)
    assert names(target) == [] and len(server.asked) == 1


def test_https_does_not_lead_to_this_machine(target):
    """A page elsewhere must not make us ask services here."""
    with pytest.raises(UsageError, match="only https"):
        download.check_url("http://127.0.0.1/x", "https://example.com/x")
    download.check_url("http://127.0.0.1/x", "http://127.0.0.1/y")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://images.cocodataset.org/zips/train2017.zip", "only https"),
        ("http://127.0.0.1.example.com/x", "only https"),
        ("ftp://example.com/x", "only https"),
        ("file:///etc/passwd", "only https"),
        ("train.zip", "only https"),
        ("https:///x", "only https"),
        ("https://user:secret@example.com/x", "user name or a password"),
        ("https://[::1/x", "not an address"),
        ("https://user:secret@[::1/x?key=secret", "not an address"),
        ("https://example.com:abc/x", "not an address"),
        ("https://example.com:99999/x", "not an address"),
        ("https://example.com/a b/x", "not an address"),
        ("https://example.com/\u00e4/x", "not an address"),
    ],
)
def test_addresses(target, url, said):
    with pytest.raises(UsageError, match=said) as error:
        fetch(url, target, Expected(1, SHA256), patience=QUICK)
    assert "secret" not in str(error.value) and names(target) == []


@pytest.mark.parametrize("drips", [False, True])
def test_slow_server(serve, target, drips):
    def slow(handler: Handler) -> None:
        handler.reply(200, DATA[:3000], Content_Length=len(DATA), ETag='"one"')
        while not handler.server.released.wait(0.05):
            if drips:
                handler.wfile.write(b"\0")

    server = serve(first(slow, ranges()))
    if drips:  # what dripped is wrong, so that only a new start can be right
        server.answer = first(slow, lambda handler: handler.reply(200, DATA, Content_Length=len(DATA)))
    get(server, target)
    assert target.read_bytes() == DATA and len(server.asked) == 2


@pytest.mark.parametrize(
    "drips",
    [
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", marks=pytest.mark.slow),
        b"HTTP/1.1 200 OK\r\n",
        pytest.param(b"HTTP/1.1 200 OK\r\nA: ", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_drips_without_end(serve, target, drips):
    """urllib's timeout begins again with every byte."""

    def head(handler: Handler) -> None:
        handler.wfile.write(drips)
        while not handler.server.released.wait(0.05):
            handler.wfile.write(drips if b"100" in drips else b"a" if drips.endswith(b" ") else b"Set-Cookie: a\r\n")

    server = serve(first(head, ranges()))
    get(server, target)
    assert target.read_bytes() == DATA and len(server.asked) == 2
    if b"100" not in drips:  # two seconds until it gives up, for once
        return
    server.answer = head
    target.unlink()
    with pytest.raises(NotFetched, match="tried 3 times; check the network"):
        get(server, target)


def test_a_trailer_that_drips_without_end(serve, target):
    def trailer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        while not handler.server.released.wait(0.05):
            handler.wfile.write(b"a: b\r\n")

    server = serve(first(trailer, lambda handler: handler.reply(200, DATA, Content_Length=len(DATA))))
    get(server, target)
    assert target.read_bytes() == DATA and len(server.asked) == 2


def test_silent_server(serve, target, capsys):
    """What is waited for is said before the wait, each retry with its cause, and at the end what to do."""
    server = serve(lambda handler: handler.server.released.wait(5))
    url, patience = f"{server.url}/train.zip", Patience(timeout_s=0.4, tries=2, wait_s=0.001)
    with pytest.raises(NotFetched) as error:
        fetch(f"{url}?secret", target, Expected(len(DATA), SHA256), patience=patience)
    remedy = f"check the network and, behind a proxy, https_proxy; fetch it by hand and put it at {target}"
    assert str(error.value) == f"{url}: timed out; tried 2 times; {remedy}, or try again later"
    begin, retry = capsys.readouterr().err.splitlines()
    assert begin == f"fetching {url}; the server has 0.4 s to answer"
    assert retry == "timed out; try 2 of 2 in 0.001 s"
    assert names(target) == []


def test_nobody_answers(serve, target):
    server = serve(ranges())
    server.shutdown()
    server.server_close()
    with pytest.raises(NotFetched, match="refused; tried 3 times"):
        get(server, target)


def test_proxies_do_not_stand_between_this_machine_and_itself(serve, target, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    get(serve(ranges()), target)
    assert target.read_bytes() == DATA


def test_proxy_of_the_environment_is_asked(serve, target, monkeypatch):
    """https goes through it by CONNECT, which this one does not know."""
    server = serve(ranges())
    monkeypatch.setenv("https_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(NotFetched, match="Tunnel connection failed: 501"):
        fetch("https://example.invalid/x", target, Expected(len(DATA), SHA256), patience=QUICK)


def test_packed_answers_are_refused(serve, target):
    server = serve(lambda handler: handler.reply(200, DATA, Content_Length=len(DATA), Content_Encoding="gzip"))
    with pytest.raises(NotFetched, match="packs it by gzip"):
        get(server, target)


def test_too_little_room_is_reported_before_anything_is_asked(serve, target, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(0, 0, 1000))
    server = serve(ranges())
    with pytest.raises(DiskFull, match="needs"):
        get(server, target)
    assert server.asked == [] and names(target) == []


def test_a_part_of_something_else_is_not_touched(serve, target):
    part = target.with_name("train.zip.part")
    part.write_bytes(b"mine")
    with pytest.raises(UsageError, match="partial download of .*; delete it"):
        get(serve(ranges()), target)
    assert part.read_bytes() == b"mine"


def test_two_at_once(serve, target):
    part = target.with_name("train.zip.part")
    with part.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process"):
            get(serve(ranges()), target)


def test_folder_that_is_not_there(serve, tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        get(serve(ranges()), tmp_path / "none" / "train.zip")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_neither_read_nor_replaced(serve, target, make):
    make(target)
    with pytest.raises(NotFetched, match=r"train\.zip is not a file; move it away"):
        get(serve(ranges()), target)
    assert names(target) == ["train.zip"]


@pytest.mark.parametrize(
    "name", [".part", ".part.json", ".sha256.json", f".wrong-{hashlib.sha256(b'no').hexdigest()[:8]}"]
)
def test_a_folder_in_the_place_of_a_file_is_named(serve, target, name):
    server = serve(lambda handler: handler.reply(200, b"no", Content_Length=2))
    (target.parent / f"train.zip{name}").mkdir()
    fetch_it = fetch_by_name if name == ".sha256.json" else lambda url, to, patience: get(server, to, size=2)
    with pytest.raises(
        UsageError, match=rf"train\.zip{name} cannot be written: Is a directory; .*choose another folder"
    ):
        fetch_it(f"{server.url}/train.zip", target, patience=QUICK)


def test_a_link_in_the_place_of_the_part_is_not_followed(serve, target):
    outside = target.with_name("outside")
    os.symlink(outside, target.with_name("train.zip.part"))
    with pytest.raises(UsageError, match=r"train\.zip\.part is a symbolic link, which is not followed; delete it"):
        get(serve(ranges()), target)
    assert not outside.exists()


def test_a_link_in_the_place_of_its_record_is_not_followed(serve, target):
    outside = target.with_name("outside")
    os.symlink(outside, target.with_name("train.zip.part.json"))
    get(serve(ranges()), target)
    assert target.read_bytes() == DATA and not outside.exists()


# Files of which at most a part of the checksum is known


def by_name(server: Server, target: Path) -> None:
    fetch_by_name(f"{server.url}/{target.name}", target, patience=QUICK)


@pytest.fixture
def hashed(tmp_path: Path) -> Path:
    """A name as torch.hub knows them: the first eight digits of the sha256 are part of it."""
    return tmp_path / f"resnet50-{SHA256[:8]}.pth"


def test_the_first_use_records_what_the_later_ones_compare(serve, hashed):
    server = serve(ranges())
    by_name(server, hashed)
    assert hashed.read_bytes() == DATA and names(hashed) == [hashed.name, f"{hashed.name}.sha256.json"]
    record = json.loads(hashed.with_name(f"{hashed.name}.sha256.json").read_text())
    assert record == {"url": f"{server.url}/{hashed.name}", "size": len(DATA), "sha256": SHA256}

    by_name(server, hashed)
    assert len(server.asked) == 1, "the second use fetched it again"

    hashed.write_bytes(DATA[:-1] + b"x")
    with pytest.raises(NotFetched, match="was expected; move it away, it is not overwritten"):
        by_name(server, hashed)


def test_another_file_than_its_name_says_is_kept_aside(serve, hashed):
    with pytest.raises(NotFetched, match=rf"its sha256 is .*, {SHA256[:8]} was expected; what came is kept as"):
        by_name(serve(ranges(DATA[:-1] + b"x")), hashed)
    assert not hashed.exists()


def test_a_file_that_somebody_put_there_is_compared_with_its_name(serve, hashed):
    hashed.write_bytes(DATA)
    server = serve(ranges())
    by_name(server, hashed)
    assert server.asked == [] and hashed.with_name(f"{hashed.name}.sha256.json").exists()


def test_a_record_of_another_file_than_the_name_says_counts_for_nothing(serve, hashed):
    """Somebody may have put both into the cache."""
    forged = {"size": 2, "sha256": hashlib.sha256(b"no").hexdigest()}
    hashed.with_name(f"{hashed.name}.sha256.json").write_text(json.dumps(forged))
    hashed.write_bytes(b"no")
    with pytest.raises(NotFetched, match=f"its sha256 is {forged['sha256']}, {SHA256[:8]} was expected"):
        fetch_by_name(f"{serve(ranges()).url}/{hashed.name}", hashed, patience=QUICK)
    hashed.unlink()
    fetch_by_name(f"{serve(ranges()).url}/{hashed.name}", hashed, patience=QUICK)
    assert hashed.read_bytes() == DATA


def test_a_name_without_a_checksum_takes_the_first_file_and_no_other(serve, target):
    by_name(serve(ranges()), target)
    target.unlink()
    with pytest.raises(NotFetched, match=f"{SHA256} was expected"):
        by_name(serve(ranges(DATA[:-1] + b"x")), target)


def test_a_file_of_unknown_size_is_resumed(serve, hashed):
    """Within one call, and by a second one."""
    by_name(serve(first(cut(70_000), ranges())), hashed)
    assert hashed.read_bytes() == DATA
    hashed.unlink()
    hashed.with_name(f"{hashed.name}.sha256.json").unlink()

    server = serve(cut(70_000))
    with pytest.raises(NotFetched, match="bytes are in"):
        by_name(server, hashed)
    server.answer = ranges()
    by_name(server, hashed)
    assert hashed.read_bytes() == DATA and server.asked[-1][1]["Range"] == "bytes=70000-"


@pytest.mark.parametrize(
    ("headers", "said"), [({}, "does not announce its size"), ({"Content_Length": 10**12}, f"announces {10**12} bytes")]
)
def test_a_size_that_is_unknown_or_absurd_is_refused(serve, hashed, headers, said):
    with pytest.raises(NotFetched, match=said):
        by_name(serve(lambda handler: handler.reply(200, DATA, **headers)), hashed)
    assert names(hashed) == []


@pytest.mark.parametrize("gives_up", [False, True])
def test_others_wait_for_the_one_that_fetches(serve, hashed, gives_up):
    """They find its file; or, where it gave up and removed what it had begun, they fetch it themselves."""
    server = serve(ranges())
    part = hashed.with_name(f"{hashed.name}.part")
    with part.open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        waiting = threading.Thread(target=by_name, args=(server, hashed))
        waiting.start()
        if gives_up:
            part.unlink()
        else:
            part.write_bytes(DATA)
            part.rename(hashed)
    waiting.join(timeout=30)
    assert hashed.read_bytes() == DATA and len(server.asked) == gives_up
    assert not part.exists()


def test_a_signature_in_an_address_is_neither_stored_nor_shown(serve, target):
    """Addresses of buckets hold one behind the "?", another one each day; a resumed download takes the new one."""
    server = serve(cut(70_000))
    with pytest.raises(NotFetched) as error:
        fetch_by_name(f"{server.url}/train.zip?signature=secret", target, patience=QUICK)
    assert "secret" not in str(error.value)
    assert "secret" not in target.with_name("train.zip.part.json").read_text()
    server.answer = ranges()
    fetch_by_name(f"{server.url}/train.zip?signature=secret2", target, patience=QUICK)
    assert server.asked[-1][0] == "/train.zip?signature=secret2" and server.asked[-1][1]["If-Range"]
    assert target.read_bytes() == DATA and "secret" not in target.with_name("train.zip.sha256.json").read_text()
