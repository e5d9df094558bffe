"""The suffix lookup finds what a rescan of the whole text would find."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculative.ngram.lookup import lookup_in_torch

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=4)


@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 8))
def test_the_lookup_finds_what_a_rescan_finds(
    texts: list[list[int]], smallest: int, more: int, count: int
) -> None:
    assert looked_up(texts, count, smallest, smallest + more) == [
        rescan(text, smallest, smallest + more, count) for text in texts
    ]


def looked_up(texts: list[list[int]], count: int, smallest: int, largest: int) -> list[list[int]]:
    """Texts in the rows of a wider table, in another order."""
    width = max(map(len, texts)) + 3
    table = torch.full((len(texts) + 2, width), 1, dtype=torch.int32)
    slots = list(range(len(texts), 0, -1))
    for slot, text in zip(slots, texts, strict=True):
        table[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    known = torch.tensor([len(text) for text in texts])
    tokens, found = lookup_in_torch(table, torch.tensor(slots), known, count, smallest, largest)
    rows = zip(tokens.tolist(), found.tolist(), strict=True)
    return [row if is_found else [] for row, is_found in rows]


def rescan(text: list[int], smallest: int, largest: int, count: int) -> list[int]:
    """The longest suffix that came before, where it came last; the text repeats from there."""
    for size in range(largest, smallest - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[len(text) - size :]:
                period = text[place:]
                return [period[i % len(period)] for i in range(count)]
    return []


def test_a_repeating_text_is_guessed_beyond_its_end() -> None:
    assert looked_up([[1, 2, 3, 1, 2, 3]], 7, 2, 3) == [[1, 2, 3, 1, 2, 3, 1]]
