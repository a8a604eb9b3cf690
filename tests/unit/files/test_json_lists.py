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
