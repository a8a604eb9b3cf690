"""Texts that messages are made of."""

from __future__ import annotations

import pytest

from sightline.errors import first_of


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], ""),
        (["one"], "one"),
        (["one", "two", "three"], "one, two, three"),
        ((1, 2, 3, 4), "1, 2, 3 and 1 more"),
        (range(12), "0, 1, 2 and 9 more"),
    ],
)
def test_a_message_lists_the_first_items_and_counts_the_rest(items, text):
    assert first_of(items, 3) == text
