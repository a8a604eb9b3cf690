"""Largest components of masks, against a flood fill in plain Python."""

import itertools

import numpy as np

from sightline.data.volumes.components import keep_largest


def filled(mask: np.ndarray, number: int) -> list[set[tuple[int, ...]]]:
    """Return the components of a class: voxels that share a face."""
    left = {tuple(place) for place in np.argwhere(mask == number).tolist()}
    found = []
    while left:
        component, border = set(), {left.pop()}
        while border:
            place = border.pop()
            component.add(place)
            for axis, step in itertools.product(range(3), (-1, 1)):
                other = tuple(at + step * (axis == number) for number, at in enumerate(place))
                if other in left:
                    left.remove(other)
                    border.add(other)
        found.append(component)
    return found


def test_the_largest_component_of_each_class_is_kept():
    mask = (np.random.default_rng(0).random((6, 7, 8)) * 3).astype(np.uint8)
    before = mask.copy()
    expected = mask.copy()
    components = filled(mask, 1)
    most = max(map(len, components))
    for component in components:
        for place in component if len(component) < most else ():
            expected[place] = 0
    assert len(components) > 3 and np.array_equal(keep_largest(mask, (1,)), expected)
    both = keep_largest(mask, (1, 2))
    assert all(len({len(part) for part in filled(both, number)}) == 1 for number in (1, 2))
    assert np.array_equal(mask, before) and np.array_equal(keep_largest(mask, ()), mask)


def test_corners_do_not_join_equal_sizes_stay_and_an_absent_class_changes_nothing():
    mask = np.zeros((1, 4, 4), np.uint8)
    mask[0, 0, 0] = mask[0, 1, 1] = 1  # they touch at a corner
    assert np.array_equal(keep_largest(mask, (1, 2)), mask)
    mask[0, 1, 2] = 1
    assert keep_largest(mask, (1,)).sum() == 2 and keep_largest(mask, (1,))[0, 0, 0] == 0
