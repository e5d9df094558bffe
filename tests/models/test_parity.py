"""Logits and greedy text of every architecture equal those of transformers.

The checkpoints are tiny, random and written by transformers itself; what it reads back from the
directory is the truth, so both sides understand the same files.
"""

import copy
import json
from collections.abc import Iterator
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
from slipstream.layers.parameters import WHOLE, Share
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.runner.capability import default_dtype
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.rows import PassRows
from tests.models.delta_cases import HYBRID, MORE_HYBRID
from tests.models.expert_cases import EXPERTS
from tests.models.gemma_cases import GEMMA, MORE_GEMMA
from tests.models.latent_cases import LATENT, MORE_LATENT
from tests.models.more_small_cases import MORE_SMALL
from tests.models.parity_cases import LLAMA, MISTRAL, QWEN2, QWEN3, Case
from tests.models.small_cases import SMALL

VOCAB_SIZE = 97
MAX_POSITIONS = 192
LAYERS = 3
NEW_TOKENS = 64
PROMPT_LENGTHS = (83, 2, 41)
TOLERANCE = 1e-4
CPU = torch.device("cpu")

# Which of its six cases an ordinary run has of an early family; of others those not in MORE lists.
ORDINARY = {
    "Llama": ("llama3-gqa3-tied", "linear-gqa3-biases-old"),
    "Qwen2": ("gqa7-window-from-layer-2-old", "gqa3-layer-types"),
    "Qwen3": ("gqa7-biases-old", "gqa3-layer-types-tied"),
    "Mistral": ("gqa7-yarn-window", "gqa3-narrow-window-old"),
    "Qwen3Moe": ("window-some-dense", "every-second-layer-biases-old"),
    "Qwen2Moe": ("layer-types-some-dense", "normalised-tied"),
    "Mixtral": ("gqa3-window", "window-tied-old"),
    "GptOss": ("layer-types-no-biases", "old"),
    "Glm4Moe": ("biases-norms-old", "not-normalised-tied"),
}
EARLY = [*LLAMA, *QWEN2, *QWEN3, *MISTRAL, *EXPERTS]
LATER = [*SMALL, *HYBRID, *GEMMA, *LATENT]
FULL = [
    *[case for case in EARLY if case.name not in ORDINARY[case.architecture]],
    *[*MORE_SMALL, *MORE_HYBRID, *MORE_GEMMA, *MORE_LATENT],
]
CASES = [*[case for case in EARLY if case not in FULL], *LATER]
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


def parameters(ordinary: list[Case]) -> list[Any]:
    full = [case for case in [*CASES, *FULL] if case not in ordinary]
    return [
        *[pytest.param(case, id=str(case)) for case in ordinary],
        *[pytest.param(case, id=str(case), marks=pytest.mark.full) for case in full],
    ]


@pytest.fixture(scope="module", params=parameters(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def write_checkpoint(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    of_text = f"{case.architecture}TextConfig"
    name = of_text if hasattr(transformers, of_text) else f"{case.architecture}Config"
    config = getattr(transformers, name)(
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **{
            "vocab_size": VOCAB_SIZE,
            "intermediate_size": 70,
            "num_hidden_layers": LAYERS,
            **copy.deepcopy(case.changes),  # transformers writes into what it is given
        },
    )
    config.eos_token_id = None  # GLM's configs put ids of the real vocabulary in place of None
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config)
    spread(model, torch.Generator().manual_seed(case.seed))
    shards = {} if case.shard_size is None else {"max_shard_size": case.shard_size}
    model.to(dtype).save_pretrained(folder, **shards)
    assert (folder / "model.safetensors").exists() == (case.shard_size is None)
    if case.old_style:
        age(folder / "config.json")
    return folder


ZERO_CENTRED = ("qwen3_next", "qwen3_5", "gemma2", "gemma3")
SCALES = {
    "q_proj": 2.0,
    "q_b_proj": 2.0,
    "k_proj": 2.0,
    "c_fc": 1.5,
    "qkv_proj": 2.0,
    "o_proj": 2.0,
    "out_proj": 3.0,
    "embed_tokens": 1.5,
    "lm_head": 1.5,
    "mlp.gate.weight": 2.0,
    "router.weight": 2.0,
    "router.scale": 20.0,
    "per_expert_scale": 2.0,
}


@torch.no_grad()
def spread(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights and buffers with which every part of the network shows in the logits."""
    scaled = getattr(model, "config").model_type.startswith("gemma")  # noqa: B009
    centred = getattr(model, "config").model_type.startswith(ZERO_CENTRED)  # noqa: B009
    for name, parameter in model.named_parameters():
        # The difference from 1 is stored.
        offset = 1.0 if centred and not name.endswith("linear_attn.norm.weight") else 0.0
        if name.endswith(("_a_layernorm.weight", "q_norm.weight", "k_norm.weight")):
            parameter.uniform_(1.0 - offset, 3.0 - offset, generator=generator)
        elif name.endswith("norm.weight"):
            # Post-norms outweigh embeddings, which are multiplied by the root of the width.
            gain = 9.0 if scaled and ".post_" in name else 1.0
            parameter.uniform_(0.5 * gain - offset, 1.5 * gain - offset, generator=generator)
        elif name.endswith("A_log"):  # states that know some dozens of tokens, or a few
            parameter.uniform_(-4.0, 0.0, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.25, generator=generator)
        elif name.endswith("sinks"):
            parameter.normal_(generator=generator)
        else:
            # Attention is sharp and weighs more than the token itself, so that text moves on.
            scale = next((scale for part, scale in SCALES.items() if part in name), 1.0)
            parameter.normal_(std=scale / parameter.shape[-1] ** 0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.25, generator=generator)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)


def age(file: Path) -> None:
    """Rewrite a config.json to the keys that transformers 4 wrote."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    key = "type" if kind == "linear" else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    file.write_text(json.dumps(config))


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model that transformers reads from the directory."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture)
    return model.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


@torch.inference_mode()
def oracle_logits(model: Any, prompt: list[int]) -> Tensor:
    # Without its hidden states transformers 5.23 takes any Gemma 4 for one with inputs of layers.
    out = model(torch.tensor([prompt]), output_hidden_states=True)
    logits: Tensor = out.logits[0].float()
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
    network: Decoder,
    prompts: list[list[int]],
    chunks: tuple[int, ...],
    block_size: int = 8,
    share: Share = WHOLE,
) -> list[Tensor]:
    """Logits at every position, prompt by prompt, of the columns of a network's share.

    All prompts run together, in passes whose chunks follow `chunks` round and round, over blocks
    that lie scattered in the cache.
    """
    config = network.config
    dtype = network.embedding.dtype
    layout = config.cache_layout(dtype, share)
    state = DeviceState(len(prompts), MAX_POSITIONS, block_size, CPU)
    blocks = state.block_tables.numel()
    cache = ModelCache(layout, CacheSizes(blocks, block_size, len(prompts) + 1, CPU))
    paged = (layer for layer in cache.layers if isinstance(layer, tuple))
    for pages in (pages for layer in paged for pages in layer):
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


@pytest.mark.parametrize(
    "checkpoint",
    parameters(list({case.architecture: case for case in reversed(CASES)}.values())),
    indirect=True,
    scope="module",
)
def test_greedy_text_equals_that_of_transformers(checkpoint: Path) -> None:
    """Batched, in chunks, with and without a prefix in the cache."""
    model, prompts = oracle(checkpoint), make_prompts()
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        max_num_seqs=2,  # one prompt waits, and joins in the middle
        max_num_batched_tokens=10,
        block_size=8,
        num_kv_blocks=256,  # layers with a window get a quarter: no prefix is lost
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
    resumes = load(checkpoint).config.cache_layout(torch.float32).blocks_resume
    cached = [output.metrics.num_cached_tokens for output in second]
    if resumes:
        assert cached == [80, 16, 40]
    else:  # checkpoints of states are few: one in the middle may have had to go
        assert cached in ([80, 16, 40], [80, 0, 40])


def assert_greedy(model: Any, prompt: list[int], text: list[int]) -> None:
    """Every token of `text` is what the model finds most probable after the tokens before it.

    So, token by token, the text is the one that the model writes; one pass shows it.
    """
    assert len(text) == NEW_TOKENS
    logits = oracle_logits(model, prompt + text)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == text
    # The test is meaningful: there is no near tie, and the text does not repeat itself.
    best, next_best = logits.topk(2).values.unbind(-1)
    assert (best - next_best).min() > 10 * TOLERANCE
    assert len(set(text)) >= 6


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


@pytest.mark.parametrize(("case", "dtype"), HALF_CASES, ids=str)
def test_half_precision_checkpoints(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """No weight is lost on the way to float32; by default float16 stays where it has kernels."""
    checkpoint, prompts = write_checkpoint(case, tmp_path, dtype), make_prompts()
    model = oracle(checkpoint)
    expected = [oracle_logits(model, prompt) for prompt in prompts]

    logits = runner_logits(load(checkpoint), prompts, (9, 4))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)

    llm = LLM(str(checkpoint), skip_tokenizer_init=True, kv_cache_memory=8 << 20)
    assert llm.engine.resolved.dtype == default_dtype(llm.engine.resolved.device, dtype)[0]
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
