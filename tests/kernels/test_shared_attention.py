"""Attention that reads shared blocks once: the bits of reading them for each request.

On the GPU where there is one, else interpreted: see `test_triton_ops.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.pass_inputs import PassInputs, SharedBlocks, TreeInputs
from slipstream.kernels.triton import attention as tuned
from slipstream.kernels.triton.attention_shared_kernel import shared_kernel
from tests.kernels.batches import Requests, Shape
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.kernels.test_triton_attention import Case, Noted, assert_agrees, assert_same, case, run
from tests.pass_inputs import changed

pytestmark = INTERPRETED

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
GROUP = (0, 2, 3)
# The second request is not in the group. The shared tokens of the others end within a split.
DECODING = Requests([300, 200, 280, 420], [1, 1, 1, 1])
VERIFICATION = Requests([300, 131, 290, 410], [3, 5, 1, 5])
SHARED_TOKENS = 272


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids of the kernel for shared tokens."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(tuned, "shared_kernel", Noted(shared_kernel, grids))
    monkeypatch.setattr(tuned, "SHARED_COST", 0)  # also where it is slower
    if not ON_GPU:
        monkeypatch.setattr(tuned, "MULTIPROCESSORS", 5)
    return grids


def with_shared(
    given: Case, group: Sequence[int] = GROUP, tokens: int = SHARED_TOKENS, told: int | None = None
) -> Case:
    """The case in which a group has the first blocks of its first request, up to these tokens.

    Args:
        told: the number of tokens that kernels are told; None: all of these.
    """
    qkv, heads, inputs, cache = given
    tables, count = inputs.paging.block_tables.clone(), tokens // cache[0].shape[1]
    tables[list(group), :count] = tables[group[0], :count].clone() if group else 0
    numbers = inputs.paging.context_lens.new_zeros((2, len(tables)))
    numbers[0, list(group)] = tokens if told is None else told
    numbers[1, : len(group)] = torch.tensor(group, device=DEVICE).long() + 1
    paging = replace(inputs.paging, block_tables=tables, shared=SharedBlocks(*numbers))
    return qkv, heads, replace(inputs, paging=paging), cache


def apart(given: Case) -> Case:
    """The case without the knowledge of shared blocks."""
    qkv, heads, inputs, cache = given
    return qkv, heads, replace(inputs, paging=replace(inputs.paging, shared=None)), cache


def assert_same_as_apart(given: Case) -> None:
    out, cache = run(given)
    expected, expected_cache = run(apart(given))
    assert_same(out, expected)
    assert_same(cache[0], expected_cache[0])
    assert_same(cache[1], expected_cache[1])


SHAPES = [
    (Shape(6, 2, 10, 4), DECODING, torch.float32),
    (Shape(6, 2, 24, 16), VERIFICATION, DTYPE),
    (Shape(8, 1, 72, 8), VERIFICATION, DTYPE),
    (Shape(2, 1, 512, 16), DECODING, torch.float32),
]


@pytest.mark.parametrize(("shape", "requests", "dtype"), SHAPES, ids=str)
def test_shared_blocks(
    shape: Shape, requests: Requests, dtype: torch.dtype, launched: list[tuple[int, ...]]
) -> None:
    given = with_shared(case(shape, requests, dtype))
    assert_agrees(given)
    assert len(launched) == 1
    assert_same_as_apart(given)


@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_any_number_of_programs(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all splits, or one for each; three tiles of lines for each KV head."""
    monkeypatch.setattr(tuned, "MULTIPROCESSORS", multiprocessors)
    requests = Requests([700, 700, 690, 688, 700], [5, 4, 5, 3, 5])
    assert_same_as_apart(with_shared(case(Shape(8, 1, 16, 16), requests, DTYPE), range(5), 688))


@pytest.mark.parametrize(
    ("group", "told"), [((), None), (GROUP, 0), (GROUP, 100), ((3, 0), None), ((1, 3), 128)]
)
def test_any_group(group: Sequence[int], told: int | None) -> None:
    """Also none, and members in any order, with fewer tokens than are shared or than a split."""
    tokens = 128 if 1 in group else SHARED_TOKENS
    assert_same_as_apart(
        with_shared(case(Shape(4, 2, 16, 16), VERIFICATION, DTYPE), group, tokens, told)
    )


def test_the_kernel_reads_what_is_shared() -> None:
    """Requests that are told to share what they do not share get the tokens of the first one."""
    given = case(Shape(4, 2, 16, 16), DECODING, DTYPE)
    expected, _ = run(with_shared(given, (0, 3), 256))
    qkv, heads, inputs, cache = with_shared(given, (0, 3), 256)
    paging = replace(inputs.paging, block_tables=given[2].paging.block_tables)
    out, _ = run((qkv, heads, replace(inputs, paging=paging), cache))
    assert_same(out, expected)
    assert not torch.equal(out[3], run(given)[0][3])


def test_rows_that_begin_within_the_shared_tokens_are_computed_apart() -> None:
    """As padding rows of a captured step may, and a request without a context."""
    requests = Requests([300, 254, 257, 0], [5, 5, 5, 0])
    given = with_shared(case(Shape(4, 2, 16, 16), requests, DTYPE), (0, 1, 2), 256)
    assert_same_as_apart(given)
    assert_agrees(given)


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
def test_eight_bits_sinks_and_capped_scores(dtype: torch.dtype) -> None:
    made = case(Shape(6, 2, 12, 24), VERIFICATION, dtype, sinks=True, eight_bits=True)
    qkv, heads, inputs, cache = with_shared(made, tokens=264)
    assert_same_as_apart((qkv, replace(heads, softcap=2.0), inputs, cache))


def test_partly_rotated_heads_without_norms() -> None:
    made = case(Shape(6, 2, 24, 16), VERIFICATION, DTYPE, normed=False, rotated=0.75)
    assert_same_as_apart(with_shared(made))


def test_rows_of_trees_and_hidden_first_tokens() -> None:
    qkv, heads, inputs, cache = with_shared(case(Shape(4, 2, 16, 16), VERIFICATION, DTYPE))
    starts = torch.tensor(VERIFICATION.computed, device=DEVICE)
    depth = inputs.rows.positions - starts[inputs.rows.request]
    tree = TreeInputs(starts, inputs.rows.positions, (1 << depth) | 1)
    sees = replace(inputs.sees, tree=tree, first_seen=3)
    given = qkv, heads, replace(inputs, sees=sees), cache
    assert_same_as_apart(given)
    assert_agrees(given)


def test_beside_a_prompt_chunk() -> None:
    """Its rows may share blocks as well; they are read by the kernel for prompts."""
    requests = Requests([300, 290, 280], [1, 20, 2])
    assert_same_as_apart(with_shared(case(Shape(4, 2, 16, 16), requests, DTYPE), range(3)))


@pytest.mark.parametrize("case_of", ["window", "memory"])
def test_what_is_computed_apart(
    case_of: str, launched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window, and batches whose partial sums would take too much memory."""
    window = 100 if case_of == "window" else None
    if case_of == "memory":
        monkeypatch.setattr(tuned, "MOST_PART_BYTES", 1000)
    assert_same_as_apart(with_shared(case(Shape(4, 2, 16, 16), DECODING, DTYPE, window=window)))
    assert not launched


def test_queries_that_are_rotated() -> None:
    qkv, heads, inputs, cache = with_shared(case(Shape(4, 2, 16, 16), VERIFICATION, DTYPE))
    query = qkv[:, : 4 * 16].contiguous().view(-1, 4, 16)

    def attention(of: PassInputs) -> Any:
        filled = tuple(pages.nan_to_num(0.5) for pages in cache)
        return tuned.paged_attention(query, (filled[0], filled[1]), of, heads.scale, None)

    paging = replace(inputs.paging, shared=None)
    assert_same(attention(inputs), attention(changed(inputs, **vars(paging))))


@pytest.mark.parametrize(("rows", "reads_once"), [(1, True), (2, False)])
def test_tiles_that_are_nearly_full_are_computed_apart(
    rows: int, reads_once: bool, launched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With five heads for each KV head, one row has 5 of 16 lines of a tile, two rows have 10."""
    monkeypatch.setattr(tuned, "SHARED_COST", 2)
    shape = Shape(heads=5, kv_heads=1, head_dim=16, block_size=16)
    requests = Requests([300, 200, 280, 420], [rows] * 4)
    qkv, heads, inputs, cache = with_shared(case(shape, requests, DTYPE))
    inputs = replace(inputs, rows=replace(inputs.rows, max_rows=rows))
    assert_same_as_apart((qkv, heads, inputs, cache))
    assert bool(launched) == reads_once
