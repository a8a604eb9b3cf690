"""What a file says of itself before `predict` uses it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sightline.errors import BadCheckpoint, BadData, UsageError
from sightline.export import exported

PATH = Path("model.pt2")
MOST = 16 << 20  # bytes of a description


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A format whose files say `text`, and can run code if `RUNS_CODE`."""
    made = SimpleNamespace(
        RUNS_CODE=False, text="", about=lambda path: made.text, not_trusted=lambda path: UsageError("?")
    )
    monkeypatch.setattr(exported, "_format_of", lambda path: made)
    return made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}" + " " * (MOST - 2), "expected a whole number"),
        ("{}" + " " * (MOST - 1), f"{MOST + 1} bytes, at most {MOST} are read"),
        ("[]", "its description is damaged"),
        ('{"a":1}', "its description is damaged"),
        ("{,", "its description is damaged"),
    ],
    ids=["nothing", "too long", "no object", "no format", "no JSON"],
)
def test_a_damaged_description_is_refused(text: str, said: str, told: SimpleNamespace):
    told.text = text
    with pytest.raises(BadCheckpoint) as raised:
        exported.open_exported(PATH, "best", "", False)
    assert str(raised.value).startswith("model.pt2: its description is damaged (")
    assert said in str(raised.value) and str(raised.value).endswith("); export it again")
    assert ("at most" in str(raised.value)) == (len(text) > MOST)


def test_a_file_of_a_later_version_of_a_stranger_or_of_no_export_is_refused(told: SimpleNamespace):
    with pytest.raises(
        BadData, match="^model.pt2 was not written by `sightline export`: it does not say how to feed it;"
    ):
        exported.open_exported(PATH, "best", "", False)
    told.text = '{"format": 99}'
    with pytest.raises(
        UsageError, match="^model.pt2 has format 99, this version reads 1; use the version that wrote it"
    ):
        exported.open_exported(PATH, "best", "", False)
    told.RUNS_CODE = True
    with pytest.raises(UsageError, match=r"^\?$"):
        exported.open_exported(PATH, "best", "", False)
    with pytest.raises(UsageError, match="has format 99"):
        exported.open_exported(PATH, "best", "", True)
    with pytest.raises(
        UsageError, match="^--checkpoint latest: model.pt2 is one network; leave it out, or give the run"
    ):
        exported.open_exported(PATH, "latest", "", True)
