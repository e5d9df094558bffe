"""The walk through trees, against a plain one, and by the fused ops as by plain torch."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.kernels.reference import SAMPLING, thresholds
from slipstream.kernels.sampling import SampleRows, SamplingOps
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import DraftedTrees, TreeNodes, Verdict, verify, verify_trees
from slipstream.speculative.trees.growth import growth_of
from slipstream.speculative.trees.shapes import DynamicTree

VOCAB = 20
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 4, "frequency_penalty": 0.9},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "logit_bias": {3: 2.0}},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": [1, 7, 9]},
]
# Tokens, nodes of the way, and the largest logit of each.
Walk = tuple[list[int], list[int], list[float]]
KNOWN = [5, 8, 8, 2]  # of every request; the first three are its prompt


def make_state(ops: SamplingOps = SAMPLING) -> SamplingState:
    """Served by plain torch, which defines what is right."""
    state = SamplingState(len(PARAMS), VOCAB, "cpu")
    state.ops = ops
    for slot, params in enumerate(PARAMS):
        chosen = SamplingParams(**params)
        stops = frozenset(chosen.stop_token_ids)
        request = Request(str(slot), list(KNOWN), chosen, 40 + slot, stops, 100, 9, slot)
        request.num_prompt_tokens = 3
        state.admit({slot: request})
    return state


def make_trees(seed: int, ragged: bool, width: int = 11) -> tuple[DraftedTrees, list[list[int]]]:
    """Random trees whose siblings differ, and the parents of their nodes."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(PARAMS)
    parents = [[0] for _ in range(requests)]
    tokens: list[list[int]] = [[] for _ in range(requests)]
    for own, drawn in zip(parents, tokens, strict=True):
        for node in range(1, width + 1):
            own.append(int(torch.randint(max(0, node - 4), node, (), generator=generator)))
            taken = {drawn[other - 1] for other in range(1, node) if own[other] == own[node]}
            order = torch.randperm(VOCAB, generator=generator).tolist()
            drawn.append(next(token for token in order if token not in taken))
    depths, words = [[0] for _ in parents], [[1] for _ in parents]
    for request, own in enumerate(parents):
        for node in range(1, width + 1):
            depths[request].append(depths[request][own[node]] + 1)
            words[request].append(words[request][own[node]] | 1 << node)
    counts = torch.randint(width + 1, (requests,), generator=generator)
    if not ragged:
        counts[0] = 0
    trees = DraftedTrees(
        nodes=TreeNodes(
            torch.tensor(parents),
            torch.tensor(depths),
            torch.tensor(words),
            max(max(own) for own in depths),
        ),
        slots=torch.arange(requests),
        positions=torch.full((requests,), len(KNOWN)),
        token_ids=torch.tensor(tokens),
        num_nodes=counts,
        most_accepted=torch.randint(1, 6, (requests,), generator=generator),
        num_rows=int(counts.sum()) + requests if ragged else None,
    )
    return trees, parents


def logits_of(trees: DraftedTrees, parents: list[list[int]], seed: int) -> Tensor:
    """[N, V], which like a child of every node, so that there are ways to go."""
    generator = torch.Generator().manual_seed(seed)
    width = trees.token_ids.shape[1] + 1
    logits = torch.randn(len(PARAMS), width, VOCAB, generator=generator)
    for request, own in enumerate(parents):
        for node in range(1, width):
            token = int(trees.token_ids[request, node - 1])
            logits[request, own[node], token] += 5.0
    if trees.num_rows is None:
        return logits.flatten(0, 1)
    return torch.cat([rows[: int(n) + 1] for rows, n in zip(logits, trees.num_nodes, strict=True)])


def plain_walk(
    logits: Tensor, trees: DraftedTrees, parents: list[list[int]], state: SamplingState
) -> list[Walk]:
    """The way of every request: one plain decoding step after another.

    What was sampled is committed before the next step, so penalties and min_tokens see it.
    """
    found = []
    first = 0
    for request, own in enumerate(parents):
        count = int(trees.num_nodes[request])
        tokens: list[int] = []
        node, way = 0, [0]
        while True:
            position = len(KNOWN) + len(tokens)
            one, none = torch.tensor([request]), torch.zeros((1, 0), dtype=torch.int64)
            rows = SampleRows.build(
                one, torch.tensor([position]), none, torch.zeros(1, dtype=torch.int64), one == one
            )
            uses = state.uses([request])
            verdict = verify(logits[first + node : first + node + 1], rows, state, uses)
            state.commit(one, verdict.token_ids, verdict.num_tokens, uses)
            tokens.append(int(verdict.token_ids))
            children = [
                child
                for child in range(1, count + 1)
                if own[child] == node and int(trees.token_ids[request, child - 1]) == tokens[-1]
            ]
            if not children or len(tokens) > int(trees.most_accepted[request]):
                break
            node = children[0]
            way.append(node)
        largest = [float(logits[first + node].max()) for node in way]
        found.append((tokens, way, largest))
        first += (count if trees.num_rows is not None else len(own) - 1) + 1
    return found


def check(verdict: Verdict, expected: Sequence[Walk]) -> None:
    assert verdict.path is not None
    assert verdict.largest.shape == verdict.token_ids.shape
    for request, (tokens, way, largest) in enumerate(expected):
        count = int(verdict.num_tokens[request])
        assert verdict.token_ids[request, :count].tolist() == tokens
        assert (verdict.token_ids[request, count:] == -1).all()
        assert int(verdict.num_accepted[request]) == count - 1
        assert verdict.path[request, :count].tolist() == way
        assert verdict.largest[request, :count].tolist() == largest


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_the_way_is_that_of_plain_steps(seed: int, ragged: bool) -> None:
    trees, parents = make_trees(seed, ragged)
    logits = logits_of(trees, parents, seed)
    uses = make_state().uses(range(len(PARAMS)))
    verdict = verify_trees(logits, trees, make_state(), uses)
    assert verdict.token_ids.shape == (len(PARAMS), trees.token_ids.shape[1] + 1)
    check(verdict, plain_walk(logits, trees, parents, make_state()))


def test_some_ways_are_long_and_some_are_cut() -> None:
    """Checks that the test above has long and cut paths."""
    accepted, cut = [], 0
    for seed in range(12):
        trees, parents = make_trees(seed, True)
        logits = logits_of(trees, parents, seed)
        uses = make_state().uses(range(len(PARAMS)))
        verdict = verify_trees(logits, trees, make_state(), uses)
        free = replace(trees, most_accepted=trees.most_accepted + 99)
        further = verify_trees(logits, free, make_state(), uses)
        accepted.extend(verdict.num_accepted.tolist())
        cut += int((further.num_accepted > verdict.num_accepted).sum())
    assert max(accepted) >= 3
    assert accepted.count(0) < len(accepted) * 0.7
    assert cut > 0


@pytest.mark.parametrize("column", ["triton", "cpu"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("ragged", [True, False])
def test_fused_ops_go_the_same_way(
    ragged: bool, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton" if column == "triton" else "_slipstream_cpu")
    fused = importlib.import_module(f"slipstream.kernels.{column}.sampling")
    trees, parents = make_trees(3, ragged, width=6)
    logits = logits_of(trees, parents, 3)
    uses = make_state().uses(range(len(PARAMS)))
    expected = verify_trees(logits, trees, make_state(), uses)
    if column == "triton":
        from tests.kernels import interpreter

        interpreter.quicken()
        monkeypatch.setattr(fused, "TILES", fused.SamplingTiles(block=32, group=16))
    found = verify_trees(logits, trees, make_state(fused.SAMPLING), uses)
    for ours, theirs in zip(
        (found.token_ids, found.num_tokens, found.num_accepted, found.largest),
        (expected.token_ids, expected.num_tokens, expected.num_accepted, expected.largest),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_nothing_looks_at_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither growth nor verification of padded steps waits for the device: graphs hold them."""
    monkeypatch.setattr(thresholds, "reads_are_free", lambda device: False)
    with FakeTensorMode():
        state = SamplingState(3, VOCAB, "cpu")
        state.ops = SAMPLING
        slots = torch.arange(3)
        growth = growth_of(DynamicTree(3, 3, 8), torch.device("cpu"))(slots, 8)
        for width in (1, 3, 3):
            logits = torch.empty(3, width, VOCAB)
            best = logits.topk(growth.reach)
            growth.add(best.indices, best.values)
        tokens, nodes = growth.finish()
        trees = DraftedTrees(nodes, slots, slots, tokens, slots, slots, None)
        state.allocate_all()
        uses = frozenset(Uses) - {Uses.BAD_WORDS}
        verdict = verify_trees(torch.empty(27, VOCAB), trees, state, uses)
    assert verdict.token_ids.shape == (3, 9)
    assert verdict.path is not None
    assert verdict.path.shape == (3, 4)
