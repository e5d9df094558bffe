"""Ops over token trees: attention among their nodes, and keeping the way that was accepted.

On the GPU where there is one, else interpreted: see `test_triton_ops.py`.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

pytest.importorskip("triton", reason="it is there for Linux only")

from slipstream.kernels.pass_inputs import PassInputs, TreeInputs
from slipstream.kernels.preparation import PreparationOps, RequestTables
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.reference.preparation import PREPARATION as REFERENCE_PREPARATION
from slipstream.kernels.table import Heads, Norm
from slipstream.kernels.triton import TRITON
from slipstream.kernels.triton import attention as tuned
from slipstream.kernels.triton.preparation import PREPARATION as TRITON_PREPARATION
from slipstream.layers.rope import RopeConfig, rope_table
from tests.kernels.batches import seeded
from tests.kernels.device import DEVICE, INTERPRETED, ON_GPU
from tests.pass_inputs import changed, moved, pass_inputs

pytestmark = INTERPRETED

BACKENDS = {"reference": REFERENCE, "triton": TRITON}
PREPARATIONS = {"reference": REFERENCE_PREPARATION, "triton": TRITON_PREPARATION}
if not ON_GPU and importlib.util.find_spec("_slipstream_cpu"):
    from slipstream.kernels.cpu.preparation import PREPARATION as CPP_PREPARATION

    PREPARATIONS["cpu"] = CPP_PREPARATION
BLOCK, WIDTH = 8, 17  # tokens of a block, blocks of a table
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16

# Parents of the nodes 1, 2 ...; 0 is the root.
TREES = {
    "chain": [0, 1, 2],
    "siblings": [0, 0, 0],
    "branches": [0, 0, 1, 1, 2, 3, 3, 6, 6],
    "large": [0, 0, 0, *(1 + node // 2 for node in range(15))],
}


# (tree, window, rows after the tree); 17 rows and more take another kernel.
CASES = [
    ("chain", None, 0),
    ("siblings", 40, 3),
    ("branches", None, 3),
    ("large", 40, 2),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(tuned, "MULTIPROCESSORS", 5)


def ancestors_of(parents: Sequence[int]) -> list[list[int]]:
    """The nodes on the way from the root to each node."""
    ways = [[0]]
    for node, parent in enumerate(parents, 1):
        ways.append([*ways[parent], node])
    return ways


def make_heads(window: int | None) -> Heads:
    generator = seeded(2)
    query, key = (
        Norm((torch.rand(HEAD_DIM, generator=generator) + 0.5).to(DEVICE), 1e-5) for _ in range(2)
    )
    return Heads(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        norms=(query, key),
        cos_sin=rope_table(HEAD_DIM, RopeConfig(100.0), WIDTH * BLOCK, DEVICE),
        scale=0.3,
        window=window,
    )


def rows_of(count: int, seed: int) -> Tensor:
    shape = (count, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    return torch.randn(shape, generator=seeded(seed)).to(DEVICE)


def empty_cache(requests: int) -> tuple[Tensor, Tensor]:
    shape = (requests * WIDTH + 1, BLOCK, KV_HEADS, HEAD_DIM)
    keys, values = torch.full((2, *shape), torch.nan, device=DEVICE).unbind(0)
    return keys.clone(), values.clone()


def table_of(request: int, requests: int) -> Tensor:
    """Blocks in another order than the tokens."""
    blocks = torch.randperm(requests * WIDTH, generator=seeded(9))
    return blocks[request * WIDTH : (request + 1) * WIDTH].to(torch.int32)


def inputs_of(
    requests: Sequence[tuple[int, Sequence[int], Sequence[int]]], tables: Tensor, most: int
) -> PassInputs:
    """Rows from tokens `start` on at `positions` with `words`; `most` rows for each, of which those
    after mean nothing."""
    positions, tokens, words, slots, contexts, roots = [], [], [], [], [], []
    for (start, where, own), table in zip(requests, tables.tolist(), strict=True):
        for row in range(most):
            there = row < len(where)
            token = start + row
            place = table[token // BLOCK] * BLOCK + token % BLOCK
            positions.append(where[row] if there else where[-1])
            tokens.append(token)
            words.append(own[row] if there else 1)
            slots.append(place if there else -1)
        contexts.append(start + len(where))
        roots.append(start)
    inputs = pass_inputs(
        query_start=torch.arange(len(requests) + 1) * most,
        context_lens=torch.tensor(contexts),
        block_tables=tables,
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        max_rows=most,
        tree=TreeInputs(torch.tensor(roots), torch.tensor(tokens), torch.tensor(words)),
    )
    return moved(inputs, DEVICE)


def chain_inputs(start: int, count: int, table: Tensor) -> PassInputs:
    positions = torch.arange(start, start + count)
    blocks = table[positions // BLOCK].long()
    inputs = pass_inputs(
        query_start=torch.tensor([0, count]),
        context_lens=torch.tensor([start + count]),
        block_tables=table.unsqueeze(0),
        positions=positions,
        slots=blocks * BLOCK + positions % BLOCK,
    )
    return moved(inputs, DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "window", "padding"), CASES)
def test_a_node_sees_what_the_end_of_a_chain_sees(
    name: str, window: int | None, padding: int, backend: str
) -> None:
    """Two requests with trees and one with a plain chain, beside each other."""
    ops, heads, parents = BACKENDS[backend], make_heads(window), TREES[name]
    ways, known = ancestors_of(parents), [5, 70, 33]
    tables = torch.stack([table_of(request, 3) for request in range(3)])
    cache = empty_cache(3)
    before = [rows_of(count, request) for request, count in enumerate(known)]
    for request, count in enumerate(known):
        REFERENCE.attend(before[request], heads, chain_inputs(0, count, tables[request]), cache)
    words = [sum(1 << node for node in way) for way in ways]
    depths = [len(way) - 1 for way in ways]
    trees = [(start, [start + depth for depth in depths], words) for start in known[:2]]
    plain = (known[2], [known[2], known[2] + 1], [-1, -1])
    most = len(ways) + padding
    inputs = inputs_of([*trees, plain], tables, most)
    rows = rows_of(3 * most, 7)
    out = ops.attend(rows, heads, inputs, (cache[0].clone(), cache[1].clone()))
    for request in range(2):
        for node, way in enumerate(ways):
            expected = chain_output(heads, before[request], rows[request * most :], way)
            assert_close(out[request * most + node], expected, rtol=1e-4, atol=1e-5)
    for row in range(2):
        expected = chain_output(heads, before[2], rows[2 * most :], list(range(row + 1)))
        assert_close(out[2 * most + row], expected, rtol=1e-4, atol=1e-5)


def chain_output(heads: Heads, before: Tensor, rows: Tensor, way: list[int]) -> Tensor:
    """The output of a way's last row, where the rows on the way are read as a plain chain."""
    table = table_of(0, 1)
    chain = torch.cat((before, rows[way]))
    inputs = chain_inputs(0, len(chain), table)
    return REFERENCE.attend(chain, heads, inputs, empty_cache(1))[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_levels_that_are_read_one_after_the_other(backend: str) -> None:
    """As in drafters, earlier levels are in the cache, before the rows of the pass."""
    ops, heads, parents, known = BACKENDS[backend], make_heads(None), TREES["branches"], 21
    ways, table, cache = ancestors_of(parents), table_of(0, 1), empty_cache(1)
    for pages in cache:
        pages.zero_()
    before = rows_of(known, 0)
    REFERENCE.attend(before, heads, chain_inputs(0, known, table), cache)
    rows = rows_of(len(parents), 7)
    depths = [len(way) - 1 for way in ways]
    for depth in range(1, max(depths) + 1):
        nodes = [node for node, own in enumerate(depths) if own == depth]
        start = known - 1 + nodes[0]
        words = [sum(1 << node for node in ways[node]) for node in nodes]
        rows_there = (start, [known - 1 + depth] * len(nodes), words)
        level = inputs_of([rows_there], table.unsqueeze(0), len(nodes))
        tree = level.sees.tree
        assert tree is not None
        level = changed(level, tree=replace(tree, starts=tree.starts * 0 + known - 1))
        out = ops.attend(rows[nodes[0] - 1 : nodes[-1]], heads, level, cache)
        for row, node in enumerate(nodes):
            way = [above - 1 for above in ways[node][1:]]
            assert_close(out[row], chain_output(heads, before, rows, way), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", PREPARATIONS)
@pytest.mark.parametrize("numbers", [(2, 16), (3, 200)])
@pytest.mark.parametrize("windowed", [False, True])
def test_the_accepted_way_moves_to_where_a_chain_is(
    backend: str, numbers: tuple[int, int], windowed: bool
) -> None:
    ops: PreparationOps = PREPARATIONS[backend]
    roots = [6, 13, 30, 0]
    paths = [[0, 3, 4, 9, 17], [0, 1, 2, 3, 4], [0, 2, 5, 5, 5], [0, 0, 0, 0, 0]]
    counts = [4, 4, 2, 0]  # the last may be padding, whose blocks belong to somebody else
    tables = torch.stack([table_of(request, 4) for request in range(4)])
    tables[3] = tables[0]
    pages = torch.randn(6, 4 * WIDTH + 1, BLOCK, *numbers, generator=seeded(3))
    expected = pages.clone().flatten(1, 2)
    for table, root, path, count in zip(tables.tolist(), roots, paths, counts, strict=True):
        places = [table[token // BLOCK] * BLOCK + token % BLOCK for token in range(60)]
        for index in range(count + 1):
            source = pages.flatten(1, 2)[:, places[root + path[index]]]
            expected[:, places[root + index]] = source
    own_tables = torch.cat((tables[:1] * 0, tables[[2, 0, 3, 1]]))
    first = own_tables.flip(0)  # of layers without a window
    state = RequestTables(
        token_ids=torch.zeros(5, 1, dtype=torch.int32, device=DEVICE),
        num_tokens=torch.zeros(5, dtype=torch.int64, device=DEVICE),
        num_computed=torch.zeros(5, dtype=torch.int64, device=DEVICE),
        block_tables=(torch.cat((first, own_tables), 1) if windowed else own_tables).to(DEVICE),
        block_size=BLOCK,
        window_column=own_tables.shape[1] if windowed else 0,
    )
    slots = torch.tensor([2, 4, 1, 3], device=DEVICE)
    given = pages.to(DEVICE)
    if backend == "cpu":  # as `Kernels.splits_heads` says
        given = given.transpose(2, 3).contiguous().transpose(2, 3)
    ops.keep_path(
        state,
        slots,
        torch.tensor(roots, device=DEVICE),
        torch.tensor(paths, device=DEVICE),
        torch.tensor(counts, device=DEVICE),
        given,
        windowed,
    )
    assert_close(given.flatten(1, 2).cpu(), expected, rtol=0, atol=0)
