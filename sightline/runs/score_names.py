"""Names of scores as people read them. log.jsonl, scores.json and flags keep the keys."""

from __future__ import annotations

from collections.abc import Mapping

# A score of all samples has another name where it is that of one class: accuracy on its samples is its recall.
OF_CLASS = {"top1": "recall", "map": "ap", "miou": "iou", "samples": "images", "truths": "objects"}
# Of COCO's scores those that few look for. They stand last, or folded.
COCO_MORE = ("ap75", "aps", "apm", "apl", "ar1", "ar10", "ar100", "ars", "arm", "arl")
TITLES = {
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "aps": "AP of small objects",
    "apm": "AP of medium objects",
    "apl": "AP of large objects",
    "ar1": "AR, 1 detection",
    "ar10": "AR, 10 detections",
    "ar100": "AR, 100 detections",
    "ars": "AR of small objects",
    "arm": "AR of medium objects",
    "arl": "AR of large objects",
    "map": "mAP",
    "f1": "F1",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "score_threshold": "score threshold",
    "exact": "exact matches",
    "dice": "Dice",
    "dice_sum": "sum of Dice",
    "iou": "IoU",
    "miou": "mean IoU",
    "pixel_accuracy": "pixel accuracy",
    "val_loss": "loss",
}


def of_class(key: str) -> str:
    """Return the name of a score of one class, as the terminal shows it."""
    return OF_CLASS.get(key, key)


def title(key: str) -> str:
    """Return the name of a score, as the report shows it."""
    return TITLES.get(key, key)


def shown(values: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of an evaluation to be printed: without the count of samples, and each number once."""
    hidden = {"samples", *(["f1"] if "macro_f1" in values else [])}  # of several labels, f1 is the same by its old name
    return {name: value for name, value in values.items() if name not in hidden}
