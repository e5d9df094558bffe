"""One engine at a time on random weights: the time of a decode step by two runs' difference.

What the figures mean stands in `gpu_decode.py`, which prints them.
"""

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.expert_spread import distinct_experts
from benchmarks.geometries import HEADS, geometry_named, head_matrix_parameters, write_config
from benchmarks.graph_timing import bytes_per_us
from slipstream import LLM, SamplingParams
from slipstream.cache.spec import CacheLayout
from slipstream.core.outputs import RequestOutput
from slipstream.engine.prompts import TokensPrompt
from slipstream.kernels.formats.int4 import ToInt4
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.precision import PRECISIONS, layer_matrices, pass_bytes
from slipstream.models.quantized.catalogue import read_quantization

OWN_MODULES = "mtp"  # as a draft: the MTP modules of the target's own checkpoint
HEADROOM = 64  # positions after the longest output
WARM_UPS = 3  # passes over prompts are captured when they come for the second time


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One engine.

    Attributes:
        target, draft: geometries, or `OWN_MODULES` for the draft; without one, plain decoding.
        acceptance_length: forced; None judges the drafts for real.
        draft_vocab_size: tokens that are drafted over; None for all.
        mask_token: the draft gives all its tokens in one pass, over this token; None: one by one.
        draft_is_shared: ranks share the draft model, and do not all have the whole of it.
        context: `max_model_len`; None for what prompt and output need.
        options: further options of the engine.
    """

    target: str
    draft: str | None = None
    num_speculative_tokens: int = 0
    acceptance_length: float | None = None
    draft_vocab_size: int | None = None
    mask_token: int | None = None
    quantization: str | None = None
    drafter_quantization: str | None = None
    drafter_cache_dtype: str | None = None
    dtype: str = "bfloat16"
    load_format: str = "dummy"
    draft_is_shared: bool = False
    context: int | None = None
    options: dict[str, Any]

    @property
    def plain(self) -> "Setup":
        """This set-up without a drafter."""
        return replace(
            self,
            draft=None,
            num_speculative_tokens=0,
            acceptance_length=None,
            draft_vocab_size=None,
            mask_token=None,
            drafter_quantization=None,
            drafter_cache_dtype=None,
        )

    @property
    def title(self) -> str:
        """The case as a heading."""
        words = [_shown(self.target, self.quantization)]
        if self.draft is None:
            return f"{words[0]} plain"
        words.append(f"+ {_shown(self.draft, self.drafter_quantization)}")
        if self.draft_vocab_size is not None:
            words.append(f"over {self.draft_vocab_size} tokens")
        if self.drafter_cache_dtype is not None:
            words.append(f"with a cache in {self.drafter_cache_dtype}")
        if self.mask_token is not None:
            words.append("in parallel")
        return " ".join([*words, f"K={self.num_speculative_tokens}"])

    @property
    def num_passes(self) -> int:
        """How many times a step runs the drafter."""
        parallel = self.mask_token is not None or "ptd_token_id" in HEADS.get(self.draft or "", {})
        return 1 if parallel else self.num_speculative_tokens


@dataclass(frozen=True)
class Method:
    """How an engine is measured: sizes in tokens, and how often.

    Attributes:
        shared: number of tokens that all prompts begin with, of `prompt`.
    """

    batch_sizes: tuple[int, ...]
    prompt: int
    short: int
    long: int
    repeat: int
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; times in ms.

    Attributes:
        spread: half of the difference between the slowest and the fastest `step`.
        split: draft, target, verify, rest, or empty.
        experts: distinct ones of a layer that a step's rows touched; None without experts.
    """

    setup: str
    batch: int
    k: int
    al: float
    step: float
    spread: float
    split: tuple[float, ...]
    limit: float
    tokens_per_s: float
    experts: float | None = None
    states: int = 0
    plain_ratio: float | None = None
    bar: float | None = None
    peer: float | None = None


def _shown(geometry: str, quantization: str | None) -> str:
    return geometry if quantization is None else f"{geometry} in {quantization}"


def limit_ms(
    setup: Setup, batch: int = 1, experts: float | None = None, context: float = 0
) -> float:
    """The time that reading the matrices of one step takes, K passes of the draft included; of a
    target that keeps states, with their bytes and those of the cache.

    Args:
        experts: distinct ones of a layer that the step's rows touch; None: as many as independent
            choices would.
        context: tokens of a request.
    """
    rows = batch * (setup.num_speculative_tokens + 1)
    read = _read_bytes(setup.target, setup.quantization, setup.dtype, None, rows, experts)
    if setup.draft == OWN_MODULES:
        read += setup.num_passes * _module_bytes(setup, batch)
    elif setup.draft is not None:
        head = setup.draft_vocab_size
        draft = _read_bytes(setup.draft, setup.drafter_quantization, setup.dtype, head, batch)
        read += setup.num_passes * draft
    states = state_bytes(setup, batch)
    if states:
        read += states + batch * context * _layout(setup).bytes_per_token
    return read / (1e3 * bytes_per_us())


def state_bytes(setup: Setup, batch: int) -> int:
    """Bytes that a step reads and writes of states and of stored draft rows."""
    return 2 * batch * _layout(setup).state_bytes(setup.num_speculative_tokens)


def _layout(setup: Setup) -> CacheLayout:
    config = read_decoder_config(geometry_named(setup.target))
    return config.cache_layout(getattr(torch, setup.dtype))


def _module_bytes(setup: Setup, rows: int) -> float:
    """What one pass of a module reads: a layer as the target's last, what joins token and feature,
    and the target's head."""
    config, dtype = read_decoder_config(geometry_named(setup.target)), getattr(torch, setup.dtype)
    module = replace(config, layers=config.layers[-1:])
    joining: int = 2 * config.hidden_size**2 * dtype.itemsize
    return pass_bytes(module, rows, dtype) + joining


def _read_bytes(
    geometry: str,
    quantization: str | None,
    dtype: str,
    head: int | None,
    rows: int,
    experts: float | None = None,
) -> float:
    """Bytes that one pass reads: all but the embedding, of which only a few rows are looked up."""
    itemsize: int = 1 if quantization else getattr(torch, dtype).itemsize
    if geometry in HEADS:
        return head_matrix_parameters(geometry) * itemsize
    content = geometry_named(geometry)
    config = read_decoder_config(content)
    stored = read_quantization(content, "config.json")
    bytes_read = pass_bytes(config, rows, getattr(torch, dtype), quantization, stored, experts)
    bytes_read -= _packed_scales(config, getattr(torch, dtype), quantization)
    less = config.vocab_size - (head or config.vocab_size)
    return bytes_read - less * config.hidden_size * itemsize


def _packed_scales(config: DecoderConfig, dtype: torch.dtype, quantization: str | None) -> float:
    """Bytes that integers' scales lose when they are packed: from float32 and a byte of a zero to
    bfloat16 for each."""
    form = PRECISIONS[quantization].matrix if quantization else None
    if not isinstance(form, ToInt4):
        return 0.0
    numbers = sum(each.nbytes for each in layer_matrices(config, dtype, quantization))
    numbers /= form.bytes_per_number
    return numbers / form.group * (4 + form.zeros - (2 + 2 * form.zeros))


def measure(setup: Setup, method: Method, on_ready: Callable[[float], None]) -> Iterator[Row]:
    """A row per batch size; `on_ready` is told the seconds until the engine was."""
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        llm = make_engine(setup, method, Path(folder))
        on_ready(perf_counter() - began)
        vocab_size = geometry_named(setup.target)["vocab_size"]
        prompts = prompt_maker(vocab_size, method.prompt, method.shared)
        for batch in method.batch_sizes:
            yield measure_batch(llm, setup, method, batch, prompts)


def release() -> None:
    """Give an engine's memory back, once nothing refers to it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_engine(setup: Setup, method: Method, folder: Path) -> LLM:
    """The engine of a setup; `folder` must be there until it is gone."""
    target = write_config(folder / "target", setup.target)
    longest = method.prompt + method.long + setup.num_speculative_tokens + HEADROOM
    speculation: dict[str, Any] | None = None
    if setup.draft is not None:
        own = setup.draft == OWN_MODULES
        given: dict[str, Any] = {
            "method": OWN_MODULES if own else None,
            "model": None if own else str(write_config(folder / "draft", setup.draft)),
            "num_speculative_tokens": setup.num_speculative_tokens,
            "draft_vocab_size": setup.draft_vocab_size,
            "pard_token": setup.mask_token,
            "quantization": setup.drafter_quantization,
            "kv_cache_dtype": setup.drafter_cache_dtype,
        }
        if setup.draft_is_shared:
            given["draft_tensor_parallel_size"] = setup.options["tensor_parallel_size"]
        if setup.acceptance_length is not None:
            given["rejection_sample_method"] = "synthetic"
            given["synthetic_acceptance_length"] = setup.acceptance_length
        speculation = {key: value for key, value in given.items() if value is not None}
    options: dict[str, Any] = {"max_num_seqs": max(method.batch_sizes), **setup.options}
    return LLM(
        target,
        speculative_config=speculation,
        load_format=setup.load_format,
        dtype=setup.dtype,
        quantization=setup.quantization,
        max_model_len=setup.context or longest,
        enable_prefix_caching=method.shared > 0,
        skip_tokenizer_init=True,
        **options,
    )


def prompt_maker(
    vocab_size: int, length: int, shared: int = 0
) -> Callable[[int], list[TokensPrompt]]:
    """Makes so many prompts that no run before has seen, but for the first `shared` tokens."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(1, vocab_size, (shared,), generator=generator)

    def draw(number: int) -> list[TokensPrompt]:
        ids = torch.randint(1, vocab_size, (number, length), generator=generator)
        ids[:, :shared] = common
        return [TokensPrompt(prompt_token_ids=row) for row in ids.tolist()]

    return draw


@dataclass(frozen=True)
class _Run:
    """One call of `generate`: seconds, AL, steps, their parts in seconds (or nothing), and the
    texts."""

    seconds: float
    al: float
    steps: int
    parts: tuple[float, ...]
    texts: list[list[int]]


def measure_batch(
    llm: LLM,
    setup: Setup,
    method: Method,
    batch: int,
    prompts: Callable[[int], list[TokensPrompt]],
) -> Row:
    """One row of the table: as many requests at once, each with the setup's number of drafts."""
    count = setup.num_speculative_tokens

    def run(length: int) -> _Run:
        return _run(llm, prompts(batch), length, count)

    for _ in range(WARM_UPS):
        run(method.short)  # compiles kernels, and captures what is left
    pairs = [(run(method.short), run(method.long)) for _ in range(method.repeat)]
    steps = [
        (long.seconds - short.seconds) / (method.long - method.short) * long.al * 1e3
        for short, long in pairs
    ]
    step = statistics.median(steps)
    al = statistics.median(long.al for _, long in pairs)
    experts = None
    alone = setup.options.get("tensor_parallel_size", 1) == 1  # others would have to read along
    if alone and read_decoder_config(geometry_named(setup.target)).routing is not None:
        experts = distinct_experts(llm, pairs[-1][1].texts, count + 1)
    return Row(
        setup=setup.title,
        batch=batch,
        k=setup.num_speculative_tokens,
        al=al,
        step=step,
        spread=(max(steps) - min(steps)) / 2,
        split=_split(pairs),
        limit=limit_ms(setup, batch, experts, method.prompt + (method.short + method.long) / 2),
        tokens_per_s=batch * al / step * 1e3,
        experts=experts,
        states=state_bytes(setup, batch),
    )


def _run(llm: LLM, prompts: list[TokensPrompt], length: int, count: int) -> _Run:
    before = _parts(llm)
    began = perf_counter()
    params = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, num_speculative_tokens=count
    )
    outputs = llm.generate(prompts, params)
    seconds = perf_counter() - began
    steps, *parts = (after - ago for after, ago in zip(_parts(llm), before, strict=True))
    texts = [
        [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return _Run(seconds, _acceptance_length(outputs), int(steps), tuple(parts), texts)


def _parts(llm: LLM) -> tuple[float, ...]:
    """Steps so far, and the seconds of their parts where the engine tells them."""
    metrics = llm.metrics
    names = ("draft_seconds", "target_seconds", "verify_seconds", "rest_seconds")
    return (
        metrics.num_steps,
        *(getattr(metrics, name) for name in names if hasattr(metrics, name)),
    )


def _split(pairs: Sequence[tuple[_Run, _Run]]) -> tuple[float, ...]:
    """ms a step of each part, over the steps that the long run has beyond the short one."""
    splits = [
        [
            (ours - theirs) / max(1, long.steps - short.steps) * 1e3
            for ours, theirs in zip(long.parts, short.parts, strict=True)
        ]
        for short, long in pairs
    ]
    return tuple(statistics.median(part) for part in zip(*splits, strict=True))


def _acceptance_length(outputs: Sequence[RequestOutput]) -> float:
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    drafts = sum(output.metrics.num_drafts for output in outputs)
    return 1.0 + accepted / max(1, drafts)
