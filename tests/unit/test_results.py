"""Numbers of README.md, docs/why/results.md and benchmarks/notes/results.md are those of the raw files, which
benchmarks/results/README.md names."""

import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sightline.measure.benchmark import PUBLISHED_TFLOPS

REPO = Path(__file__).resolve().parents[2]
RAW = REPO / "benchmarks" / "results"
NOTES = "benchmarks/notes/results.md"
OWN_IMAGES = "| | images | contender |"
FIGURE = re.compile(r"(?<![\w.-])\d{1,3}(?:,\d{3})*(?:\.\d+)?(?!\w)")  # not the 16 of fp16, nor the 1 of top-1


class Line(NamedTuple):
    """One line of the table that leads from a figure of the README to a key of a file."""

    what: str
    figure: str
    row: str
    key: str


def table(document: str, head: str) -> list[list[str]]:
    """Return the cells of the table whose first line begins so."""
    lines = (REPO / document).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def files() -> dict[str, list[dict[str, Any]]]:
    """Return what the files of each row of benchmarks/notes/results.md hold."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row, link, _ in table("benchmarks/results/README.md", "| row |"):
        [name] = re.findall(r"\(([^)]+)\)", link)
        found.setdefault(row, []).append(json.loads((RAW / name).read_text(encoding="utf-8")))
    return found


def throughput() -> list[list[str]]:
    return table(NOTES, "| | measured | img/s (range) |")


def at(value: Any, keys: list[str]) -> list[Any]:
    """Return what keys lead to; `*` is all of a list."""
    if not keys:
        return [value]
    first, *rest = keys
    if first == "*":
        return [found for each in value for found in at(each, rest)]
    return at(value[int(first)] if isinstance(value, list) else value[first], rest)


def value_of(line: Line, contents: list[dict[str, Any]]) -> float:
    *how, path = line.key.strip("`").split()
    values = [value for content in contents for value in at(content, path.split("."))]
    if how:
        return {"mean": statistics.mean, "sd": statistics.stdev}[how[0]](values)
    [value] = values
    return float(value)


def rounded(value: float, like: str) -> str:
    """Return a value with as many digits after the point as a figure has."""
    return f"{value:,.{len(like.partition('.')[2])}f}"


def test_every_figure_of_the_readme_is_in_a_raw_file():
    lines = [Line(*cells) for cells in table("benchmarks/results/README.md", "| README |")]
    shown = [(what, figure) for what, number, _ in table("README.md", "| what |") for figure in FIGURE.findall(number)]
    assert shown == [(line.what, line.figure) for line in lines]
    contents = files()
    for line in lines:
        assert rounded(value_of(line, contents[line.row]), line.figure) == line.figure, line


def test_the_readme_names_the_machine_of_its_raw_files():
    machines = {what: machine for what, _, machine in table("README.md", "| what |")}
    contents = files()
    for line in (Line(*cells) for cells in table("benchmarks/results/README.md", "| README |")):
        for here in (content["environment"] for content in contents[line.row] if "environment" in content):
            kind, cores = here["device_kind"], here["cores"]
            on = "two CPU cores" if (kind, cores) == ("cpu", 2) else here["device"].removeprefix("NVIDIA ")
            assert machines[line.what] == on, line


def test_throughput_and_mfu_are_those_of_the_raw_files():
    contents = files()
    checked = 0
    for row, what, cell, compared, commit in throughput():
        if row not in contents:
            continue
        [content] = contents[row]
        part = content.get("step") or content["loader"]
        ours, *others = [contender["images_per_s"] for contender in part["contenders"]]
        assert FIGURE.findall(cell)[:3] == [f"{ours[key]:,.0f}" for key in ("median", "min", "max")], row
        if found := re.search(r"([\d.]+) % MFU", cell):
            flop = 3 * part["forward_gflop"] * 1e9 * ours["median"]
            assert found[1] == f"{100 * flop / (PUBLISHED_TFLOPS[content['device']] * 1e12):.1f}", row
        if found := re.search(r"data wait (\d+) %", cell):
            assert found[1] == f"{100 * part['contenders'][0]['data_wait']:.0f}", row
        if "/" in compared:
            assert compared == " / ".join(f"{other['median']:,.0f}" for other in others), row
        elif compared and not compared.startswith("["):
            assert FIGURE.findall(compared) == [f"{others[0][key]:,.0f}" for key in ("median", "min", "max")], row
        assert content["precision"] == ("fp16" if "fp16" in what or "row 1b" in what else "bf16"), row
        assert content["commit"]["dirty"] or content["commit"]["id"].startswith(commit), row
        checked += 1
    assert checked == 19


def test_whole_runs_and_folds_are_those_of_the_raw_files():
    contents = files()
    whole = [f"{run['whole_s']:.1f}" for run in contents["19"][0]["whole"]]
    ours, plain = (FIGURE.findall(row[2]) for row in table(NOTES, "| | measured | first time"))
    assert [ours, plain] == [whole[0::2], whole[1::2]]
    phases = {row[0]: row[1:] for row in table("benchmarks/notes/startup.md", "| phase |")}
    assert phases["whole"] == [" / ".join(ours), " / ".join(plain)]
    step = [f"{run['phases']['first step']:.1f}" for run in contents["19"][0]["whole"]]
    [shown] = [cells for name, cells in phases.items() if name.startswith("first step")]
    assert shown == [" / ".join(step[0::2]), " / ".join(step[1::2])]

    plain_folds = contents["14a"][0]["rows"]["plain"]
    singles = [fold["dice"] for fold in plain_folds["single"]]
    expected = [statistics.mean(singles), statistics.stdev(singles), plain_folds["ensemble"]["plain"]["dice"]]
    [score] = [row[2] for row in table(NOTES, "| | measured | score |") if row[0] == "14a"]
    assert FIGURE.findall(score) == [f"{value:.4f}" for value in expected]


def test_own_images_are_those_of_the_raw_files():
    contents, shown = files(), table(NOTES, OWN_IMAGES)
    starts = [place for place, cells in enumerate(shown) if cells[0]]
    for start, end in zip(starts, [*starts[1:], len(shown)], strict=True):
        row, lines = shown[start][0], shown[start:end]
        [content] = contents[row]
        sets = content["results"]
        [groups] = [sets[name] for name in sets if len(sets) == 1 or f"`{name}`" in lines[0][1]]
        assert len(lines) == len(groups), row
        for (_, _, what, score, seconds, commit), group in zip(lines, groups.values(), strict=True):
            assert group["words"].split()[0] in what, row  # the recipe, or `loop`
            found, times = FIGURE.findall(score), [round(each["seconds"]) for each in group["rows"]]
            assert found == [rounded(group[key], found[0]) for key in ("mean", "sd")[: len(found)]], (row, what)
            assert len(found) == min(2, len(times)), f"{row}: a spread of one seed, or none of several"
            assert seconds == " to ".join(f"{each:,}" for each in sorted({min(times), max(times)})), (row, what)
            assert content["commit"]["id"].startswith(commit), row


def test_segmentation_beside_a_loop_and_masks_of_public_sets_are_those_of_the_raw_files():
    contents = files()
    shown = table(NOTES, "| | set | `segmentation` |")
    for row, name, ours, loop, seconds, _ in shown:
        groups = contents[row][0]["results"][name.split()[0]]
        assert ours == f"{groups['segmentation']['mean']:.3f}" and loop == f"{groups['FCN loop']['mean']:.3f}", row
        assert seconds == f"{groups['segmentation']['seconds']:.0f}", row
    assert [row[0] for row in shown] == ["S1", "S2"]
    counts: dict[str, list[int]] = {}
    for each in contents["S3"][0]["rows"]:
        count = counts.setdefault(each["set"], [0, 0])
        count[0], count[1] = count[0] + each["compared"], count[1] + each["equal"]
    sets = table("benchmarks/notes/masks.md", "| repository | form |")
    assert {name: [int(compared), int(equal)] for name, _, _, compared, equal in sets} == counts


def test_the_page_of_results_has_the_numbers_of_the_notes():
    notes: dict[str, str] = {}  # row -> its cells, with those of the lines that continue it
    row = ""
    for line in (REPO / NOTES).read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| |", "|---")):
            row = line.split("|")[1].strip()
        if line.startswith("|"):
            notes[row] = f"{notes.get(row, '')} {line}"
    page = (REPO / "docs/why/results.md").read_text(encoding="utf-8")
    lines = [line.strip("|") for line in page.splitlines() if line.startswith("| ") and not line.startswith("| row")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert len(rows) > 20
    for cells in rows:
        for figure in FIGURE.findall(" ".join(cells[2:])):
            assert figure in FIGURE.findall(notes[cells[0]]), f"row {cells[0]}: {figure}"


def test_rows_without_a_raw_file_are_named():
    scores = [*table(NOTES, "| | measured | score |"), *table(NOTES, OWN_IMAGES)]
    whole = table(NOTES, "| | measured | first time")
    rows = {row[0] for row in [*throughput(), *scores, *whole]} - {""}
    text = (RAW / "README.md").read_text(encoding="utf-8")
    [missing] = re.findall(r"has no raw file: (.*)\.", text)
    assert set(re.findall(r"\w+", missing.replace(" and ", " "))) == rows - files().keys()
    assert f"rows {missing} have none" in " ".join((REPO / NOTES).read_text(encoding="utf-8").split())


def test_commits_are_those_that_the_files_hold():
    contents = files()
    for row, _, shown in table("benchmarks/results/README.md", "| row |"):
        for commit in (content.get("commit") for content in contents[row]):
            expected = commit["id"][:7] + (" with changes" if commit["dirty"] else "") if commit else "none"
            assert shown == expected, row


@pytest.mark.parametrize("document", ["README.md", "docs/reference/supported.md"])
def test_documents_name_the_versions_of_torch_that_numbers_and_pins_have(document: str):
    text = (REPO / document).read_text(encoding="utf-8")
    [pinned] = re.findall(r"^torch==(\d+\.\d+)", (REPO / "constraints.txt").read_text(), flags=re.MULTILINE)
    measured = [json.loads(path.read_text(encoding="utf-8")).get("environment") for path in RAW.glob("*nvidia*.json")]
    known = [environment for environment in measured if environment]
    assert {environment["ranks"] for environment in known} == {1}  # no run used more than one GPU
    [on_gpu] = {environment["packages"]["torch"].rpartition(".")[0] for environment in known}
    assert on_gpu != pinned and f"torch {on_gpu}" in text and f"torch {pinned}" in text
