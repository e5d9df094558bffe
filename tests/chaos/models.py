"""Tiny targets and drafters of every kind, engines of them, and what plain decoding says."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from slipstream import LLM, LoRARequest, SamplingParams, StructuredOutput
from slipstream.core.batch import StepReport, StepTimes
from slipstream.core.outputs import CompletionOutput
from slipstream.engine.drafting.kept_costs import CostFile
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.adapters import write_adapter
from tests.chaos.case import (
    ALL_WISHES,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    MOST_ADAPTERS,
    Settings,
    Wish,
)
from tests.checkpoints import write_qwen3
from tests.draft_traffic import learn_costs_while_running
from tests.drafters.assistants import FULL, SLIDING, write_assistant, write_sliding_target
from tests.drafters.blocks import write_dflash
from tests.drafters.heads import write_eagle3
from tests.grammar_models import PIECES
from tests.hybrid_checkpoints import add_module, write_hybrid
from tests.lossless.test_experts import write_heads
from tests.lossless.test_greedy import speculative_config
from tests.lossless.test_small_families import write_draft
from tests.lossless.test_trees import TREES
from tests.mixture_checkpoints import write_mixture
from tests.models.gemma_cases import GEMMA
from tests.models.latent_cases import DEEPSEEK
from tests.models.test_parity import write_checkpoint
from tests.padded_steps import use_packed_steps, use_padded_steps
from tests.tiny_models import TinyModels
from tests.tokenizers import write_byte_tokenizer

Spared = Callable[[], AbstractContextManager[None]]
VOCABULARY = 96
FAKE = {"perfect": "perfect", "in turn": "in turn"}
_TREES = {"static tree": "static", "dynamic tree": "narrow"}


@dataclass
class Pair:
    """A target, a draft model for it and what writes the heads that are made for it."""

    target: str
    draft: str
    write_heads: Callable[[], dict[str, str]]

    @cached_property
    def heads(self) -> dict[str, str]:
        """Folders of heads, by their method."""
        return self.write_heads()


class Models:
    """Checkpoints in subfolders of `folder`, each written when it is first asked for.

    Args:
        dense: where those of dense targets are; None: they are written, too.
    """

    def __init__(self, folder: Path, dense: TinyModels | None = None) -> None:
        self.folder, self._dense = folder, dense
        self._pairs: dict[str, Pair] = {}
        self._adapters: dict[tuple[str, int], str] = {}

    @cached_property
    def words(self) -> str:
        """A tokenizer for all of them."""
        return str(write_byte_tokenizer(self.folder / "words", PIECES))

    def pair(self, name: str) -> Pair:
        """The checkpoints of a target of `SERVED`."""
        if name not in self._pairs:
            folder = self.folder / name.replace(", ", "-")
            folder.mkdir()
            if name == "dense" and self._dense is not None:
                self._pairs[name] = _of_tiny(self._dense)
            else:
                self._pairs[name] = _WRITERS[name](folder)
        return self._pairs[name]

    def speculative(self, settings: Settings) -> dict[str, Any] | None:
        """The drafter's options."""
        pair, name = self.pair(settings.target), settings.drafter
        if name == "none":
            return None
        if name in _TREES:
            head = pair.heads["eagle3" if name == "static tree" else "eagle"]
            return {"model": head, **TREES[_TREES[name]]}
        if name in FAKE:
            return {"method": "fake", "model": FAKE[name], "num_speculative_tokens": settings.k}
        if name == "own mtp":
            return {"method": "mtp", "num_speculative_tokens": settings.k}
        options: dict[str, dict[str, Any]] = {
            "draft_model": {"model": pair.draft},
            "self": {"model": pair.target},
            "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 3},
            "custom": {"method": "custom", "model": "tests.user_drafters:LastFollower"},
        }
        if name in options:
            return {**options[name], "num_speculative_tokens": settings.k}
        if settings.target in _WITH_HEADS:
            case = {"drafter": name, "k": settings.k}
            return speculative_config(case, pair.target, pair.draft, pair.heads)
        return {"model": pair.heads[name], "num_speculative_tokens": settings.k}

    def build(self, settings: Settings) -> LLM:
        """An engine; UsageError where it refuses the settings."""
        with pytest.MonkeyPatch.context() as patch:
            learn_costs_while_running(patch)
            patch.setattr(CostFile, "load", lambda *_: False)
            patch.setattr(CostFile, "save", lambda *_: None)
            patch.setitem(METHODS, "fake", fake_drafters.METHOD)
            if settings.steps == "padded":
                use_padded_steps(patch)
            if settings.steps == "packed":
                use_packed_steps(patch)
            return self._build(settings)

    def _build(self, settings: Settings) -> LLM:
        words = {"tokenizer": self.words} if settings.words else {"skip_tokenizer_init": True}
        slots = {"enable_lora": True, "max_loras": settings.adapter_slots}
        adapters: dict[str, Any] = slots if settings.adapters else {}
        return LLM(
            self.pair(settings.target).target,
            speculative_config=self.speculative(settings),
            dtype="float32",
            device="cpu",
            threads=1,
            generation_config="vllm",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=settings.seqs,
            max_num_batched_tokens=settings.rows,
            num_kv_blocks=settings.blocks,
            block_size=settings.block_size,
            enable_prefix_caching=settings.caching,
            num_state_checkpoints=settings.places,
            kv_cache_dtype="int8" if settings.int8 else "auto",
            scheduling_policy="priority" if settings.priority else "fcfs",
            **words,
            **adapters,
        )

    def adapter(self, settings: Settings, number: int) -> LoRARequest:
        """An adapter of the target. Where the target or the draft model drafts, most have one for
        the drafter."""
        pair, drafter = self.pair(settings.target), settings.drafter
        style = LoRARequest(f"a{number}", number + 1, self._adapter_of(pair.target, number))
        if drafter == "self":
            return replace(style, draft_lora_path=style.lora_path)
        if drafter in ("draft_model", "subset", "pard", "combination") and number:
            return replace(style, draft_lora_path=self._adapter_of(pair.draft, number))
        return style

    def _adapter_of(self, model: str, number: int) -> str:
        key = model, number
        if key not in self._adapters:
            folder = self.folder / f"adapter-{len(self._adapters)}"
            self._adapters[key] = write_adapter(folder, model, seed=number, rank=3 + number)
        return self._adapters[key]


class Answers:
    """The outputs of plain decoding: each prompt alone, without drafts, chunks or prefix hits.

    Each is worked out once, with as many tokens as any request asks for: fewer of them are its
    beginning.

    Args:
        spared: whatever is wrong on purpose is not while it is entered.
    """

    def __init__(self, models: Models, spared: Spared = nullcontext) -> None:
        self._models, self._spared = models, spared
        self._engines: dict[tuple[str, bool, bool], LLM] = {}
        self._known: dict[tuple[Any, ...], Sequence[CompletionOutput]] = {}
        self._families: dict[tuple[str, int], list[int]] = {}

    def prompt(self, settings: Settings, family: int, length: int) -> list[int]:
        """The first tokens of a family of prompts, with what the target itself says in the middle.
        Families differ in a few tokens at several places, so they share some blocks."""
        key = settings.target, family
        if key not in self._families:
            start = Random(0).choices(range(1, VOCABULARY), k=14)
            if family:
                start[5 * family - 4 :] = Random(family).choices(range(1, VOCABULARY), k=14)
                start = start[:14]
            said = self.of(settings.target, False, start, "greedy")[0].token_ids
            self._families[key] = [*start, *said, *Random(9).choices(range(1, VOCABULARY), k=9)]
        return self._families[key][:length]

    def of(
        self, target: str, int8: bool, prompt: Sequence[int], wish: str, adapter: int = -1
    ) -> Sequence[CompletionOutput]:
        """The samples, of `MAX_TOKENS` tokens each where nothing ends them before."""
        key = target, int8, tuple(prompt), wish, adapter
        if key not in self._known:
            params = params_of(ALL_WISHES[wish], MAX_TOKENS, drafts=False)
            plain = self._plain(target, int8, adapter >= 0)
            style = None if adapter < 0 else self._models.adapter(plain, adapter)
            with self._spared():
                llm = self._engine(plain)
                output = llm.generate({"prompt_token_ids": prompt}, params, style)
            self._known[key] = output[0].outputs
        return self._known[key]

    def _plain(self, target: str, int8: bool, adapted: bool) -> Settings:
        """Settings of the plain engine, which has a slot for each adapter."""
        count = MOST_ADAPTERS if adapted else 0
        plain = Settings(target=target, int8=int8, caching=False, words=True, seqs=3)
        return replace(plain, adapters=count, adapter_slots=max(1, count))

    def _engine(self, plain: Settings) -> LLM:
        key = plain.target, plain.int8, plain.adapters > 0
        if key not in self._engines:
            self._engines[key] = self._models.build(plain)
        return self._engines[key]


def params_of(wish: Wish, max_tokens: int, drafts: bool = True) -> SamplingParams:
    """The parameters of a wish; without `drafts` for an engine that has none."""
    options = {"ignore_eos": "structured" not in wish, **wish}
    if "structured" in options:
        options["structured"] = StructuredOutput(**options["structured"])
    if not drafts:
        options.pop("num_speculative_tokens", None)
    least = options.get("min_tokens", 1)
    return SamplingParams(max_tokens=max(max_tokens, least), **options)


def timeless(report: StepReport) -> StepTimes:
    """Seconds of a step by a formula, so that what is learnt from them can be replayed."""
    drafted = sum(gained.num_draft_tokens for gained in report.committed)
    return StepTimes(1e-4 * drafted, 1e-3 + 1e-5 * report.num_rows, 1e-4, 1e-4)


def _of_tiny(tiny: TinyModels) -> Pair:
    return Pair(tiny.target, tiny.draft, lambda: tiny.heads)


def _dense(folder: Path) -> Pair:
    return _of_tiny(TinyModels(folder))


def _window(folder: Path) -> Pair:
    kinds = [SLIDING, FULL, SLIDING, FULL]
    write = partial(write_sliding_target, num_hidden_layers=4, layer_types=kinds)
    target = write(folder / "target")
    shape = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    draft = write_qwen3(folder / "draft", 5, 1, layer_types=[SLIDING], num_hidden_layers=4, **shape)

    def heads() -> dict[str, str]:
        aide = write_assistant(folder / "aide", target, kinds=(SLIDING, FULL))
        return {**write_heads(folder, target), "assistant": str(aide)}

    return Pair(target, str(draft), heads)


def _hybrid(folder: Path) -> Pair:
    kind = "qwen3_5_text"
    target = str(add_module(write_hybrid(folder / "target", kind), kind))
    draft = str(write_qwen3(folder / "draft", num_hidden_layers=4))
    return Pair(
        target,
        draft,
        lambda: {
            "eagle3": str(write_eagle3(folder / "eagle3", draft, draft_vocab=80)),
            "dflash": str(write_dflash(folder / "dflash", draft, block=16, draft_vocab=80)),
        },
    )


def _mixture(kind: str, folder: Path) -> Pair:
    target = str(write_mixture(folder / "target", kind))
    draft = str(write_mixture(folder / "draft", kind, keep_layers=1))
    return Pair(target, draft, lambda: write_heads(folder, target))


def _of_family(case: Any, folder: Path) -> Pair:
    target = write_checkpoint(case, folder / "target")
    return Pair(str(target), str(write_draft(target, folder / "draft")), dict)


_WITH_HEADS = ("dense", "window", "experts", "experts, windows, sinks")
_WRITERS: dict[str, Callable[[Path], Pair]] = {
    "dense": _dense,
    "window": _window,
    "hybrid": _hybrid,
    "experts": partial(_mixture, "qwen3_moe"),
    "experts, windows, sinks": partial(_mixture, "gpt_oss"),
    "latent": partial(_of_family, DEEPSEEK[0]),
    "gemma": partial(_of_family, next(it for it in GEMMA if it.name == "two-ropes")),
}
