"""Philox against the known-answer vectors of Random123, and against plain Python integers."""

from typing import Any

import pytest
import torch

from slipstream.kernels.reference.noise import philox, split_words

ONES = 0xFFFFFFFF
VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (high >> 32) ^ c1 ^ k0,
            high & ONES,
            (low >> 32) ^ c3 ^ k1,
            low & ONES,
        )
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


def words(values: tuple[int, ...]) -> Any:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), VECTORS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert philox_in_python(counter, key) == answer
    assert tuple(word.item() for word in philox(words(counter), words(key))) == answer


def test_random_words_match_plain_integers() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 1 << 32, (6, 200), generator=generator)
    got = torch.stack(philox(tuple(inputs[:4]), tuple(inputs[4:])))
    for column in range(inputs.shape[1]):
        values = tuple(inputs[:, column].tolist())
        assert tuple(got[:, column].tolist()) == philox_in_python(values[:4], values[4:])


def test_shapes_broadcast() -> None:
    index, row = torch.arange(5).unsqueeze(0), torch.arange(3).unsqueeze(1)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    got = philox((index, row, zero, zero), (row + 7, zero))
    assert all(word.shape == (3, 5) for word in got)
    expected = philox_in_python((4, 2, 0, 0), (9, 0))
    assert tuple(word[2, 4].item() for word in got) == expected


def test_split_words_of_negative_numbers() -> None:
    low, high = split_words(torch.tensor([-1, 1, -(1 << 63), 0x0123456789ABCDEF]))
    assert low.tolist() == [ONES, 1, 0, 0x89ABCDEF]
    assert high.tolist() == [ONES, 0, 0x80000000, 0x01234567]
