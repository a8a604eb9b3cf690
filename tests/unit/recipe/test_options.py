"""A command's own options: what command lines set, what is left for the recipe, refusals and help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from sightline.commands.launch_hosts import LaunchOptions
from sightline.data.prepare.coco import CocoOptions
from sightline.data.prepare.convert import ConvertOptions
from sightline.data.prepare.decathlon import DecathlonOptions
from sightline.data.prepare.imagenet import ImagenetOptions
from sightline.data.prepare.shapes import ShapesOptions
from sightline.data.prepare.static import StaticOptions
from sightline.errors import UsageError
from sightline.measure.benchmark import BenchmarkOptions
from sightline.recipe.options import parse_options, split_options


@dataclass(frozen=True)
class Oven:
    """What bakes it."""

    degrees: float = 180.0
    """Heat."""
    fan: bool = True
    """Hot air."""


@dataclass(frozen=True)
class Cake:
    """Bake a cake
    of these layers.

    More that is not in the help."""

    out: Path
    """Where it is put. It is
    hot."""
    layers: tuple[Literal["sponge", "cream"], ...] = ("sponge",)
    """From the bottom."""
    candles: int | None = None
    """How many."""
    photo: Path | None = None
    """Of the person."""
    size: tuple[int, float] = (20, 5.5)
    """Width and height."""
    name: str = ""
    iced: bool = False
    """With sugar."""
    tin: Literal[20, 26] = 26
    oven: Oven = field(default_factory=lambda: Oven(degrees=200.0))

    def __post_init__(self) -> None:
        if self.candles == 13:
            raise ValueError("13 candles bring bad luck")


def cake(line: str) -> Cake:
    return parse_options(Cake, line.split(), prog="sightline bake cake")


def launched(line: str) -> tuple[LaunchOptions, list[str]]:
    return split_options(LaunchOptions, line.split(), prog="sightline launch")


def measured(line: str) -> tuple[BenchmarkOptions, list[str]]:
    return split_options(BenchmarkOptions, line.split(), prog="sightline benchmark", flat=True)


# Values


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--out x", Cake(Path("x"))),
        ("--out=x=y", Cake(Path("x=y"))),
        ("--out a --out b", Cake(Path("b"))),
        ("--out x --layers cream sponge --iced", Cake(Path("x"), layers=("cream", "sponge"), iced=True)),
        ("--layers=cream sponge --out x", Cake(Path("x"), layers=("cream", "sponge"))),
        ("--out x --layers", Cake(Path("x"), layers=())),
        ("--out x --iced --no-iced", Cake(Path("x"))),
        ("--out x --candles 3 --photo me.jpg", Cake(Path("x"), candles=3, photo=Path("me.jpg"))),
        ("--out x --candles 3 --candles none --photo=None", Cake(Path("x"))),
        ("--out x --size -3 1e2 --tin 20", Cake(Path("x"), size=(-3, 100.0), tin=20)),
        ("--out x --name --name=--odd", None),
        ("--out x --name= --name=--odd", Cake(Path("x"), name="--odd")),
        ("--out x --name -b", Cake(Path("x"), name="-b")),
        ("--out x --oven.no-fan", Cake(Path("x"), oven=Oven(200.0, fan=False))),
        ("--out x --oven.degrees=-1", Cake(Path("x"), oven=Oven(-1.0))),
        ("--out x", Cake(Path("x"), oven=Oven(200.0))),
    ],
)
def test_each_kind_of_value(line: str, expected: Cake | None):
    if expected is None:
        with pytest.raises(UsageError, match="^--name needs a value$"):
            cake(line)
    else:
        assert cake(line) == expected


def test_the_command_lines_of_the_documents():
    def parsed(kind: type, line: str) -> object:
        return parse_options(kind, line.split(), prog="sightline prepare x")

    assert parsed(ShapesOptions, "--out demo/images --only detection --train-pictures 4000") == ShapesOptions(
        Path("demo/images"), only=("detection",), train_pictures=4000
    )
    assert parsed(ShapesOptions, "--out d --only classification detection --train_per_class=3") == ShapesOptions(
        Path("d"), only=("classification", "detection"), train_per_class=3
    )
    assert parsed(DecathlonOptions, "") == DecathlonOptions()
    assert parsed(DecathlonOptions, "--source /data --out /data/01_2d --task 01 --dim 2") == DecathlonOptions(
        Path("/data"), Path("/data/01_2d"), task="01", dim=2
    )
    assert parsed(DecathlonOptions, "--task 04 --download --memory-gb 2.5") == DecathlonOptions(
        task="04", download=True, memory_gb=2.5
    )
    assert parsed(CocoOptions, "--source bees --out b --form tfrecord --shards 8 --val-shards 2") == CocoOptions(
        Path("bees"), Path("b"), "tfrecord", shards=8, val_shards=2
    )
    line = "--source a --out b --form tfrecord --shards 1024 --val-shards 128 --repair --first-label -1"
    assert parsed(ConvertOptions, line) == ConvertOptions(
        Path("a"), Path("b"), "tfrecord", first_label=-1, shards=1024, val_shards=128, repair=True
    )
    assert parsed(ImagenetOptions, "--train t.tar --val v.tar --labels l.txt --out=o --form tar") == ImagenetOptions(
        Path("t.tar"), Path("v.tar"), Path("l.txt"), Path("o"), "tar"
    )
    options = parse_options(
        StaticOptions,
        "--out batches --batch 16 --steps 50 --last-batch pad --data.path coco --data.max-boxes=7".split(),
        prog="sightline prepare static",
    )
    assert (options.out, options.batch, options.steps, options.last_batch) == (Path("batches"), 16, 50, "pad")
    assert (options.data.path, options.data.max_boxes, options.data.size) == ("coco", 7, 300)


# Words that are the recipe's


def test_a_launch_leaves_the_recipe_and_its_flags_in_their_order():
    options, rest = launched(
        "resnet50_lars --hosts 192.10.100.174:8,10.10.100.101:8 --launcher mpirun --ssh-port 3022 --interfaces eth0 "
        "--mpi.prefix /usr/local/openmpi --data.image-type bf16 --data.path /data --train.global_batch=8192 --epochs 9"
    )
    assert (options.hosts, options.launcher, options.ssh_port) == (
        "192.10.100.174:8,10.10.100.101:8",
        "mpirun",
        3022,
    )
    assert (options.interfaces, options.mpi.prefix, options.mpi.version) == ("eth0", "/usr/local/openmpi", 5)
    flags = "--data.image-type bf16 --data.path /data --train.global_batch=8192 --epochs 9"
    assert rest == ["resnet50_lars", *flags.split()]


@pytest.mark.parametrize(
    ("line", "field", "value", "rest"),
    [
        ("--hosts a:8 resnet50 --data.path x", "hosts", "a:8", "resnet50 --data.path x"),
        ("--print resnet50", "print", True, "resnet50"),
        ("r --check --lr 1", "check", True, "r --lr 1"),
        ("r --data.mean -1 -.5 --nodes 2 --per_node=8", "nodes", 2, "r --data.mean -1 -.5"),
        ("r --model_x a_b --foo_bar=c_d --name n", "name", "n", "r --model_x a_b --foo_bar=c_d"),
        ("r --env A=1 B=2 --run.compile=off", "env", ("A=1", "B=2"), "r --run.compile=off"),
        ("r --forward --lr 1", "forward", (), "r --lr 1"),
        ("r --cores -1 --train.deterministic", "cores", -1, "r --train.deterministic"),
        ("r --hostz a:8 --name n", "name", "n", "r --hostz a:8"),
        ("r --data.fold all --min_hosts 1 -x", "min_hosts", 1, "r --data.fold all -x"),
        ("r --name n --help-all data", "name", "n", "r --help-all data"),
    ],
)
def test_words_of_the_recipe(line: str, field: str, value: object, rest: str):
    options, left = launched(line)
    assert (getattr(options, field), left) == (value, rest.split())


def test_flags_of_nested_options_begin_with_their_name():
    options, rest = launched(
        "r --kubernetes.image registry/sightline:0.1.0 --kubernetes.volumes claim:imagenet:/data:ro claim:runs:/runs "
        "--mpi.version 4 --mpi.root --slurm.extra=--cpus-per-gpu=12 --slurm.no_requeue --networks x"
    )
    assert options.kubernetes.image == "registry/sightline:0.1.0"
    assert options.kubernetes.volumes == ("claim:imagenet:/data:ro", "claim:runs:/runs")
    assert (options.mpi.version, options.mpi.root, options.mpi.networks) == (4, True, "")
    assert (options.slurm.extra, options.slurm.requeue, options.slurm.gres) == (("--cpus-per-gpu=12",), False, "gpu")
    assert rest == ["r", "--networks", "x"]


def test_flags_of_a_flat_command_have_no_names_of_parts():
    options, rest = measured("resnet50 --scaling --devices 8 64 --links nvlink4 ib200 --per-host 8 --step_ms 35.2")
    assert options.scaling and rest == ["resnet50"]
    assert (options.machine.devices, options.machine.links) == ((8, 64), ("nvlink4", "ib200"))
    assert (options.machine.per_host, options.machine.step_ms) == (8, 35.2)
    options, rest = measured(
        "unet2d --steps 145 --data real --out /tmp/f --logname p.json --data.path d --run.devices 2"
    )
    assert (options.steps, options.data, options.out, options.logname) == (145, "real", Path("/tmp/f"), "p.json")
    assert rest == "unet2d --data.path d --run.devices 2".split()
    assert measured("--peers demo_classification")[1] == ["demo_classification"]
    assert measured("r --machine.per-host 3")[1] == ["r", "--machine.per-host", "3"]


# Refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "bake cake needs --out PATH; `sightline bake cake --help` shows all"),
        ("--out", "--out needs a value"),
        ("--out --iced", "--out needs a value"),
        ("--out x y", "unexpected 'y'; every flag of bake cake begins with -- and has its value behind it; "
                      "`sightline bake cake --help` shows all"),
        ("--out x -q", "unexpected '-q'; every flag of bake cake begins with -- and has its value behind it; "
                       "`sightline bake cake --help` shows all"),
        ("--outt x", "unknown flag --outt of bake cake; did you mean --out? `sightline bake cake --help` shows all"),
        ("--laiers=x", "unknown flag --laiers of bake cake; did you mean --layers? "
                       "`sightline bake cake --help` shows all"),
        ("--degrees 3", "unknown flag --degrees of bake cake; did you mean --oven.degrees? "
                        "`sightline bake cake --help` shows all"),
        ("--xyzzy 3", "unknown flag --xyzzy of bake cake; `sightline bake cake --help` shows all"),
        ("--out x --iced yes", "--iced is a switch: write it alone, or --no-iced"),
        ("--out x --no-iced=1", "--iced is a switch: write it alone, or --no-iced"),
        ("--out x --oven.no-fan=1", "--oven.fan is a switch: write it alone, or --oven.no-fan"),
        ("--out x --tin 21", "--tin is '21', expected one of 20, 26"),
        ("--out x --tin", "--tin needs a value, expected one of 20, 26"),
        ("--out x --layers jam", "--layers is 'jam', expected one or more of sponge, cream"),
        ("--out x --candles many", "--candles is 'many', expected a whole number or none"),
        ("--out x --photo", "--photo needs a value"),
        ("--out x --oven.degrees hot", "--oven.degrees is 'hot', expected a number"),
        ("--out x --candles 13", "13 candles bring bad luck"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(line: str, message: str):
    with pytest.raises(UsageError) as error:
        cake(line)
    assert str(error.value) == message


def test_all_that_is_missing_is_named_at_once():
    with pytest.raises(UsageError, match="^prepare imagenet needs --train PATH, --val PATH and --labels PATH; "):
        parse_options(ImagenetOptions, ["--out", "x"], prog="sightline prepare imagenet")
    with pytest.raises(UsageError, match=r"needs --out PATH and --form \{folder,tar,tfrecord,coco,yolo,parquet\}; "):
        parse_options(ConvertOptions, ["--source", "x"], prog="sightline prepare convert")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("r --launcher ssj", "--launcher is 'ssj', expected one of torchrun, mpirun, slurm, kubernetes, ssh; did you "
                             "mean ssh?"),
        ("r --print=true", "--print is a switch: write it alone, or --no-print"),
        ("r --mpi.version 6", "--mpi.version is '6', expected one of 4, 5"),
        ("r --nodes two", "--nodes is 'two', expected a whole number"),
        ("r --name --hosts a", "--name needs a value"),
    ],
)  # fmt: skip
def test_wrong_values_before_a_recipe(line: str, message: str):
    with pytest.raises(UsageError) as error:
        launched(line)
    assert str(error.value) == message


def test_the_dataclass_checks_its_values():
    with pytest.raises(UsageError, match="^--steps 0 must be at least 1$"):
        measured("r --steps 0")
    with pytest.raises(UsageError, match="^--per-host 0 must be at least 1$"):
        measured("r --scaling --per-host 0")
    with pytest.raises(UsageError, match="^--step-ms belongs to --scaling; add it$"):
        measured("r --step-ms 3")


# Help

CAKE = """\
usage: sightline bake cake --out PATH [options]

Bake a cake of these layers.

options:
  --out PATH
      Where it is put. It is hot (required)
  --layers {sponge,cream} ...
      From the bottom (default: sponge)
  --candles INT|none
      How many
  --photo PATH|none
      Of the person
  --size INT FLOAT
      Width and height (default: 20 5.5)
  --name TEXT
  --iced, --no-iced
      With sugar (default: off)
  --tin {20,26}
      (default: 26)

What bakes it:
  --oven.degrees FLOAT
      Heat (default: 200.0)
  --oven.fan, --oven.no-fan
      Hot air (default: on)
"""


@pytest.mark.parametrize("line", ["--help", "-h", "--out x -h", "--nope --help", "--layers -h"])
def test_help_is_printed_and_ends_the_process(line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cake(line)
    assert end.value.code == 0
    assert capsys.readouterr() == (CAKE, "")


def test_help_of_a_command_with_a_recipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        launched("resnet50 --data.path x --help")
    text = capsys.readouterr().out
    assert text.startswith("usage: sightline launch RECIPE [options] [--part.field VALUE ...]\n\nStart a recipe on ")
    assert max(map(len, text.splitlines())) <= 80
    assert "\nOptions of Slurm:\n  --slurm.partition TEXT\n      Partition of the cluster\n" in text
    assert "\n  --print, --no-print\n" in text and " (default: PATH '*_PATH' 'PYTHON*' " in text
    with pytest.raises(SystemExit):
        measured("-h")
    text = capsys.readouterr().out
    assert "\nThe machine that --scaling predicts for:\n  --devices INT ...\n" in text
    assert "(default: 2 8 64 1024)" in text and "--machine" not in text
