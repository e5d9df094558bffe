"""Random numbers of a request, keyed by (seed, position, step, purpose).

No two uses share a key. Sharing noise between the draft and the residual biases the output, and
keys without the step couple consecutive steps.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers"). A word depends on
its counter and key alone: no state to keep, no order to respect, and the same bits on every device.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

WORD_BITS = 32
WORD_MASK = (1 << WORD_BITS) - 1

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]
Words2 = tuple[Tensor, Tensor]


class Purpose(IntEnum):
    """The purpose of a random number. The values are part of its key: never renumber them."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(frozen=True, eq=False)
class NoiseKeys:
    """The keys of random numbers: the seed of the request, and the token.

    Attributes:
        seeds: [N] int64, the 64 bits of the seed.
        positions: [N] int64, index of the token to be sampled in its request.
        steps: [N] int64, the request's own count of verification steps.
    """

    seeds: Tensor
    positions: Tensor
    steps: Tensor


def uniform(keys: NoiseKeys, purpose: Purpose | Tensor) -> Tensor:
    """One number in [0, 1) for each key, a multiple of 2^-24.

    Args:
        keys: the keys of N rows.
        purpose: one for all rows, or [N] int64.

    Returns:
        [N] float32.
    """
    index = torch.zeros(1, dtype=torch.int64, device=keys.seeds.device)
    word = _words(keys, purpose, index)[0].squeeze(-1)
    return (word >> 8).to(torch.float32) * 2.0**-24


def gumbel(
    keys: NoiseKeys,
    purpose: Purpose | Tensor,
    vocab_size: int,
    fp64: bool = False,
    tokens: Tensor | None = None,
) -> Tensor:
    """Gumbel noise for each key and token: argmax(log w + noise) samples from the weights w.

    The noise is -log(-log1p(-u)). Large values come from small u, where floats are densest. It is
    always finite.

    Args:
        keys: the keys of N rows.
        purpose: one for all rows, or [N] int64.
        vocab_size: V.
        fp64: 63 random bits and float64 arithmetic instead of 32 bits and float32.
        tokens: [V] int64, the token ids; None: 0 to V - 1.

    Returns:
        [N, V] float32 (float64 with `fp64`).
    """
    # Token v: counter v // 4, word v % 4 (fp64: v // 2, v % 2).
    per_counter = 2 if fp64 else 4
    index = torch.arange(-(-vocab_size // per_counter), device=keys.seeds.device)
    words = _words(keys, purpose, index if tokens is None else tokens // per_counter)
    u = _open_uniforms_fp64(words) if fp64 else _open_uniforms(words)
    if tokens is None:
        u = u.flatten(1)[:, :vocab_size]
    else:
        place = (tokens % per_counter).view(1, -1, 1).expand(len(u), -1, 1)
        u = u.gather(2, place).squeeze(2)
    return u.neg_().log1p_().neg_().log_().neg_()


def _words(keys: NoiseKeys, purpose: Purpose | Tensor, index: Tensor) -> Words4:
    """Four words [N, C] for the C counters `index` of every key."""
    if isinstance(purpose, Tensor):
        kinds = purpose.unsqueeze(-1)
    else:
        kinds = torch.full((1, 1), int(purpose), dtype=torch.int64, device=index.device)
    # The target's own noise depends only on seed and position, so that plain decoding does not
    # depend on how many tokens earlier steps gave.
    steps = torch.where(kinds == Purpose.TARGET, 0, keys.steps.unsqueeze(-1))
    positions = keys.positions.unsqueeze(-1)
    counter = (index.unsqueeze(0), positions & WORD_MASK, steps & WORD_MASK, kinds)
    return philox(counter, split_words(keys.seeds.unsqueeze(-1)))


def _open_uniforms(words: Words4) -> Tensor:
    """[N, C, 4] float32 in (0, 1), from one word each."""
    values = torch.stack([word.to(torch.float32) for word in words], dim=-1)
    return values.add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2.0**-24)


def _open_uniforms_fp64(words: Words4) -> Tensor:
    """[N, C, 2] float64 in (0, 1), from two words each."""
    pairs = ((words[0], words[1]), (words[2], words[3]))
    values = torch.stack([((high << 31) | (low >> 1)).double() for high, low in pairs], dim=-1)
    return values.add_(0.5).mul_(2.0**-63).clamp_max_(1 - 2.0**-53)


def philox(counter: Words4, key: Words2) -> Words4:
    """Four random words for each counter.

    Args:
        counter: four int64 tensors of words in [0, 2^32), of shapes that broadcast.
        key: two such tensors.

    Returns:
        Four int64 tensors of words in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps modulo 2^64, so both halves of the product keep every bit.
        low = c0 * MULTIPLIERS[0]
        high = c2 * MULTIPLIERS[1]
        c0 = ((high >> WORD_BITS) ^ c1 ^ k0) & WORD_MASK
        c2 = ((low >> WORD_BITS) ^ c3 ^ k1) & WORD_MASK
        # Only the low words count; the masks of the next round cut them.
        c1, c3 = high, low
        k0 = (k0 + KEY_STEPS[0]) & WORD_MASK
        k1 = (k1 + KEY_STEPS[1]) & WORD_MASK
    return c0, c1 & WORD_MASK, c2, c3 & WORD_MASK


def split_words(values: Tensor) -> Words2:
    """Split int64 `values` into their low and high 32-bit words, each in [0, 2^32)."""
    return values & WORD_MASK, (values >> WORD_BITS) & WORD_MASK
