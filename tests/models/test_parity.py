"""Logits and greedy text of every architecture equal those of transformers.

The checkpoints are tiny, random and written by transformers itself; what it reads back from the
directory is the truth, so both sides understand the same files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from slipstream import LLM, SamplingParams
from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.engine.prompts import Prompt
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.rows import PassRows

VOCAB_SIZE = 97
MAX_POSITIONS = 192
LAYERS = 3
NEW_TOKENS = 64
PROMPT_LENGTHS = (83, 2, 41)
TOLERANCE = 1e-4
CPU = torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 48,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}
DEFAULT = {"rope_type": "default", "rope_theta": 3000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        changes: keys of its config.
        shard_size: of its files; None writes one file.
        old_style: config.json is rewritten to the keys that transformers 4 wrote.
        seed: of its weights, chosen so that greedy text has no near ties.
    """

    architecture: str
    name: str
    changes: dict[str, Any]
    shard_size: str | None = None
    old_style: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.architecture}-{self.name}"


def shape(heads: int, kv_heads: int, hidden: int, head_dim: int | None = None) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden}
    return sizes if head_dim is None else {**sizes, "head_dim": head_dim}


TIED: dict[str, Any] = {"tie_word_embeddings": True}

LLAMA = [
    Case("Llama", "plain", {**shape(4, 4, 48), "rope_parameters": DEFAULT}),
    Case("Llama", "llama3-gqa3-tied", {**shape(6, 2, 48, 10), **TIED, "rope_parameters": LLAMA3}),
    Case("Llama", "llama3-gqa7-old", {**shape(7, 1, 56), "rope_parameters": LLAMA3}, "9KB", True),
    Case(
        "Llama",
        "linear-gqa3-biases-old",
        {
            **shape(3, 1, 36, 16),
            "rope_parameters": LINEAR,
            "attention_bias": True,
            "mlp_bias": True,
        },
        old_style=True,
        seed=1,
    ),
    Case("Llama", "linear-tied", {**shape(2, 2, 40, 8), **TIED, "rope_parameters": LINEAR}, "9KB"),
    Case(
        "Llama",
        "llama3-gqa7-biases",
        {
            **shape(14, 2, 56, 6),
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
]

QWEN2 = [
    Case("Qwen2", "plain", {**shape(4, 4, 48), "rope_parameters": DEFAULT}, seed=1),
    Case("Qwen2", "gqa3-tied", {**shape(6, 2, 48), **TIED, "rope_parameters": LINEAR}, "9KB"),
    Case(
        "Qwen2",
        "gqa7-window-from-layer-1",
        {
            **shape(7, 1, 56),
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
        seed=2,
    ),
    Case(
        "Qwen2",
        "gqa7-window-from-layer-2-old",
        {
            **shape(14, 2, 56),
            **TIED,
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
        "9KB",
        True,
        8,
    ),
    Case(
        "Qwen2",
        "gqa3-layer-types",
        {
            **shape(3, 1, 36),
            "rope_parameters": LLAMA3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        "Qwen2",
        "head-dim-llama3-old",
        {**shape(2, 2, 40, 12), "rope_parameters": LLAMA3},
        "9KB",
        True,
    ),
    Case(
        "Qwen2",
        "switched-off-window-old",
        {
            **shape(2, 2, 40),
            "rope_parameters": LINEAR,
            "use_sliding_window": False,
            "max_window_layers": 0,
        },
        old_style=True,
        seed=2,
    ),
]

QWEN3 = [
    Case("Qwen3", "plain", {**shape(4, 4, 48, 12), "rope_parameters": DEFAULT}),
    Case(
        "Qwen3",
        "gqa3-tied",
        {**shape(6, 2, 48, 16), **TIED, "rope_parameters": LINEAR},
        "9KB",
        seed=2,
    ),
    Case(
        "Qwen3",
        "gqa7-biases-old",
        {**shape(7, 1, 56, 10), "rope_parameters": LLAMA3, "attention_bias": True},
        old_style=True,
        seed=1,
    ),
    Case(
        "Qwen3",
        "gqa7-window-from-layer-1",
        {
            **shape(14, 2, 42, 4),
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    Case(
        "Qwen3",
        "gqa3-layer-types-tied",
        {
            **shape(3, 1, 36, 24),
            **TIED,
            "rope_parameters": LINEAR,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "9KB",
    ),
    Case("Qwen3", "default-head-dim-yarn", {**shape(2, 1, 32), "rope_parameters": YARN}),
]

MISTRAL = [
    Case(
        "Mistral", "plain", {**shape(4, 4, 48), "rope_parameters": DEFAULT, "sliding_window": None}
    ),
    Case(
        "Mistral",
        "gqa3-window",
        {**shape(6, 2, 48, 16), "rope_parameters": DEFAULT, "sliding_window": 13},
    ),
    Case(
        "Mistral",
        "gqa7-window-tied-old",
        {**shape(7, 1, 56), **TIED, "rope_parameters": LINEAR, "sliding_window": 16},
        "9KB",
        True,
        1,
    ),
    Case(
        "Mistral",
        "gqa7-yarn-window",
        {**shape(14, 2, 56, 6), "rope_parameters": YARN, "sliding_window": 5},
        seed=4,
    ),
    Case(
        "Mistral",
        "wide-window-tied",
        {**shape(2, 2, 40, 8), **TIED, "rope_parameters": LLAMA3, "sliding_window": 4096},
        "9KB",
    ),
    Case(
        "Mistral",
        "gqa3-narrow-window-old",
        {**shape(3, 1, 36), "rope_parameters": DEFAULT, "sliding_window": 2},
        old_style=True,
    ),
]

CASES = [*LLAMA, *QWEN2, *QWEN3, *MISTRAL]
HALF_CASES = [
    (cases[1], dtype)
    for cases in (LLAMA, QWEN2, QWEN3, MISTRAL)
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module", params=CASES, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def write_checkpoint(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    config = getattr(transformers, f"{case.architecture}Config")(
        vocab_size=VOCAB_SIZE,
        intermediate_size=70,
        num_hidden_layers=LAYERS,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        **case.changes,
    )
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config)
    spread(model, torch.Generator().manual_seed(case.seed))
    shards = {} if case.shard_size is None else {"max_shard_size": case.shard_size}
    model.to(dtype).save_pretrained(folder, **shards)
    assert (folder / "model.safetensors").exists() == (case.shard_size is None)
    if case.old_style:
        age(folder / "config.json")
    return folder


SCALES = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2.0, "embed_tokens": 1.5, "lm_head": 1.5}


@torch.no_grad()
def spread(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights with which every part of the network shows in the logits."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.uniform_(1.0, 3.0, generator=generator)
        elif name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.25, generator=generator)
        else:
            # Attention is sharp and weighs more than the token itself, so that text moves on.
            scale = next((scale for part, scale in SCALES.items() if part in name), 1.0)
            parameter.normal_(std=scale / parameter.shape[1] ** 0.5, generator=generator)


def age(file: Path) -> None:
    """Rewrite a config.json to the keys that transformers 4 wrote."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    key = "type" if kind == "linear" else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    file.write_text(json.dumps(config))


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """What transformers makes of the directory."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )


@torch.inference_mode()
def oracle_logits(model: Any, prompt: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([prompt])).logits[0].float()
    return logits


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(Checkpoint(folder), LoadOptions(dtype, CPU, "auto", MAX_POSITIONS))


def runner_logits(
    network: Decoder, prompts: list[list[int]], chunks: tuple[int, ...], block_size: int = 8
) -> list[Tensor]:
    """Logits at every position, prompt by prompt.

    All prompts run together, in passes whose chunks follow `chunks` round and round, over blocks
    that lie scattered in the cache.
    """
    config = network.config
    dtype = network.embedding.dtype
    layout = config.cache_layout(dtype)
    state = DeviceState(len(prompts), MAX_POSITIONS, block_size, CPU)
    blocks = state.block_tables.numel()
    cache = ModelCache(layout, CacheSizes(blocks, block_size, len(prompts) + 1, CPU))
    for pages in (pages for layer in cache.layers for pages in layer):
        pages.fill_(torch.nan)  # whoever reads what was not written shows it
    runner = ModelRunner(network, cache, state)
    scattered = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    state.block_tables.copy_(scattered.view_as(state.block_tables))
    for slot, prompt in enumerate(prompts):
        state.token_ids[slot, : len(prompt)] = torch.tensor(prompt)

    done = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    turn = 0
    while any(done[slot] < len(prompt) for slot, prompt in enumerate(prompts)):
        slots = [slot for slot, prompt in enumerate(prompts) if done[slot] < len(prompt)]
        lengths = []
        for slot in slots:
            lengths.append(min(chunks[turn % len(chunks)], len(prompts[slot]) - done[slot]))
            turn += 1
        starts = torch.tensor([done[slot] for slot in slots])
        forward = runner.forward(PassRows(torch.tensor(slots), starts, torch.tensor(lengths)))
        rows = runner.logits(forward.hidden)
        for slot, first, length in zip(slots, forward.layout.row_starts, lengths, strict=False):
            logits[slot].append(rows[first : first + length])
            done[slot] += length
    return [torch.cat(parts) for parts in logits]


def assert_spread(logits: Tensor) -> None:
    """The comparison means something: the numbers are of order 1 to 10."""
    assert 0.7 < logits.std() < 4
    assert logits.abs().max() < 20


def test_logits_equal_those_of_transformers_at_every_position(checkpoint: Path) -> None:
    model, network, prompts = oracle(checkpoint), load(checkpoint), make_prompts()
    expected = [oracle_logits(model, prompt) for prompt in prompts]
    assert_spread(torch.cat(expected))

    for chunks in ((MAX_POSITIONS,), (7, 1, 12, 3)):
        for logits, truth in zip(runner_logits(network, prompts, chunks), expected, strict=True):
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, truth, atol=TOLERANCE, rtol=0)


def test_logits_do_not_depend_on_the_rest_of_the_batch(checkpoint: Path) -> None:
    network, prompts = load(checkpoint), make_prompts()
    together = runner_logits(network, prompts, (MAX_POSITIONS,))
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = runner_logits(network, [prompt], (MAX_POSITIONS,))
        torch.testing.assert_close(alone, logits, atol=TOLERANCE / 10, rtol=0)


def test_greedy_text_equals_that_of_transformers(checkpoint: Path) -> None:
    """Batched, in chunks, with and without a prefix in the cache."""
    model, prompts = oracle(checkpoint), make_prompts()
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        max_num_seqs=2,  # one prompt waits, and joins in the middle
        max_num_batched_tokens=10,
        block_size=8,
        kv_cache_memory=8 << 20,
    )
    first = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(NEW_TOKENS))
    texts = [list(output.outputs[0].token_ids) for output in first]
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(model, prompt, text)
    assert [output.metrics.num_cached_tokens for output in first] == [0, 0, 0]

    # The second time around the prompts come back, two of them with a part of their answers.
    given = (0, 20, 3)
    again: list[Prompt] = [
        {"prompt_token_ids": prompt + text[:count]}
        for prompt, text, count in zip(prompts, texts, given, strict=True)
    ]
    second = llm.generate(again, [greedy(NEW_TOKENS - count) for count in given])
    assert [list(output.outputs[0].token_ids) for output in second] == [
        text[count:] for text, count in zip(texts, given, strict=True)
    ]
    assert [output.metrics.num_cached_tokens for output in second] == [80, 16, 40]


def assert_greedy(model: Any, prompt: list[int], text: list[int]) -> None:
    """Every token of `text` is what the model finds most probable behind the tokens before it.

    So, token by token, the text is the one that the model writes; one pass shows it.
    """
    assert len(text) == NEW_TOKENS
    logits = oracle_logits(model, prompt + text)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == text
    # That says something: nowhere is there a near tie, and the text does not go in circles.
    best, next_best = logits.topk(2).values.unbind(-1)
    assert (best - next_best).min() > 10 * TOLERANCE
    assert len(set(text)) >= 12


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@pytest.mark.parametrize(("case", "dtype"), HALF_CASES, ids=str)
def test_half_precision_checkpoints(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """Their dtype is kept unless told otherwise, and no weight is lost on the way to float32."""
    checkpoint, prompts = write_checkpoint(case, tmp_path, dtype), make_prompts()
    model = oracle(checkpoint)
    expected = [oracle_logits(model, prompt) for prompt in prompts]

    logits = runner_logits(load(checkpoint), prompts, (9, 4))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)

    llm = LLM(str(checkpoint), skip_tokenizer_init=True, kv_cache_memory=8 << 20)
    assert llm.engine.resolved.dtype == dtype
    output = llm.generate([{"prompt_token_ids": prompts[1]}], greedy(4))
    assert len(output[0].outputs[0].token_ids) == 4

    # In its own dtype the network is as near to the truth as transformers is in that dtype.
    theirs = oracle(checkpoint, dtype)
    own = load(checkpoint, dtype)
    assert own.embedding.dtype == dtype
    rounded = [oracle_logits(theirs, prompt) for prompt in prompts]
    logits = runner_logits(own, prompts, (9, 4))
    assert distance(logits, expected) < 1.2 * distance(rounded, expected)


def distance(logits: list[Tensor], truth: list[Tensor]) -> float:
    return float((torch.cat(logits) - torch.cat(truth)).square().mean().sqrt())
