"""Types of GGUF tensors: each block against the sentences of ggml's structs, number by number."""

import math
import struct

import pytest
import torch

from slipstream.models.gguf.blocks import BLOCK_TYPES, GgufType
from tests.gguf_files import random_blocks

TYPES = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def half(block: bytes, place: int) -> float:
    return float(struct.unpack_from("<e", block, place)[0])


def nibble(packed: bytes, index: int) -> int:
    """One of 32 numbers of four bits in 16 bytes; the first 16 are in the lower halves."""
    return packed[index] & 15 if index < 16 else packed[index - 16] >> 4


def simple(block: bytes, index: int, name: str) -> float:
    """Number `index` of a block of 32."""
    if name == "Q8_0":
        return half(block, 0) * struct.unpack_from("b", block, 2 + index)[0]
    if name == "MXFP4":
        code = nibble(block[1:], index)
        return math.ldexp(_E2M1[code & 7] * (-1 if code & 8 else 1), block[0] - 127)
    has_minimum, five = name.endswith("_1"), name.startswith("Q5")
    start = 4 if has_minimum else 2
    value = nibble(block[start + 4 * five :], index)
    if five:
        value |= (int.from_bytes(block[start : start + 4], "little") >> index & 1) << 4
    if has_minimum:
        return half(block, 0) * value + half(block, 2)
    return half(block, 0) * (value - (16 if five else 8))


def of_256(block: bytes, index: int, name: str) -> float:
    """Number `index` of a block of a K type."""
    if name == "Q6_K":
        part, place = divmod(index, 128)
        quarter, column = divmod(place, 32)
        low = block[64 * part + 32 * (quarter % 2) + column] >> (4 if quarter > 1 else 0) & 15
        high = block[128 + 32 * part + column] >> (2 * quarter) & 3
        scale = struct.unpack_from("b", block, 192 + index // 16)[0]
        return half(block, 208) * scale * ((low | high << 4) - 32)
    group, column = divmod(index, 32)
    packed = block[4:16]
    if group < 4:
        scale, minimum = packed[group] & 63, packed[group + 4] & 63
    else:
        both = packed[group + 4]
        scale = both & 15 | packed[group - 4] >> 6 << 4
        minimum = both >> 4 | packed[group] >> 6 << 4
    values = block[48:] if name == "Q5_K" else block[16:]
    value = values[32 * (group // 2) + column] >> (4 * (group % 2)) & 15
    if name == "Q5_K":
        value |= (block[16 + column] >> group & 1) << 4
    return half(block, 0) * scale * value - half(block, 2) * minimum


def expected(block: bytes, index: int, kind: GgufType) -> float:
    if kind.name == "F32":
        return float(struct.unpack("<f", block)[0])
    if kind.name == "F16":
        return half(block, 0)
    if kind.name == "BF16":
        return float(struct.unpack("<f", bytes(2) + block)[0])
    return (
        simple(block, index, kind.name) if kind.numbers == 32 else of_256(block, index, kind.name)
    )


@TYPES
def test_every_number_is_what_its_block_says(kind: GgufType) -> None:
    stored = random_blocks(kind, (3, 2 * kind.numbers), torch.Generator().manual_seed(1))
    blocks = [bytes(block.tolist()) for block in stored.raw.view(-1, kind.nbytes)]
    wanted = [expected(block, i, kind) for block in blocks for i in range(kind.numbers)]
    found = stored.numbers().flatten().double()
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-6, atol=1e-7)
    assert found.unique().numel() > min(16, kind.numbers)


@TYPES
def test_rows_are_read_alike_however_many(kind: GgufType, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_blocks(kind, (7, 3 * kind.numbers), torch.Generator().manual_seed(2))
    whole = stored.numbers()
    monkeypatch.setattr("slipstream.models.gguf.blocks._SLICE", 2 * whole.shape[1])
    assert torch.equal(stored.numbers(), whole)
    assert kind.columns(kind.row_bytes(whole.shape[1])) == whole.shape[1]
