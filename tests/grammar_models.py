"""Engines for tests with grammars: their vocabulary, and the drafter of a case."""

from typing import Any

from slipstream import LLM
from tests.lossless.test_greedy import speculative_config
from tests.pairwise import Case

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
MARKS = [*'0123456789{}[]":,.-_ \\/()+*=<>!?', "\n"]
LONGER = ['":', '",', "{\n", "ab", "na", "nam", "name", "tr", "tru", "true", "co", "col", ": "]
PIECES = [*LETTERS, *MARKS, *LONGER]


def drafter_of(case: Case, target: str, draft: str, heads: dict[str, str]) -> dict[str, Any]:
    if case["drafter"] != "tree":
        return speculative_config(case, target, draft, heads)
    paths = "[(0,), (1,), (0, 0), (1, 0)]" if case["k"] == 4 else "[(0,)]"
    return {"model": heads["eagle3"], "speculative_token_tree": paths}


def make_llm(
    target: str,
    words: str,
    config: dict[str, Any] | None,
    case: Case | None = None,
    **options: Any,
) -> LLM:
    return LLM(
        target,
        tokenizer=words,
        speculative_config=config,
        max_num_seqs=6,
        max_num_batched_tokens=case["rows"] if case else 512,
        num_kv_blocks=case["blocks"] if case else 400,
        block_size=8,
        max_model_len=256,
        **options,
    )
