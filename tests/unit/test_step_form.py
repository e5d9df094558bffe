"""The sizes that captured steps have, and the rows that a step really computes."""

from itertools import pairwise

import pytest

from slipstream.core.step_form import CapturedForm, ExactForm, bucket_sizes, row_totals


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (6, [1, 2, 4, 6]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, 8, 16, 24, 32, 48, 64]),
        (100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]),
    ],
)
def test_buckets_end_with_the_most_requests(most: int, expected: list[int]) -> None:
    assert bucket_sizes(most) == expected


@pytest.mark.parametrize("most", [5, 63, 65, 255, 256, 257, 384, 500, 1024])
def test_buckets_rise_and_waste_no_more_than_half(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for smaller, larger in pairwise(sizes):
        assert larger <= max(2 * smaller, smaller + 1)


@pytest.mark.parametrize("bucket", [1, 2, 8, 24, 32, 96, 128, 384])
@pytest.mark.parametrize("width", [0, 1, 2, 5, 7, 15])
def test_totals_of_rows_rise_by_tiles_up_to_all(bucket: int, width: int) -> None:
    totals = row_totals(bucket, width)
    assert totals[-1] == bucket * (width + 1)
    assert list(totals) == sorted(set(totals))
    assert all(rows % 16 == 0 and rows > bucket for rows in totals[:-1])
    assert len(totals) <= 4
    if totals[-1] < 64 or width == 0:
        assert len(totals) == 1


def test_a_packed_step_takes_the_smallest_total_that_holds_it() -> None:
    form = CapturedForm(128, (0, 1, 4, 7), packs=True)
    assert row_totals(32, 7) == (96, 144, 208, 256)
    assert form.rows(32, 7, 32 * 7) == 256
    assert form.rows(32, 6, 16 * 7) == 144  # six of seven: as wide as seven
    assert form.rows(31, 7, 66) == 144
    assert form.rows(31, 7, 65) == 96
    assert form.rows(31, 0, 0) == 32
    assert form.rows(3, 4, 6) == 20  # too few to be packed
    assert CapturedForm(128, (0, 1, 4, 7), packs=False).rows(31, 6, 9) == 256
    assert ExactForm().rows(31, 6, 9) == 40
