"""Which flags a wrong word leads to, by ratios worked out by hand: twice the letters in common over all letters."""

import pytest

from sightline.recipe import suggest

NAMES = ("--data.path", "--data.size", "--train.epochs", "--optimizer.lr", "--optimizer.momentum", "--run.out")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--lr", ["--optimizer.lr"]),  # a short name
        ("--data-size", ["--data.size"]),  # a dot too few
        ("--data", ["--data.path"]),
        ("--optimizer", ["--optimizer.lr"]),  # a part: its first field
        ("--imgsz", ["--data.size"]),  # the word of others
        ("--bs", []),  # what it means is no flag here
        ("--momentun", ["--optimizer.momentum"]),
        ("--epoch-size", ["--train.epochs"]),  # 0.71 and no more by its first letters; --epoch is no short name
        ("--out-dir", ["--run.out"]),  # by the short name before the dash
        ("--zzz", []),
    ],
)
def test_the_nearest_flags(flag: str, expected: list[str]):
    assert suggest.nearest_flags(flag, NAMES) == expected


def test_words_with_seven_letters_of_ten_in_common_are_near_and_with_six_are_not():
    assert suggest.nearest_flags("--abcdefgxyz", ["--a.abcdefguvw"]) == ["--a.abcdefguvw"]  # 14 / 20
    assert suggest.nearest_flags("--abcdefwxyz", ["--a.abcdefstuv"]) == []  # 12 / 20


def test_flags_that_are_nearly_as_near_as_the_best_are_named_three_at_most():
    names = [f"--{part}.weight" for part in "abcde"]
    assert suggest.nearest_flags("--wieght", names) == names[:3]
    assert suggest.nearest_flags("--d.wieght", names) == ["--d.weight"]  # a tenth more for its part, at least
    assert suggest.nearest_flags("--weigh", ["--a.weights", "--a.weigh", "--b.weight"])[0] == "--a.weigh"
    assert suggest.nearest_flags("--topk", ["--task.topk"], ["--top"]) == ["--task.topk"]
    assert suggest.nearest_flags("--tpo", ["--task.what"], ["--top"]) == []  # short, and 0.67 alike
    assert suggest.nearest_flags("--topp", ["--task.what"], ["--top"]) == ["--top"]  # 0.86


def test_short_words_that_begin_otherwise_are_near_from_four_fifths_on():
    assert suggest.nearest_flags("--xout", ["--run.out"]) == ["--run.out"]  # 6 / 7
    assert suggest.nearest_flags("--count", ["--run.out"]) == []  # 6 / 8, though more than 0.7
    assert suggest.nearest_flags("--ountt", ["--run.out"]) == ["--run.out"]  # the same, with the same first letter


def test_a_piece_of_a_word_counts_less_than_the_word():
    assert suggest.nearest_flags("--width", ["--model.global-width", "--model.width"]) == ["--model.width"]
    assert suggest.nearest_flags("--global", ["--train.global-batch"]) == ["--train.global-batch"]  # 0.85


def test_the_nearest_word():
    assert suggest.nearest("resnet50", ["resnet_50", "unet"]) == "; did you mean resnet_50?"
    assert suggest.nearest("resnet50", ["resnet_50"], "`{}`") == "; did you mean `resnet_50`?"
    assert suggest.nearest("zzz", ["resnet_50"]) == ""
    assert suggest.nearest("a" * 80 + "b" * 500, ["a" * 80]) == f"; did you mean {'a' * 80}?"
