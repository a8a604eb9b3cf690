"""JSON of one object of lists, such as COCO's instances_*.json of 450 MB, read entry by entry; also of one list, or of
an object whose members are the entries.

Only the entry at hand lies in memory, and its length is bounded: any bytes end as entries or as BadData.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from sightline.errors import BadData
from sightline.files.typed_json import short

BLOCK = 2**20  # bytes that are read ahead, at least
MAX_ENTRY = 2**21  # letters of one entry, which become 60 MB at most: the longest outline of COCO has 30,000
_VISIBLE = re.compile(r"[^ \t\r\n]")


class JsonLists:
    """The lists of a file, given as its bytes in pieces."""

    def __init__(self, chunks: Iterable[bytes], name: str, most: int = 0):
        self.name = name
        self._most = most or MAX_ENTRY  # letters of one entry
        self.lists: set[str] = set()  # keys whose value is a list, as far as it was read
        self._chunks = iter(chunks)
        self._bytes_read = 0
        self._buffer, self._at = "", 0
        self._mark, self._mark_byte = 0, 0  # a place in the buffer, and its byte in the file
        self._entry_byte = 0
        self._is_over = False
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._scan = json.JSONDecoder().raw_decode

    def entries(self, wanted: Collection[str]) -> Iterator[tuple[str, int, Any]]:
        """Yield (key, number, entry) of all entries of the wanted lists, in the order of the file; all else is left
        out."""
        self._expect("{", "an object {...} of lists")
        while True:
            key = self._value()
            if not isinstance(key, str):
                raise self._damaged(f"a key {short(key)}")
            self._expect(":", "a colon")
            if self._peek() != "[":
                if key in wanted:
                    raise BadData(f"{self.name}: {key} is not a list; fetch it again")
                self._value()
            else:
                self.lists.add(key[:100])
                for number, entry in enumerate(self._list()):
                    if key in wanted:
                        yield key, number, entry
            if self._peek() == "}":
                break
            self._expect(",", "a comma")
        self._expect("}", "the end")
        self._end()

    def listed(self) -> Iterator[Any]:
        """Yield the entries of a file that is one list."""
        yield from self._list()
        self._end()

    def members(self, within: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of the object that a file is, or of the one that its member `within` is."""
        for key in self._keys():
            if not within:
                yield key, self._marked_value()
            elif key == within and self._peek() == "{":
                for inner in self._keys():
                    yield inner, self._marked_value()
            else:
                self._value()
        self._end()

    def _keys(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads the value of each before the next."""
        self._expect("{", "an object {...}")
        if self._peek() != "}":
            while True:
                key = self._value()
                if not isinstance(key, str):
                    raise self._damaged(f"a key {short(key)}")
                self._expect(":", "a colon")
                yield key
                if self._peek() == "}":
                    break
                self._expect(",", "a comma")
        self._expect("}", "the end")

    def _marked_value(self) -> Any:
        self._peek()
        self._entry_byte = self._byte()
        return self._value()

    def _end(self) -> None:
        while _VISIBLE.search(self._buffer, self._at) is None:
            self._at = len(self._buffer)
            if not self._more(1):
                return
        raise self._damaged("more behind its end")

    def _list(self) -> Iterator[Any]:
        self._expect("[", "a list")
        while self._peek() != "]":
            self._entry_byte = self._byte()
            yield self._value()
            if self._peek() != "]":
                self._expect(",", "a comma")
        self._expect("]", "the end of the list")

    def span(self) -> tuple[int, int]:
        """Return where the bytes of the entry that was just given begin and end in the file."""
        return self._entry_byte, self._byte()

    def _byte(self) -> int:
        """Return the byte of the place that was read up to."""
        self._mark_byte += len(self._buffer[self._mark : self._at].encode())
        self._mark = self._at
        return self._mark_byte

    def _damaged(self, what: str) -> BadData:
        at = self._bytes_read - len(self._buffer) + self._at
        return BadData(f"{self.name} is not a whole JSON file: {what} before byte {at}; unpack or fetch it again")

    def _peek(self) -> str:
        """Return the next letter that is not white space."""
        while (found := _VISIBLE.search(self._buffer, self._at)) is None:
            self._at = len(self._buffer)
            if not self._more(1):
                raise self._damaged("it ends")
        self._at = found.start()
        return found.group()

    def _expect(self, letter: str, what: str) -> None:
        """Step over one letter."""
        if (found := self._peek()) != letter:
            raise self._damaged(f"{found!r} where {what} should be")
        self._at += 1

    def _value(self) -> Any:
        """Return the next value, whatever it is."""
        self._peek()
        while True:
            problem = ""
            try:
                value, end = self._scan(self._buffer, self._at)
                # A number at the end of what was read may continue behind it.
                if end < len(self._buffer) or self._is_over:
                    self._at = end
                    return value
            except RecursionError:
                raise self._damaged("lists within lists without end") from None
            except ValueError as error:
                problem = str(error).partition(": line")[0]
            left = len(self._buffer) - self._at
            if left > self._most:
                raise self._damaged(problem or f"an entry of more than {self._most} letters")
            # As much again, so that all scans of a long entry together take twice as long as the last.
            if not self._more(min(left, self._most + 1 - left)) and problem:
                raise self._damaged(problem)

    def _more(self, letters: int) -> bool:
        """Read more, at least so many letters if they are there; text already parsed is dropped."""
        if self._is_over:
            return False
        self._byte()
        found = [self._buffer[self._at :]]
        count = 0
        while count < max(letters, BLOCK) and not self._is_over:
            chunk = next(self._chunks, b"")
            if not self._bytes_read and chunk.startswith(codecs.BOM_UTF8):
                self._mark_byte = len(codecs.BOM_UTF8)
            self._bytes_read += len(chunk)
            self._is_over = not chunk
            try:
                found.append(self._decode(chunk, self._is_over))
            except UnicodeDecodeError:
                raise self._damaged("bytes that are not UTF-8") from None
            count += len(found[-1])
        self._buffer, self._at, self._mark = "".join(found), 0, 0
        return True
