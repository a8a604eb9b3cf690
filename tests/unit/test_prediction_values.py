"""The objects that `api.predict` returns: short to look at, whole to work with."""

import numpy as np

from sightline.results import Classification, Detection, Segmentation


def test_what_python_prints_of_a_prediction_holds_no_arrays():
    many = np.arange(40.0).reshape(10, 4)
    shown = [
        Classification("a.jpg", "cat", 0.75, {"cat": 0.75, "dog": 0.25}, ("cat",)),
        Detection("a.jpg", many, many[:, 0], ("cat",), (17,), 640, 480),
        Segmentation("a.nii", many.astype(np.uint8), ("none", "lung"), {"lung": 7}, many),
    ]
    assert [repr(each) for each in shown] == [
        "Classification(file='a.jpg', label='cat', probability=0.75, labels=('cat',))",
        "Detection(file='a.jpg', labels=('cat',), ids=(17,), width=640, height=480)",
        "Segmentation(file='a.nii', classes=('none', 'lung'), voxels={'lung': 7})",
    ]
    assert Segmentation("a.nii", many, ("none",), {}).probabilities is None


def test_predictions_with_arrays_are_equal_to_themselves_only():
    boxes = np.zeros((2, 4))
    one, other = (Detection("a.jpg", boxes, boxes[:, 0], ("a", "b"), (1, 2), 9, 9) for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2
    same = [Classification("a.jpg", "cat", 0.75, {"cat": 0.75}, ("cat",)) for _ in range(2)]
    assert same[0] == same[1]
