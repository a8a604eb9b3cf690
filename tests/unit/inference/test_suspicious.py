"""What `check RUN` says of labels that the network contradicts."""

from sightline.inference import suspicious


def row(**more: object) -> dict:
    known = {"split": "val", "name": "a.jpg", "class": "cat", "predicted": "dog"}
    return {**known, "confidence": 0.98765, "label_confidence": 0.01, **more}


def test_every_sample_is_a_line_and_classes_that_it_does_not_know_are_named():
    found = {
        "checkpoint": "ckpt-00000225",
        "samples": {"train": 900, "val": 100},
        "suspicious": {"train": 1, "val": 1},
        "unsure_classes": {"train": [], "val": [f"c{n}" for n in range(9)]},
        "rows": [row(path="/data/a.jpg"), row(split="train", **{"class": "", "predicted": ""})],
    }
    lines = suspicious.as_text(found).splitlines()
    assert lines[:3] == [
        "suspicious labels: 1 of 900 training images and 1 of 100 validation images, as ckpt-00000225 predicts them",
        "  val: /data/a.jpg: labelled cat, predicted as dog (confidence 0.9877, of the label 0.0100)",
        "  train: a.jpg: labelled nothing, predicted as nothing (confidence 0.9877, of the label 0.0100)",
    ]
    assert lines[3].startswith(
        "val: the network mostly gets these classes wrong, so that its doubts say little: c0, c1"
    )
    assert "c7" in lines[3] and "c8" not in lines[3]
    assert lines[4:] == ["The network has learnt from the training labels, so that it may repeat wrong ones."]
    for more, words in ((1000, []), (1001, ["  and 1 more"])):
        many = {**found, "suspicious": {"train": 1, "val": more - 1}, "unsure_classes": {}}
        assert suspicious.as_text(many).splitlines()[3:-1] == words
