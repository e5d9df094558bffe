"""Layers with a window give blocks back; the text is that of layers that keep all tokens."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.cache.spec import CacheLayout
from tests.checkpoints import write_qwen3
from tests.drafters.assistants import FULL, SLIDING, write_assistant, write_sliding_target
from tests.drafters.blocks import write_dflash
from tests.drafters.heads import write_eagle3
from tests.models.expert_cases import of_gpt_oss
from tests.models.parity_cases import Case as ModelCase
from tests.models.parity_cases import shape
from tests.models.test_parity import VOCAB_SIZE, write_checkpoint
from tests.padded_steps import use_steps
from tests.pairwise import Case

WINDOW, BLOCK = 9, 4
AXES: dict[str, list[Any]] = {
    "drafter": ["none", "draft_model", "pard", "eagle3", "tree", "dflash", "assistant", "ngram"],
    "k": [1, 3, 7],
    "rows": [512, 24],  # 24: prompts come in chunks
    "blocks": [200, 30],  # 30: requests are preempted
    "prefix": [False, True],
    "steps": ["exact", "padded"],
}
# The penalty keeps tiny models from saying one word for ever.
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.3)


class Models:
    def __init__(self, folder: Path, window: int = WINDOW) -> None:
        # The assistant reads its last sliding and its last full layer.
        kinds = [SLIDING, FULL, SLIDING, FULL]
        shape: dict[str, Any] = {"use_sliding_window": True, "sliding_window": window}
        shape["max_window_layers"] = 0
        self.target = write_sliding_target(
            folder / "target", num_hidden_layers=4, layer_types=kinds, **shape
        )
        self.draft = str(
            write_qwen3(folder / "draft", 5, 1, layer_types=[SLIDING], num_hidden_layers=4, **shape)
        )
        self.eagle3 = str(write_eagle3(folder / "eagle3", self.target, draft_vocab=80))
        self.dflash = str(write_dflash(folder / "dflash", self.target, block=16, draft_vocab=80))
        self.assistant = str(
            write_assistant(folder / "assistant", self.target, kinds=(SLIDING, FULL))
        )

    def speculative(self, case: Case) -> dict[str, Any] | None:
        if case["drafter"] == "none":
            return None
        tree = {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}
        drafters: dict[str, dict[str, Any]] = {
            "itself": {"model": self.target},
            "draft_model": {"model": self.draft},
            "pard": {"method": "pard", "model": self.draft, "pard_token": 90},
            "eagle3": {"model": self.eagle3},
            "tree": {"model": self.eagle3, **tree},
            "dflash": {"model": self.dflash},
            "assistant": {"model": self.assistant},
            "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        }
        k = {} if case["drafter"] == "tree" else {"num_speculative_tokens": case["k"]}
        return {**drafters[case["drafter"]], **k}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[int]]:
    return from_one_table(models)


def from_one_table(models: Models) -> list[list[int]]:
    """The outputs with one block table for all layers, without drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheLayout, "window", lambda *_: None)
        llm = make_llm(models, {"drafter": "none", "rows": 512, "blocks": 200})
    assert not llm.engine.resolved.num_window_blocks
    return tokens(llm.generate(prompts(), GREEDY))


def make_llm(models: Models, case: Case) -> LLM:
    return LLM(
        models.target,
        speculative_config=models.speculative(case),
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=case["rows"],
        num_kv_blocks=case["blocks"],
        block_size=case.get("block", BLOCK),
        max_model_len=112,
    )


def prompts(vocab: int = 96) -> list[Any]:
    """Some share a beginning that ends in the middle of a block."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(1, vocab, (31,), generator=generator).tolist()
    own = [
        torch.randint(1, vocab, (n,), generator=generator).tolist() for n in (5, 60, 17, 2, 33, 8)
    ]
    return [{"prompt_token_ids": (shared if i % 2 else []) + ids} for i, ids in enumerate(own)]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.matrix(AXES)
def test_text_is_that_of_one_table(
    case: Case, models: Models, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_steps(case["steps"], monkeypatch)
    llm = make_llm(models, case)
    assert llm.engine.resolved.num_window_blocks
    if case["prefix"]:
        llm.generate(prompts(), GREEDY)
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens(outputs) == expected
    if case["blocks"] == 30:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    elif case["prefix"]:
        # Blocks that were freed long ago may be reused, more of them if steps run further ahead.
        assert any(output.metrics.num_cached_tokens > 0 for output in outputs)
    llm.engine.scheduler.check_invariants()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Models, list[list[int]]]:
    models = Models(tmp_path_factory.mktemp("narrow"), window=3)
    return models, from_one_table(models)


@pytest.mark.parametrize(
    ("drafter", "steps", "rows", "block"),
    [
        ("itself", "padded", 512, 2),
        ("draft_model", "exact", 24, 2),
        ("eagle3", "padded", 24, 4),
        *[
            pytest.param(drafter, steps, rows, block, marks=pytest.mark.full)
            for drafter in ("itself", "draft_model", "pard", "eagle3", "dflash", "ngram")
            for steps in ("exact", "padded")
            for rows in (512, 24)
            for block in (1, 8)
        ],
    ],
)
def test_windows_are_shorter_than_the_rows_of_a_verification(
    drafter: str,
    steps: str,
    rows: int,
    block: int,
    narrow: tuple[Models, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 tokens, and 7 drafts: the first of them are behind the window of the last."""
    models, expected = narrow
    use_steps(steps, monkeypatch)
    llm = make_llm(
        models, {"drafter": drafter, "k": 7, "rows": rows, "blocks": 800 // block, "block": block}
    )
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens(outputs) == expected
    if drafter == "itself":
        assert sum(output.metrics.num_accepted_tokens_per_pos[4] for output in outputs) > 3
    llm.engine.scheduler.check_invariants()


@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_samples_of_one_prompt_are_those_of_one_table(models: Models, drafter: str) -> None:
    # Room for all, so that every step drafts K tokens: what a seed gives depends on that.
    case = {"drafter": drafter, "k": 3, "rows": 96, "blocks": 400}
    params = SamplingParams(seed=5, n=3, max_tokens=30, ignore_eos=True)
    said = []
    for windowed in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not windowed:
                patch.setattr(CacheLayout, "window", lambda *_: None)
            llm = make_llm(models, case)
        assert bool(llm.engine.resolved.num_window_blocks) == windowed
        outputs = llm.generate(prompts(), params)
        said.append([[list(it.token_ids) for it in output.outputs] for output in outputs])
    assert said[0] == said[1]


def test_requests_outgrow_a_cache_of_windows(tmp_path: Path) -> None:
    """All layers have a window: 7 blocks of 4 tokens suffice for a request of 100."""
    shape = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    target = str(write_qwen3(tmp_path / "target", layer_types=[SLIDING] * 2, **shape))
    per_token = 2 * 2 * 2 * 16 * 4
    make = partial(LLM, target, skip_tokenizer_init=True, block_size=BLOCK, max_model_len=112)
    small = make(kv_cache_memory=7 * BLOCK * per_token, max_num_seqs=2)
    assert small.engine.resolved.num_window_blocks == 7
    whole = tokens(make(max_num_seqs=2).generate(prompts(), GREEDY))
    assert tokens(small.generate(prompts(), GREEDY)) == whole
    assert max(map(len, (it["prompt_token_ids"] for it in prompts()))) > 7 * BLOCK


@pytest.mark.parametrize("drafter", ["itself", "ngram"])
@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_gpt_oss(drafter: str, steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in every other layer, sinks, experts; a draft model keeps all tokens of its own."""
    case = ModelCase("GptOss", "windows", {**shape(4, 2, 48, 8), **of_gpt_oss(4, 2)}, seed=3)
    target = str(write_checkpoint(case, tmp_path / "target"))
    use_steps(steps, monkeypatch)
    drafters: dict[str, dict[str, Any]] = {
        "itself": {"model": target},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    }
    said = []
    for windowed, rows, speculative in (
        (False, 512, None),
        (True, 24, {**drafters[drafter], "num_speculative_tokens": 3}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if not windowed:
                patch.setattr(CacheLayout, "window", lambda *_: None)
            llm = LLM(
                target,
                speculative_config=speculative,
                skip_tokenizer_init=True,
                max_num_seqs=4,
                max_num_batched_tokens=rows,
                num_kv_blocks=60,
                block_size=BLOCK,
                max_model_len=112,
            )
        assert bool(llm.engine.resolved.num_window_blocks) == windowed
        llm.generate(prompts(VOCAB_SIZE), GREEDY)
        said.append(tokens(llm.generate(prompts(VOCAB_SIZE), GREEDY)))
    assert said[0] == said[1]
