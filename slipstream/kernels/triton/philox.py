"""The noise of `kernels/reference/noise.py` inside kernels: the same words, bit for bit."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# `Purpose`: what a random number is for.
TARGET = tl.constexpr(0)
DRAFT = tl.constexpr(1)
ACCEPT = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al. 2011): four uint32 words for each counter of four and key."""
    for _ in tl.static_range(10):
        low, high = c0, c2
        c0 = tl.umulhi(high, 0xCD9E8D57) ^ c1 ^ k0
        c2 = tl.umulhi(low, 0xD2511F53) ^ c3 ^ k1
        c1 = high * 0xCD9E8D57
        c3 = low * 0xD2511F53
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _low_word(value):
    return (value.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def noise_words(seed, position, step, purpose, index):
    """The four words at counter `index` of each key; the target's own noise has no step."""
    purpose = position * 0 + purpose  # may be a plain number
    step = tl.where(purpose == TARGET, 0, step)
    zero = _low_word(index) * 0
    return philox(
        _low_word(index), zero + _low_word(position), zero + _low_word(step),
        zero + _low_word(purpose), zero + _low_word(seed), zero + _low_word(seed >> 32),
    )  # fmt: skip


@triton.jit
def uniform(seed, position, step, purpose):
    """One number in [0, 1) for each position, a multiple of 2^-24."""
    word, _, _, _ = noise_words(seed, position, step, purpose, position * 0)
    return (word >> 8).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def exponential(word):
    """An exponential number from each uint32 word: -log1p(-u). Gumbel noise is its -log."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * (1.0 / (1 << 32)), 1.0 - 1.0 / (1 << 24))
    if INTERPRETED:  # no log1p there: Kahan's, in float64
        wide = u.to(tl.float64)
        rest = 1.0 - wide
        value = (-tl.log(rest) * (wide / (1.0 - rest))).to(tl.float32)
    else:
        value = -libdevice.log1p(-u)
    return value


@triton.jit
def ratio(weight, number):
    """weight / exponential number, to within two ulp: what races compare."""
    return weight / number if INTERPRETED else libdevice.fast_dividef(weight, number)


@triton.jit
def listed_noise(seed, position, step, purpose, token):
    """The exponential number of each of these tokens, in their shape. For tokens in their order
    `token_noise` has a quarter of the work."""
    w0, w1, w2, w3 = noise_words(seed, position, step, purpose, token // 4)
    place = token % 4
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    return exponential(word)


@triton.jit
def token_noise(seed, position, step, purpose, counter):
    """[C] counters -> [C, 4] exponential numbers, for the tokens 4 * counter + column."""
    w0, w1, w2, w3 = noise_words(seed, position, step, purpose, counter)
    # join stacks its arguments along a new last axis.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (counter.shape[0], 4))
    return exponential(words)
