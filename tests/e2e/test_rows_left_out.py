"""Which rows of a prompt the last feed-forward part computes. That nothing else is read is what
`tests/lossless` shows, whose passes have no numbers in the other rows."""

from typing import Any

import pytest
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.runner.rows import RowLayout

PROMPTS: list[Any] = [{"prompt_token_ids": [*range(3, 23)]}, {"prompt_token_ids": [*range(5, 17)]}]


def rows_read(
    monkeypatch: pytest.MonkeyPatch, target: str, drafter: str | None, **params: Any
) -> list[list[int] | None]:
    """The rows of each pass over prompts; None: all of them."""
    found: list[list[int] | None] = []
    read_rows = RowLayout.read_rows

    def recorded(layout: RowLayout, num_read: int | None) -> Tensor | None:
        rows = read_rows(layout, num_read)
        if layout.row_starts[-1:] == [32]:
            found.append(None if rows is None else rows.tolist())
        return rows

    monkeypatch.setattr(RowLayout, "read_rows", recorded)
    speculative = None if drafter is None else {"model": drafter, "num_speculative_tokens": 2}
    llm = LLM(
        target,
        speculative_config=speculative,
        max_num_seqs=2,
        max_model_len=128,
        skip_tokenizer_init=True,
    )
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=3, **params))
    return found


def test_the_last_row_of_each_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch, tiny_target: str
) -> None:
    assert rows_read(monkeypatch, tiny_target, None) == [[19, 31]]


def test_a_draft_model_leaves_them_out_too(
    monkeypatch: pytest.MonkeyPatch, tiny_target: str, tiny_draft: str
) -> None:
    """The draft model's pass over the prompts is the second one."""
    assert rows_read(monkeypatch, tiny_target, tiny_draft) == [[19, 31], [19, 31]]


def test_all_rows_are_computed_for_who_reads_them(
    monkeypatch: pytest.MonkeyPatch, tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    assert rows_read(monkeypatch, tiny_target, None, prompt_logprobs=1) == [None]
    assert rows_read(monkeypatch, tiny_target, tiny_heads["eagle"])[0] is None
