"""The incremental index finds what a rescan of the whole text would find."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculative.ngram import NgramConfig, NgramIndex

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 8), st.data())
def test_the_index_finds_what_a_rescan_finds(
    text: list[int], smallest: int, more: int, count: int, data: st.DataObject
) -> None:
    index = NgramIndex(NgramConfig(smallest, smallest + more))
    known = 0
    while known < len(text):
        known = data.draw(st.integers(known + 1, len(text)))
        index.extend(text[:known])
        assert index.guess(text[:known], count) == rescan(
            text[:known], smallest, smallest + more, count
        )


def rescan(text: list[int], smallest: int, largest: int, count: int) -> list[int]:
    """The longest suffix that came before, where it came last; the text repeats from there."""
    for size in range(largest, smallest - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[len(text) - size :]:
                period = text[place:]
                return [period[i % len(period)] for i in range(count)]
    return []


def test_a_repeating_text_is_guessed_beyond_its_end() -> None:
    index = NgramIndex(NgramConfig(2, 3))
    text = [1, 2, 3, 1, 2, 3]
    index.extend(text)
    assert index.guess(text, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_each_token_is_indexed_once() -> None:
    index = NgramIndex(NgramConfig(1, 1))
    index.extend([1, 2, 3])
    index.extend([1, 2, 3])
    assert len(index._places) == 2  # 3 has no successor yet
