"""The keys of a `speculative_config` that ask for a tree of draft tokens, and the trees they name.

A static tree (Medusa, arXiv 2401.10774; EAGLE, 2401.15077) is a list of paths, under the name that
vLLM gave it: `speculative_token_tree: "[(0,), (1,), (0, 0)]"` drafts the likeliest and the second
likeliest next token, and after the likeliest one more. A dynamic tree (EAGLE-2, 2406.16858) has
the keys of SGLang: each node gets `speculative_eagle_topk` candidates, on `speculative_num_steps`
levels, and the likeliest `speculative_num_draft_tokens` are kept, including the last known token.
"""

from ast import literal_eval
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.kernels.pass_inputs import MOST_TREE_TOKENS
from slipstream.models.decoder_config import DecoderConfig
from slipstream.speculative.options import Options

STATIC, TOP_K = "speculative_token_tree", "speculative_eagle_topk"
STEPS, TOTAL = "speculative_num_steps", "speculative_num_draft_tokens"
TREE_KEYS = (STATIC, TOP_K, STEPS, TOTAL)
MOST_NODES = MOST_TREE_TOKENS - 1  # without the root
DEFAULT_TOP_K, DEFAULT_STEPS, DEFAULT_TOTAL = 10, 6, 60  # EAGLE-2's own

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape. Nodes are ordered by depth. `paths[i - 1]` leads from the root to node
    i: at each step the rank of the token among the likeliest, from 0."""

    paths: tuple[RankPath, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def reach(self) -> int:
        """The number of likeliest tokens after a node that it may use."""
        return 1 + max(max(path) for path in self.paths)

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of every node; the root is its own parent."""
        number = {(): 0, **{path: node for node, path in enumerate(self.paths, 1)}}
        return (0, *(number[path[:-1]] for path in self.paths))

    def level(self, depth: int) -> tuple[int, int]:
        """(first node, number of nodes) of a depth."""
        if not depth:
            return 0, 1
        nodes = [node for node, path in enumerate(self.paths, 1) if len(path) == depth]
        return nodes[0], len(nodes)


@dataclass(frozen=True)
class DynamicTree:
    """The likeliest `num_nodes` of all candidates, by the product of the drafter's probabilities.

    Attributes:
        top_k: number of candidates after a node, and of nodes on a level that get candidates.
        depth: number of levels.
        num_nodes: number of nodes that are kept.
    """

    top_k: int
    depth: int
    num_nodes: int

    @property
    def reach(self) -> int:
        """The number of likeliest tokens after a node that it may use."""
        return self.top_k


TokenTree = StaticTree | DynamicTree


def require_fit(tree: TokenTree, num_columns: int, target: DecoderConfig) -> None:
    """Raise UsageError if the tree does not fit a head with `num_columns` tokens, or the target."""
    if tree.reach > num_columns:
        raise UsageError(
            f"speculative_config: the tree takes the {tree.reach} likeliest tokens of a node, but "
            f"this head drafts over {num_columns}; make it narrower"
        )
    narrowest = min((window for window in target.sliding_windows if window), default=None)
    if narrowest is not None and narrowest <= tree.depth:
        raise UsageError(
            f"speculative_config: a tree of depth {tree.depth} needs a target whose windows are "
            f"larger; this one has a window of {narrowest} tokens"
        )


def read_tree(options: Options) -> TokenTree | None:
    """The tree that the keys describe; None: chains are drafted."""
    paths = options.take(STATIC)
    top_k, depth, total = (options.take_int(key, None) for key in (TOP_K, STEPS, TOTAL))
    dynamic = [
        key for key, value in ((TOP_K, top_k), (STEPS, depth), (TOTAL, total)) if value is not None
    ]
    if paths is None and not dynamic:
        return None
    if paths is not None and dynamic:
        raise UsageError(
            f"speculative_config: {STATIC} is a tree of its own; leave out {', '.join(dynamic)}"
        )
    if options.peek("draft_sample_method") == "probabilistic":
        raise UsageError(
            "speculative_config: the tokens of a tree are the likeliest of each node and never "
            "sampled; leave out draft_sample_method"
        )
    if paths is not None:
        return _static(paths)
    count = options.peek("num_speculative_tokens")
    if total is None and isinstance(count, int) and count > 0:
        total = count + 1
    return _dynamic(
        DEFAULT_TOP_K if top_k is None else top_k,
        DEFAULT_STEPS if depth is None else depth,
        (DEFAULT_TOTAL if total is None else total) - 1,
    )


def require_count(tree: TokenTree, count: int) -> None:
    """Raise UsageError if num_speculative_tokens is not the number of nodes."""
    if count != tree.num_nodes:
        raise UsageError(
            f"speculative_config: the tree has {tree.num_nodes} draft tokens, and "
            f"num_speculative_tokens says {count}; leave num_speculative_tokens out"
        )


def _static(given: Any) -> StaticTree:
    paths = _paths(given)
    known = {(), *paths}
    if len(known) != len(paths) + 1:
        raise UsageError(f"speculative_config: {STATIC} has a path twice, or an empty path")
    for path in paths:
        if path[:-1] not in known:
            raise UsageError(
                f"speculative_config: {STATIC} has the path {path} but not {path[:-1]}, which it "
                "continues; add that"
            )
    if len(paths) > MOST_NODES:
        raise UsageError(
            f"speculative_config: {STATIC} has {len(paths)} paths; a tree has at most {MOST_NODES}"
        )
    return StaticTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def _paths(given: Any) -> list[RankPath]:
    """The paths of a list of lists, or of a string with a Python literal."""
    if isinstance(given, str):
        try:
            given = literal_eval(given)
        except (ValueError, SyntaxError, TypeError):
            given = None
    if isinstance(given, list | tuple) and given:
        paths = [tuple(path) for path in given if isinstance(path, list | tuple)]
        ranks = [rank for path in paths for rank in path]
        legal = all(isinstance(it, int) and not isinstance(it, bool) and it >= 0 for it in ranks)
        if len(paths) == len(given) and legal:
            return paths
    raise UsageError(
        f"speculative_config: {STATIC} must be a list of paths, each a list of numbers from 0 on, "
        'such as "[(0,), (1,), (0, 0)]"'
    )


def _dynamic(top_k: int, depth: int, num_nodes: int) -> DynamicTree:
    for key, value in ((TOP_K, top_k), (STEPS, depth), (TOTAL, num_nodes)):
        if value < 1:
            least = 2 if key == TOTAL else 1
            raise UsageError(f"speculative_config: {key} must be {least} or more")
    if num_nodes > MOST_NODES:
        raise UsageError(
            f"speculative_config: {TOTAL} is {num_nodes + 1}; a tree has at most "
            f"{MOST_NODES + 1} tokens, the last known one counted"
        )
    # The drafter's cache entries of nodes that get candidates use the slots of the draft tokens.
    passes = num_nodes // top_k + 1
    if depth > passes:
        raise UsageError(
            f"speculative_config: {STEPS} {depth} with {TOP_K} {top_k} needs {TOTAL} of at least "
            f"{(depth - 1) * top_k + 1}; with {num_nodes + 1} at most {passes} steps fit"
        )
    candidates = top_k + (depth - 1) * top_k**2
    if num_nodes > candidates:
        raise UsageError(
            f"speculative_config: {TOP_K} {top_k} and {STEPS} {depth} make {candidates} draft "
            f"tokens, fewer than {TOTAL} of {num_nodes + 1} (if not given {DEFAULT_TOTAL}) asks "
            f"for; give {TOTAL} of at most {candidates + 1}"
        )
    return DynamicTree(top_k, depth, num_nodes)
