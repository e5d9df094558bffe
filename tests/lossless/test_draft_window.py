"""Drafters with a window: the text stays the target's, and what they read stays bounded."""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, RequestOutput, SamplingParams, UsageError
from slipstream.models.loading import LoadOptions
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.speculative.draft_model import drafter
from slipstream.speculative.loading import load_drafter
from slipstream.speculative.model_options import LONG_TEXT, LONG_TEXT_WINDOW, ModelOptions
from slipstream.speculative.options import TargetModel
from tests.checkpoints import write_qwen3
from tests.drafters.heads import write_p_eagle
from tests.drafters.oracles import MASK, Eagle3, Head, PEagle, Target
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.lossless.test_greedy import make_prompts, tokens
from tests.padded_steps import use_steps
from tests.qwen3_oracle import Qwen3Oracle

WINDOW, BLOCK, FIRST = 8, 4, 4
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
TREE = "[(0,), (1,), (0, 0), (0, 1)]"
CONFIGS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": "draft"},
    "pard": {"method": "pard", "model": "draft", "pard_token": 90},
    "combination": {"drafters": [{"method": "ngram", "min_match": 1}, {"model": "draft"}]},
    "eagle3": {"model": "eagle3"},
    "p-eagle": {"model": "p-eagle"},
    "mtp": {"model": "mtp"},
    "mtp_modules": {"model": "mtp_modules"},
    "tree": {"model": "eagle3", "speculative_token_tree": TREE},
}


@dataclass(frozen=True)
class Maker:
    """Builds engines over the tiny models; a name of a model in a config stands for its folder."""

    folders: dict[str, str]

    def __call__(self, config: dict[str, Any] | None, k: int = 4, **options: Any) -> LLM:
        if config is not None:
            config = {"num_speculative_tokens": k, **self._filled(config)}
        limits = {"num_kv_blocks": 400, "max_model_len": 128, "max_num_seqs": 6}
        return LLM(
            self.folders["target"],
            speculative_config=config,
            skip_tokenizer_init=True,
            **{"block_size": BLOCK, **limits, **options},
        )

    def _filled(self, config: dict[str, Any]) -> dict[str, Any]:
        members = config.get("drafters")
        if members is not None:
            return {"drafters": [members[0], self._filled(members[1])]}
        return {"draft_window": WINDOW, **config, "model": self.folders[config["model"]]}


@pytest.fixture(scope="module")
def make(tiny_target: str, tiny_draft: str, tiny_heads: dict[str, str]) -> Maker:
    return Maker({"target": tiny_target, "draft": tiny_draft, **tiny_heads})


@pytest.fixture(scope="module")
def expected(make: Maker) -> list[list[int]]:
    return tokens(make(None).generate(make_prompts(8), GREEDY))


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_the_plain_output(
    name: str,
    steps: str,
    make: Maker,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts longer than the window, chunks of prompts, preemption, and the same prompts again."""
    use_steps(steps, monkeypatch)
    k = 1 if name in ("draft_model", "eagle3") and steps == "exact" else 4
    llm = make(CONFIGS[name], k, max_num_batched_tokens=40, num_kv_blocks=60)
    prompts = make_prompts(8)
    first, again = llm.generate(prompts, GREEDY), llm.generate(prompts[-1:], GREEDY)
    assert tokens([*first, *again]) == [*expected, expected[-1]]
    assert all(output.metrics.num_drafts > 0 for output in first)
    assert sum(output.metrics.num_preemptions for output in first) > 0
    assert sum(output.metrics.num_cached_tokens for output in again) > 0
    if CONFIGS[name].get("model") == "draft":  # heads are random numbers
        assert sum(output.metrics.num_accepted_tokens for output in first) > 0


@dataclass
class Windowed:
    """A drafter of Qwen3 layers whose rounds begin with an excerpt, as `assert_drafts_are` asks."""

    oracle: Qwen3Oracle

    def drafts(self, known: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        seen_from = max(FIRST, (len(known) - WINDOW) // BLOCK * BLOCK)
        drafted: list[int] = []
        rows: list[Tensor] = []
        for _ in range(count):
            text = [*known, *drafted]
            positions = [*range(min(FIRST, len(text))), *range(seen_from, len(text))]
            ids = [text[position] for position in positions]
            rows.append(self.oracle.logits(ids, positions=positions)[-1])
            drafted.append(int(rows[-1].argmax()))
        return drafted, rows


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_every_draft_sees_the_first_tokens_and_the_window(
    steps: str, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has one layer, whose keys follow from the tokens alone."""
    use_steps(steps, monkeypatch)
    drafted = record_drafts(monkeypatch)
    make(CONFIGS["draft_model"], max_num_batched_tokens=40).generate(make_prompts(8), GREEDY)
    assert max(len(item.known) for item in drafted) > 80
    assert_drafts_are(drafted, Windowed(Qwen3Oracle(make.folders["draft"])))


@dataclass
class WindowedHead:
    """The drafts of a head of one layer with a window; its row i is that of token i + 1."""

    oracle: Head

    def drafts(self, known: list[int], count: int) -> tuple[list[int], list[Tensor]]:
        # The first token of an excerpt is hidden, since the first of a text has no row.
        self.oracle.config["left_out"] = 0, max(0, len(known) - WINDOW) // BLOCK * BLOCK
        return self.oracle.drafts(known, count)


@pytest.mark.parametrize(
    ("name", "shares", "steps"),
    [
        pytest.param("eagle3", True, "exact", marks=pytest.mark.full),
        ("eagle3", False, "padded"),
        *(("p-eagle", True, "padded"), ("p-eagle", False, "exact")),
    ],
)
def test_every_draft_of_a_head_sees_the_window(
    name: str,
    shares: bool,
    steps: str,
    make: Maker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a prefix hit, too. Where nobody finds its blocks it computes no more of a prompt."""
    rows: list[int] = []

    def noted(state: DeviceState, placed: PassRows) -> RowLayout:
        if sys._getframe(2).f_code.co_name == "read_prompts":
            rows.append(int(placed.lengths.sum()))
        return lay_out(state, placed)

    monkeypatch.setattr("slipstream.speculative.heads.feature_rows.lay_out", noted)
    use_steps(steps, monkeypatch)
    drafted = record_drafts(monkeypatch)
    if name == "p-eagle":
        head = write_p_eagle(tmp_path, make.folders["target"], num_hidden_layers=1)
        make.folders["one layer"] = str(head)
        name = "one layer"
    llm = make({"model": name}, max_num_batched_tokens=40, enable_prefix_caching=shares)
    prompts = make_prompts(8)
    llm.generate(prompts, GREEDY)
    read = sum(rows)
    again = llm.generate(prompts[:2], GREEDY)
    assert all((output.metrics.num_cached_tokens > 24) == shares for output in again)
    kind: Any = Eagle3 if name == "eagle3" else partial(PEagle, mask=MASK)
    oracle = kind(make.folders[name], Target(make.folders["target"]))
    assert_drafts_are(drafted, WindowedHead(oracle))
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    most = WINDOW + BLOCK
    assert (read <= sum(min(length, most) for length in lengths)) != shares


def test_a_first_round_reads_an_excerpt_as_though_it_were_the_text(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two layers, keys of the second one depend on what rows of the same pass attend to."""
    drafted = record_drafts(monkeypatch)
    llm = make({"model": "target"}, max_num_batched_tokens=40)
    for prompt in make_prompts(8):
        drafted.clear()
        llm.generate([prompt], GREEDY)
        assert_drafts_are(drafted[:1], Windowed(Qwen3Oracle(make.folders["target"])))


@dataclass
class CountedRows:
    """The rows of each pass of a drafter outside and inside of rounds."""

    rows: list[int] = field(default_factory=list)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedRows:
    found = CountedRows()

    class Runner(ModelRunner):
        def forward(self, rows: PassRows) -> Any:
            forward = super().forward(rows)
            found.rows.append(len(forward.hidden))
            return forward

    monkeypatch.setattr("slipstream.speculative.draft_model.drafter.ModelRunner", Runner)
    return found


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_a_long_prompt_costs_a_draft_model_no_more_than_its_window(
    steps: str, make: Maker, counted: CountedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all requests that join in a step do so in one pass."""
    use_steps(steps, monkeypatch)
    llm = make(CONFIGS["draft_model"], max_num_batched_tokens=40)
    prompts: list[Any] = [
        {"prompt_token_ids": [*range(1, 90)]},
        {"prompt_token_ids": [*range(2, 80)]},
    ]
    counted.rows.clear()
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert not sum(counted.rows)  # it never drafts
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert 0 < sum(counted.rows[:2]) <= FIRST + WINDOW + BLOCK + 2
    counted.rows.clear()
    llm = make(CONFIGS["draft_model"])
    counted.rows.clear()  # captured on padding
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    joined = [rows for rows in counted.rows if rows > 2 * 2]
    assert len(joined) == 1
    assert joined[0] <= 2 * (FIRST + WINDOW + BLOCK)


@pytest.mark.parametrize("shares", [True, False])
def test_without_a_window_a_draft_joins_late_where_nobody_finds_its_blocks(
    shares: bool, make: Maker, counted: CountedRows
) -> None:
    llm = make({"model": "draft", "draft_window": None}, enable_prefix_caching=shares)
    prompt: list[Any] = [{"prompt_token_ids": [*range(1, 90)]}]
    counted.rows.clear()
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert sum(counted.rows) == (89 if shares else 0)
    output = llm.generate(prompt, GREEDY)[0]
    assert output.metrics.num_accepted_tokens > 0


def accepted(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.metrics.num_accepted_tokens_per_pos) for output in outputs]


@pytest.mark.parametrize("name", ["draft_model", "pard"])
def test_acceptance_is_as_good_behind_a_prefix_hit(name: str, make: Maker) -> None:
    """The drafter computes its window again."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt: list[Any] = [{"prompt_token_ids": torch.arange(1, 74).remainder(31).tolist()}]
    llm = make(CONFIGS[name], max_num_batched_tokens=40)
    first, again = llm.generate(prompt, long), llm.generate(prompt, long)
    assert again[0].metrics.num_cached_tokens >= 64
    assert sum(accepted(again)[0]) >= sum(accepted(first)[0]) > 0


def test_prefixes_are_shared_with_requests_that_never_draft(make: Maker) -> None:
    llm = make(CONFIGS["draft_model"])
    prompt: list[Any] = [{"prompt_token_ids": [*range(1, 60)]}]
    plain = SamplingParams(temperature=0, max_tokens=2, num_speculative_tokens=0)
    llm.generate(prompt, plain)
    output = llm.generate(prompt, GREEDY)[0]
    assert output.metrics.num_cached_tokens >= 56
    assert output.metrics.num_drafts > 0


@pytest.mark.parametrize("window", [128, 4096])
def test_a_window_as_long_as_any_request_is_none(window: int, make: Maker) -> None:
    llm = make({**CONFIGS["draft_model"], "draft_window": window})
    assert llm.engine.scheduler.limits.cache_identity


def test_memory_of_a_draft_model_is_that_of_its_windows(make: Maker) -> None:
    """A block holds the target's layers alone."""
    engines = [make(None), make(CONFIGS["draft_model"])]
    plain, windowed = (llm.engine.resolved.bytes_per_block for llm in engines)
    assert plain == windowed


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("given", [None, 64])
@pytest.mark.parametrize("longest", [LONG_TEXT - 1, LONG_TEXT])
def test_long_texts_have_a_window_where_the_engine_chooses(
    longest: int, given: int | None, adaptive: bool
) -> None:
    options = ModelOptions(
        model="m", revision=None, dtype=None, quantization=None, max_model_len=None,
        greedy_only=False, draft_window=given, adaptive=adaptive,
    )  # fmt: skip
    chosen = LONG_TEXT_WINDOW if adaptive and longest >= LONG_TEXT else None
    assert options.window_within(longest) == (given or chosen)


@pytest.mark.parametrize("memory", ["enough", "too little"])
def test_a_draft_model_gets_a_window_by_itself_where_there_is_memory(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, layers in (("target", 2), ("draft", 1)):
        write_qwen3(tmp_path / name, keep_layers=layers, max_position_embeddings=LONG_TEXT)
    if memory == "too little":
        monkeypatch.setattr(drafter, "_MEMORY_SHARE", 1 << 50)
    load = LoadOptions(torch.float32, torch.device("cpu"), "auto", LONG_TEXT)
    config = {"model": str(tmp_path / "draft"), "num_speculative_tokens": "auto"}
    loaded = load_drafter(config, TargetModel(tmp_path / "target", 96, load, 4)).drafter
    assert (loaded.window is not None) == (memory == "enough")
    assert (loaded.layout is None) == (memory == "enough")


@pytest.mark.parametrize("window", [0, -3, 1.5, True, "64"])
def test_nonsense_is_refused(window: Any, make: Maker) -> None:
    with pytest.raises(UsageError, match="draft_window must be"):
        make({**CONFIGS["draft_model"], "draft_window": window})


@pytest.mark.parametrize(
    "config", [{"method": "ngram"}, {"method": "suffix"}, {"model": "assistant"}], ids=str
)
def test_drafters_without_a_cache_of_their_own_have_no_window(
    config: dict[str, Any], make: Maker
) -> None:
    folder = {"model": make.folders[config["model"]]} if "model" in config else {}
    speculative = {**config, **folder, "draft_window": 8}
    with pytest.raises(UsageError, match="unknown key draft_window"):
        LLM(make.folders["target"], speculative_config=speculative, skip_tokenizer_init=True)
