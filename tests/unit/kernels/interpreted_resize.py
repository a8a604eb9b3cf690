"""The Triton kernel that resizes, as Triton's interpreter runs it on the CPU, against float64.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import pytest
from exact_resize import KINDS, worst_difference, worst_of_grids


def test_small_images_are_within_half_a_level_of_the_exact_ones():
    assert worst_difference("bilinear", 9, (6, 16), 4) < 0.52


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_filters_and_more_than_one_block_of_a_square(kind):
    assert worst_difference(kind, 50, (20, 90), 5) < 0.52


@pytest.mark.parametrize(("size", "sides"), [(9, (2, 16)), pytest.param(50, (20, 90), marks=pytest.mark.slow)])
def test_places_between_pixels_are_within_half_a_level_of_the_exact_ones(size, sides):
    assert worst_of_grids(size, sides, 3) < 0.51
