"""Archives of torch.export (.pt2) that run code when loaded: a real one that was edited to import a module."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Attack(NamedTuple):
    """An edit of models/model.json (text, module -> text), and what an error that refuses it names."""

    edit: Callable[[str, str], str]
    told: str


def changed(
    archive: Path, out: Path, ending: str = "no file", change: Callable[[bytes], bytes] = bytes, new: str = ""
) -> Path:
    """Copy an archive, with one of its files changed, or one more."""
    with zipfile.ZipFile(archive) as given, zipfile.ZipFile(out, "w") as copy:
        for name in given.namelist():
            copy.writestr(name, change(given.read(name)) if name.endswith(ending) else given.read(name))
        if new:
            copy.writestr(given.namelist()[0].partition("/")[0] + new, b"code")
    return out


def hostile(
    archive: Path, folder: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Callable[[], bool]]:
    """Write evil.pt2 into the folder; return its path, and a function that says whether its code ran."""
    mark, module = folder / "ran", f"imported_by_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(folder)  # a module that is installed
    edit = ATTACKS[attack].edit
    evil = changed(archive, folder / "evil.pt2", "models/model.json", lambda text: edit(text.decode(), module).encode())
    return evil, mark.exists


def _guard(text: str, module: str) -> str:
    model = json.loads(text)
    model["guards_code"] = [f"__import__({module!r}) is not None"]
    return json.dumps(model)


def _name(text: str, module: str) -> str:
    return text.replace('"image"', json.dumps(f"image=__import__({module!r})"))


def _treespec(text: str, module: str) -> str:
    model: dict[str, Any] = json.loads(text)
    signature = model["graph_module"]["module_call_graph"][0]["signature"]
    keys = json.dumps([{"__enum__": True, "fqn": f"{module}:Kind", "name": "A"}])  # of the dict of named arguments
    signature["in_spec"] = signature["in_spec"].replace('"[]"', json.dumps(keys))
    return json.dumps(model)


ATTACKS = {
    "guard": Attack(_guard, "guards_code"),
    "name of the input": Attack(_name, "image=__import__"),
    "treespec": Attack(_treespec, "in_spec"),
}
