"""RepetitionDetection: outputs that end with one pattern over and over."""

from random import Random

import pytest

from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import RepetitionDetection


def test_it_finds_what_a_plain_search_finds() -> None:
    chance, found = Random(0), 0
    for _ in range(3000):
        smallest = chance.randint(0, 4)
        largest, count = smallest + chance.randint(0, 3), chance.randint(2, 4)
        detection = RepetitionDetection(
            max_pattern_size=largest, min_pattern_size=smallest, min_count=count
        )
        tokens = [chance.randint(0, 1) for _ in range(chance.randint(0, 20))]
        expected = any(
            len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
            for size in range(max(1, smallest), largest + 1)
        )
        assert detection.found(tokens) == expected
        assert detection.found(tokens[-detection.most_tokens or len(tokens) :]) == expected
        found += expected
    assert 300 < found < 2700


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_pattern_size": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 129, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 65},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="repetition_detection needs"):
        RepetitionDetection(**wrong)
