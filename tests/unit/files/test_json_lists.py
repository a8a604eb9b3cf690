"""Lists of a JSON file that is read in pieces: the same entries as `json` reads, and damage by its place."""

import json
from collections.abc import Iterator

import pytest

from sightline.errors import BadData
from sightline.files import json_lists
from sightline.files.json_lists import JsonLists

TEXT = """ {"info": {"year": 2017, "of": ["no list of ours"]}, "images": [ {"id": 1, "name": "ü"}, 12.5, "x"] ,
 "empty" : [], "other": [[1, 2], [3]], "last": [null]} \n """


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


@pytest.fixture(params=[1, 3, 10**6])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_lists, "BLOCK", 1)
    return request.param


def test_entries_are_those_of_the_file_however_it_is_cut(size: int):
    whole = json.loads(TEXT)
    found = JsonLists(pieces(TEXT.encode("utf-8-sig"), size), "a.json")
    wanted = ("images", "last", "empty")
    assert list(found.entries(wanted)) == [
        (name, number, entry) for name in ("images", "empty", "last") for number, entry in enumerate(whole[name])
    ]
    assert found.lists == {"images", "empty", "other", "last"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it ends before byte 0"),
        ("[1]", "'[' where an object {...} of lists should be before byte 0"),
        ("{7: []}", "a key 7 before byte 2"),
        ('{"a" []}', "'[' where a colon should be before byte 5"),
        ('{"a": [] "b": []}', "'\"' where a comma should be before byte 9"),
        ('{"a": [1 2]}', "'2' where a comma should be before byte 9"),
        ('{"a": [1, 2', "it ends before byte 11"),
        ('{"a": [1]', "it ends before byte 9"),
        ('{"a": [1, }]}', "Expecting value before byte 10"),
        ('{"a": [1]} x', "more behind its end before byte 10"),
        ('{"a": ["\xff"]}', "bytes that are not UTF-8"),
    ],
)
def test_damage_is_named_by_its_place(text: str, what: str):
    with pytest.raises(BadData) as raised:
        list(JsonLists(pieces(text.encode("latin-1"), 10**6), "a.json").entries(["a"]))
    assert str(raised.value).startswith(f"a.json is not a whole JSON file: {what}")
    assert str(raised.value).endswith("; unpack or fetch it again")


def test_what_should_be_a_list_is_named(size: int):
    with pytest.raises(BadData, match="a.json: a is not a list"):
        list(JsonLists(pieces(b'{"a": 7}', size), "a.json").entries(["a"]))
    assert list(JsonLists(pieces(b'{"a": 7, "b": [8]}', size), "a.json").entries(["b"])) == [("b", 0, 8)]


@pytest.mark.parametrize("letters", [90, 200, 10**6])
def test_an_entry_beyond_its_bound_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch, letters: int):
    monkeypatch.setattr(json_lists, "BLOCK", 1)
    monkeypatch.setattr(json_lists, "MAX_ENTRY", 100)
    left = pieces(b'{"a": ["' + b"x" * letters + b'"]}', 1)
    entries = JsonLists(left, "a.json").entries(["a"])
    if letters < 100:
        assert list(entries) == [("a", 0, "x" * letters)]
        return
    with pytest.raises(BadData, match="is not a whole JSON file: Unterminated string"):
        list(entries)
    assert letters - sum(1 for _ in left) <= 100 + 4


def members(data: bytes, within: str = "", size: int = 7) -> list[tuple[str, object, bytes]]:
    lists = JsonLists((data[at : at + size] for at in range(0, len(data), size)), "x.json")
    found = []
    for key, value in lists.members(within):
        start, stop = lists.span()
        found.append((key, value, data[start:stop]))
    return found


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \n"])
@pytest.mark.parametrize("size", [3, 7, 10**6])
def test_members_of_an_object_are_found_again_by_their_bytes(monkeypatch, before, size):
    monkeypatch.setattr(json_lists, "BLOCK", 3)
    data = before + '{"ä": {"k": ["ö"]}, "b" : 12, "in": {"c": 3 ,"d": "é"}, "last": [ ]} \n'.encode()
    assert members(data, "", size) == [
        ("ä", {"k": ["ö"]}, '{"k": ["ö"]}'.encode()),
        ("b", 12, b"12"),
        ("in", {"c": 3, "d": "é"}, '{"c": 3 ,"d": "é"}'.encode()),
        ("last", [], b"[ ]"),
    ]
    assert members(data, "in", size) == [("c", 3, b"3"), ("d", "é", '"é"'.encode())]
    assert members(data, "last", size) == members(b"{}") == members(b'{"in": {}}', "in") == []
    listed = before + '[1, {"ä": "ö"},[] ]'.encode()
    lists = JsonLists([listed[at : at + size] for at in range(0, len(listed), size)], "x.json")
    found = [(value, listed[slice(*lists.span())].decode()) for value in lists.listed()]
    assert found == [(1, "1"), ({"ä": "ö"}, '{"ä": "ö"}'), ([], "[]")]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[1]", "'\\[' where an object"),
        (b"{1: 2}", "a key 1"),
        (b'{"a" 2}', "'2' where a colon should be"),
        (b'{"a": 2 "b"}', "where a comma should be"),
        (b'{"a": 2', "it ends"),
        (b'{"a": 2} x', "more behind its end"),
        (b'{"a": x}', "Expecting value"),
        (b'{"a": "\xff"}', "bytes that are not UTF-8"),
    ],
)
def test_members_of_what_is_no_object(data, said):
    with pytest.raises(BadData, match=f"x.json is not a whole JSON file: .*{said}.* before byte \\d+; unpack or fetch"):
        members(data)


def test_a_list_of_what_is_none():
    for data, said in ((b"{}", "where a list should be"), (b"[1 2]", "a comma"), (b"[1", "it ends"), (b"[] 1", "more")):
        with pytest.raises(BadData, match=said):
            list(JsonLists([data], "x.json").listed())


def test_one_entry_has_a_limit(monkeypatch):
    monkeypatch.setattr(json_lists, "BLOCK", 3)
    data = [bytes([each]) for each in b'["123456", 2]']
    assert list(JsonLists(data, "x.json", 8).listed()) == ["123456", 2]
    with pytest.raises(BadData, match="an entry of more than 5 letters|Unterminated string"):
        list(JsonLists(data, "x.json", 5).listed())
