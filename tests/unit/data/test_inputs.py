"""The files that the command line names, and the names they get."""

import os
import shutil
from pathlib import Path

import pytest

from sightline.data.inputs import list_files
from sightline.errors import BadSample, UsageError
from sightline.files.image_bytes import read_bytes

IMAGES = (".jpg", ".png")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of all sorts below a folder; their content is their path."""
    for name in ("b/x.jpg", "a/x.jpg", "a/deep/er/y.PNG", "a/notes.txt", "z.png", ".hidden.jpg", ".git/q.jpg"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "tree"


def names(inputs: list[Path], out: Path = Path("nowhere")) -> list[str]:
    return list(list_files(inputs, IMAGES, out))


def test_a_folder_is_searched_to_the_bottom_in_order(tree: Path):
    found = list_files([tree], IMAGES, Path("nowhere"))
    assert list(found) == ["a/deep/er/y.PNG", "a/x.jpg", "b/x.jpg", "z.png"]
    assert all(path.read_text() == name for name, path in found.items())


def test_files_of_other_endings_are_counted(tree: Path, tmp_path: Path):
    for name in ("a/1.heic", "b/2.HEIC", "b/README"):
        (tree / name).touch()
    said: list[str] = []
    list_files([tree, tree / "z.png"], IMAGES, Path("nowhere"), said.append)
    assert said == [f"{tree}: ignored 2 .heic, 1 .txt, 1 no ending"]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.heic").touch()
    with pytest.raises(UsageError, match=r"photos holds no file that ends in \.jpg, \.png, but 1 \.heic; give files"):
        names([tmp_path / "photos"])


def test_a_file_is_called_by_its_name_whatever_its_ending(tree: Path):
    assert names([tree / "a" / "x.jpg"]) == ["x.jpg"]
    assert names([tree / "a" / "notes.txt", tree / "z.png"]) == ["notes.txt", "z.png"]


def test_files_of_one_name_keep_their_folders(tree: Path, monkeypatch):
    assert names([tree / "b" / "x.jpg", tree / "a" / "x.jpg"]) == ["b/x.jpg", "a/x.jpg"]
    assert names([tree / "a", tree / "b"]) == ["a/deep/er/y.PNG", "a/x.jpg", "b/x.jpg"]
    monkeypatch.chdir(tree / "a")
    assert names([Path("x.jpg"), Path("../b/x.jpg")]) == ["a/x.jpg", "b/x.jpg"]


def test_a_file_named_twice_counts_once(tree: Path):
    assert names([tree / "a" / "x.jpg", tree / "a" / ".." / "a" / "x.jpg"]) == ["x.jpg"]
    assert names([tree / "b", tree]) == ["x.jpg", "a/deep/er/y.PNG", "a/x.jpg", "z.png"]


def test_links_in_a_circle_end(tree: Path):
    (tree / "a" / "up").symlink_to(tree)
    (tree / "a" / "self").symlink_to("self")
    (tree / "a" / "gone.jpg").symlink_to("nothing.jpg")
    assert names([tree]) == ["a/deep/er/y.PNG", "a/gone.jpg", "a/x.jpg", "b/x.jpg", "z.png"]


def test_results_inside_the_input_are_not_taken_for_images(tree: Path):
    (tree / "out").mkdir()
    (tree / "out" / "x.jpg").write_text("drawn")
    assert names([tree], tree / "out") == ["a/deep/er/y.PNG", "a/x.jpg", "b/x.jpg", "z.png"]
    assert "out/x.jpg" in names([tree])


# The folder of a task of the Decathlon

VOLUMES = (".nii.gz", ".nii")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    root = tmp_path / "around" / "Task04_Hippocampus"
    for part, cases in (("imagesTr", "ab"), ("labelsTr", "ab"), ("imagesTs", "c"), ("labelsTs", "c")):
        for case in cases:
            (root / part).mkdir(parents=True, exist_ok=True)
            (root / part / f"{case}.nii.gz").write_text(part)
            (root / part / f"._{case}.nii.gz").write_text("what a Mac leaves in a tar")
    (root / "dataset.json").write_text("{}")
    return root


def volumes(*inputs: Path) -> tuple[dict[str, str], list[str]]:
    """Return the files found, as name -> content, and the messages."""
    reported: list[str] = []
    found = list_files(inputs, VOLUMES, Path("nowhere"), reported.append)
    return {name: path.read_text() for name, path in found.items()}, reported


def test_of_a_task_the_test_images_are_meant_or_else_those_of_training(task: Path):
    assert volumes(task / "imagesTs") == ({"c.nii.gz": "imagesTs"}, [])
    found, (reported,) = volumes(task)
    assert found == {"c.nii.gz": "imagesTs"}
    assert reported == f"{task} is the folder of a task (it has a dataset.json): only its imagesTs is taken"
    (task / "imagesTs" / "c.nii.gz").unlink()  # a folder with nothing but hidden files is as good as none
    for _ in range(2):
        found, (reported,) = volumes(task)
        assert found == {"a.nii.gz": "imagesTr", "b.nii.gz": "imagesTr"} and "only its imagesTr is taken" in reported
        shutil.rmtree(task / "imagesTs", ignore_errors=True)


def test_a_task_below_a_folder_gives_no_labels_either(task: Path):
    (task.parent / "z.nii").write_text("z")
    found, reported = volumes(task.parent)
    assert found == {"Task04_Hippocampus/imagesTs/c.nii.gz": "imagesTs", "z.nii": "z"} and len(reported) == 1


def test_a_task_without_images_has_nothing_to_predict(task: Path):
    for part in ("imagesTs", "imagesTr"):
        shutil.rmtree(task / part)
    with pytest.raises(UsageError, match=r"Task04_Hippocampus holds no file that ends in \.nii\.gz, \.nii"):
        volumes(task)


def test_labels_are_found_where_they_are_asked_for(task: Path):
    """`evaluate FOLDER --labels` may be given a folder of labels."""
    assert volumes(task / "labelsTr") == ({"a.nii.gz": "labelsTr", "b.nii.gz": "labelsTr"}, [])


def test_images_beside_labels_need_no_dataset_json(task: Path):
    (task / "dataset.json").unlink()
    assert volumes(task) == (
        {"c.nii.gz": "imagesTs"},
        [f"{task} has images beside labels: only its imagesTs is taken"],
    )
    shutil.rmtree(task / "imagesTs")
    assert set(volumes(task)[0].values()) == {"imagesTr"}
    shutil.rmtree(task / "labelsTr")  # any folder, of which nothing is known
    assert set(volumes(task)[0].values()) == {"imagesTr", "labelsTs"}


def test_drawings_of_volumes_are_not_predicted(tmp_path: Path):
    for name in ("a.nii.gz", "a.png", "b/c.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(list_files([tmp_path], (*VOLUMES, ".png", ".jpg"), tmp_path / "out")) == ["a.nii.gz"]
    (tmp_path / "a.nii.gz").unlink()
    assert list(list_files([tmp_path], (*VOLUMES, ".png", ".jpg"), tmp_path / "out")) == ["a.png", "b/c.jpg"]


def test_what_is_not_there_is_said(tree: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"nix\.jpg does not exist"):
        names([tree / "nix.jpg"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty holds no file that ends in \.jpg, \.png"):
        names([tree, tmp_path / "empty"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is neither a file nor a folder"):
        names([tmp_path / "pipe"])


def test_bytes_are_read_within_limits(tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(b"abc")
    assert read_bytes(tmp_path / "a.jpg", "a.jpg") == b"abc"
    with (tmp_path / "large.jpg").open("wb") as file:
        file.truncate(300 * 2**20)  # sparse: nothing is written
    os.mkfifo(tmp_path / "pipe.jpg")  # nobody writes to it: opening it would wait
    for name, reason in (
        ("large.jpg", "314572800 bytes, more than"),
        ("pipe.jpg", "not a regular"),
        ("no.jpg", "No such"),
    ):
        with pytest.raises(BadSample, match=reason):
            read_bytes(tmp_path / name, name)
