"""Trees as they are asked for, and how they grow."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.sampling.verification import TreeNodes
from slipstream.speculative.options import Options
from slipstream.speculative.trees.growth import growth_of
from slipstream.speculative.trees.shapes import (
    DynamicTree,
    StaticTree,
    TokenTree,
    read_tree,
    require_count,
)

CPU = torch.device("cpu")
VOCAB = 7


def read(**keys: Any) -> TokenTree | None:
    return read_tree(Options(keys))


def test_without_keys_there_is_no_tree() -> None:
    assert read(num_speculative_tokens=4) is None


@pytest.mark.parametrize(
    "given",
    ["[(0,), (0, 1), (0, 0), (2,), (0, 1, 3)]", [[0, 1, 3], [0], [2], [0, 0], [0, 1]]],
)
def test_a_static_tree_goes_level_by_level(given: Any) -> None:
    tree = read(**{"speculative-token-tree": given})
    assert isinstance(tree, StaticTree)
    assert tree.paths == ((0,), (2,), (0, 0), (0, 1), (0, 1, 3))
    assert tree.parents == (0, 0, 0, 1, 1, 4)
    assert tree.depth == 3
    assert [tree.level(depth) for depth in range(4)] == [(0, 1), (1, 2), (3, 2), (5, 1)]
    require_count(tree, 5)
    with pytest.raises(UsageError, match="5 draft tokens, and num_speculative_tokens says 4"):
        require_count(tree, 4)


def test_a_dynamic_tree_counts_the_last_known_token() -> None:
    assert read(speculative_eagle_topk=4) == DynamicTree(4, 6, 59)
    tree = read(speculative_num_steps=3, speculative_num_draft_tokens=30)
    assert tree == DynamicTree(10, 3, 29)
    assert read(speculative_eagle_topk=2, speculative_num_steps=2, num_speculative_tokens=5) == (
        DynamicTree(2, 2, 5)
    )


STATIC = "speculative_token_tree"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({STATIC: "(0,)("}, "must be a list of paths"),
    ({STATIC: "f()"}, "must be a list of paths"),
    ({STATIC: [0, 1]}, "must be a list of paths"),
    ({STATIC: []}, "must be a list of paths"),
    ({STATIC: 7}, "must be a list of paths"),
    ({STATIC: [[0], [True]]}, "must be a list of paths"),
    ({STATIC: [[0], [-1]]}, "must be a list of paths"),
    ({STATIC: [[0], []]}, "has a path twice, or an empty path"),
    ({STATIC: [[0], [0]]}, "has a path twice"),
    ({STATIC: [[0], [1, 0]]}, r"the path \(1, 0\) but not \(1,\)"),
    ({STATIC: [[rank] for rank in range(63)]}, "63 paths; a tree has at most 62"),
    ({STATIC: [[0]], "speculative_num_steps": 3}, "leave out speculative_num_steps"),
    ({STATIC: [[0]], "draft_sample_method": "probabilistic"}, "never sampled; leave out"),
    ({"speculative_eagle_topk": 0}, "speculative_eagle_topk must be 1 or more"),
    ({"speculative_num_draft_tokens": 1}, "speculative_num_draft_tokens must be 2 or more"),
    ({"speculative_num_draft_tokens": 64}, "is 64; a tree has at most 63 tokens"),
    ({"speculative_num_steps": 7}, "of at least 61; with 60 at most 6 steps fit"),
    (
        {"speculative_eagle_topk": 2, "speculative_num_steps": 2},
        "make 6 draft tokens, fewer .* at most 7",
    ),
    ({"speculative_eagle_topk": "4"}, "must be an integer"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_what_makes_no_tree_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(**keys)


# How trees grow, from a table of probabilities in place of a head


def logits_after(path: tuple[int, ...], seed: int) -> Tensor:
    """[V], any numbers that belong to the tokens of a path."""
    generator = torch.Generator().manual_seed(hash((seed, path)) % (1 << 40))
    return torch.randn(VOCAB, generator=generator) * 2


def grow(
    tree: TokenTree, wanted: list[int], width: int
) -> tuple[list[list[tuple[int, ...]]], TreeNodes, Tensor]:
    """(what each node of the frontier continues, by request; the trees; their tokens)."""
    growth = growth_of(tree, CPU)(torch.tensor(wanted), width)
    requests = range(len(wanted))
    paths: list[list[tuple[int, ...]]] = [[()] for _ in requests]
    frontier: list[list[tuple[int, ...]]] = [[()] for _ in requests]
    while True:
        logits = torch.stack([
            torch.stack([logits_after(path, request) for path in paths[request]])
            for request in requests
        ])  # fmt: skip
        best = logits.log_softmax(-1).topk(growth.reach)
        level = growth.add(best.indices, best.values if growth.scored else None)
        if level is None:
            break
        assert level.first == len(frontier[0])
        paths = [
            [
                (*paths[request][parent], token)
                for parent, token in zip(
                    level.parents[request].tolist(), level.token_ids[request].tolist(), strict=True
                )
            ]
            for request in requests
        ]
        for request in requests:
            frontier[request].extend(paths[request])
        check_frontier(frontier, growth.frontier(), level.first)
    tokens, nodes = growth.finish()
    return frontier, nodes, tokens


def check_frontier(paths: list[list[tuple[int, ...]]], nodes: TreeNodes, first: int) -> None:
    """Words and depths of the nodes that are read next say what their paths say."""
    for request, own in enumerate(paths):
        for number in range(first, len(own)):
            word = int(nodes.ancestors[request, number])
            above = [path for node, path in enumerate(own) if word >> node & 1]
            assert above == [own[number][:size] for size in range(len(own[number]) + 1)]
            assert int(nodes.depths[request, number]) == len(own[number])


def paths_of(nodes: TreeNodes, tokens: Tensor, request: int, count: int) -> list[tuple[int, ...]]:
    """The tokens on the way to each of the first nodes; the shape must agree with itself."""
    paths: list[tuple[int, ...]] = [()]
    words = [1]
    for node in range(1, count + 1):
        parent = int(nodes.parents[request, node])
        assert parent < node
        paths.append((*paths[parent], int(tokens[request, node - 1])))
        words.append(words[parent] | 1 << node)
        assert int(nodes.depths[request, node]) == len(paths[-1]) <= nodes.depth
    assert nodes.ancestors[request, : count + 1].tolist() == words
    return paths[1:]


@pytest.mark.parametrize("width", [1, 3, 6, 9])
def test_a_static_tree_takes_the_named_ranks(width: int) -> None:
    paths = "[(0,),(1,),(3,),(0,0),(0,2),(3,1),(0,2,0),(3,1,0),(3,1,4)]"
    tree = read(speculative_token_tree=paths)
    assert isinstance(tree, StaticTree)
    wanted = [9, 2, 0, 5]
    _, nodes, tokens = grow(tree, wanted, width)
    assert tokens.shape == (4, width)
    for request in range(4):
        found = paths_of(nodes, tokens, request, width)
        for ranks, path in zip(tree.paths, found, strict=False):
            for place, rank in enumerate(ranks):
                order = logits_after(path[:place], request).argsort(descending=True)
                assert path[place] == int(order[rank])


def likeliest(
    request: int, tree: DynamicTree, count: int, levels: int, breadth: int
) -> set[tuple[int, ...]]:
    """EAGLE-2 in plain Python: expand `breadth` nodes a level, then rank all."""
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(levels):
        found = []
        for score, path in frontier:
            chances = logits_after(path, request).log_softmax(-1)
            for token in chances.topk(tree.top_k).indices.tolist():
                found.append((score + float(chances[token]), (*path, token)))
        candidates.extend(found)
        frontier = sorted(found, reverse=True)[:breadth]
    return {path for _, path in sorted(candidates, reverse=True)[:count]}


@pytest.mark.parametrize(
    ("top_k", "depth", "num_nodes"), [(1, 4, 4), (2, 3, 7), (3, 4, 12), (5, 3, 20), (4, 2, 17)]
)
def test_a_dynamic_tree_keeps_the_likeliest(top_k: int, depth: int, num_nodes: int) -> None:
    tree = DynamicTree(top_k, depth, num_nodes)
    wanted = [num_nodes, num_nodes, max(1, num_nodes // 2), 1, 0]
    _, nodes, tokens = grow(tree, wanted, num_nodes)
    for request, count in enumerate(wanted):
        found = paths_of(nodes, tokens, request, count)
        assert len(set(found)) == count
        # Nodes that have no slot are not gone on from.
        levels = min(depth, count // top_k + 1)
        assert set(found) == likeliest(request, tree, count, levels, top_k)


@pytest.mark.parametrize(("width", "breadth"), [(1, 1), (2, 1), (3, 1), (5, 2), (8, 3)])
def test_a_small_tree_expands_fewer_nodes_so_that_it_has_all_levels(
    width: int, breadth: int
) -> None:
    tree = DynamicTree(3, 3, 12)
    frontier, nodes, tokens = grow(tree, [width, 0], width)
    levels = min(3, width + 1)  # nodes that are expanded need slots
    assert len(frontier[0]) - 1 == (levels - 1) * breadth
    found = paths_of(nodes, tokens, 0, width)
    assert set(found) == likeliest(0, tree, width, levels, breadth)


def test_sure_tokens_stay_behind_their_parents() -> None:
    """Where probabilities are 1, all scores of a path are equal."""
    growth = growth_of(DynamicTree(2, 4, 6), CPU)(torch.tensor([6]), 6)
    rows = itertools.chain([1], itertools.repeat(2))
    for count in itertools.islice(rows, 4):
        sure = torch.tensor([0.0, -1e9]).expand(1, count, 2)
        growth.add(torch.tensor([3, 5]).expand(1, count, 2), sure)
    tokens, nodes = growth.finish()
    assert paths_of(nodes, tokens, 0, 4)[:4] == [(3,), (3, 3), (3, 3, 3), (3, 3, 3, 3)]
