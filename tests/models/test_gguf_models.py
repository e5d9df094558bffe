"""GGUF models compute what the checkpoints do that they were made from."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.formats.blocks import BlockMatrix
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, Replaced, resolve_checkpoint
from slipstream.models.gguf.blocks import BLOCK_TYPES, F32, MXFP4, Q4_0, Q4_K, Q8_0, GgufType
from slipstream.models.gguf.files import split_stem
from slipstream.models.loading import LoadOptions, decoder_bytes, load_decoder
from slipstream.models.quantized.catalogue import read_quantization, require_format
from slipstream.models.tokenizer import Tokenizer
from tests.gguf_checkpoints import as_gguf, converted
from tests.gguf_files import Stored, floats, random_blocks, write_gguf, write_split
from tests.models.expert_cases import mixture, of_gpt_oss
from tests.models.parity_cases import DEFAULT, LINEAR, LLAMA3, TIED, YARN, Case, shape
from tests.models.test_gguf_tokenizer import byte_level
from tests.models.test_parity import (
    CPU,
    MAX_POSITIONS,
    load,
    make_prompts,
    runner_logits,
    write_checkpoint,
)

pytestmark = pytest.mark.usefixtures("plain_torch")

_PUBLISHED = {
    **LLAMA3,
    **{"factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
_GEMMA3 = {
    **shape(4, 2, 48, 16),
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": LINEAR,
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    },
}
LLAMA = Case(
    "Llama",
    "biases",
    {**shape(6, 2, 48, 10), **{"rope_parameters": LINEAR}, "attention_bias": True},
)
# Beside each what its file says and config.json cannot.
CASES: list[tuple[Case, dict[str, Any]]] = [
    (LLAMA, {}),
    (Case("Llama", "rope", {**shape(4, 2, 48), **TIED, "rope_parameters": LLAMA3}), {}),
    (Case("Llama", "published", {**shape(4, 4, 48), "rope_parameters": _PUBLISHED}), {}),
    (Case("Qwen2", "yarn", {**shape(4, 2, 48), **TIED, "rope_parameters": YARN}), {}),
    (Case("Qwen3", "plain", {**shape(4, 2, 40, 16), "rope_parameters": DEFAULT}), {}),
    (
        Case(
            "Qwen3Moe",
            "experts",
            {**shape(4, 4, 48, 8), **mixture(4, 2, norm_topk_prob=True)},
        ),
        {},
    ),
    (Case("GptOss", "experts", {**shape(4, 2, 48, 8), **of_gpt_oss(4, 2, swiglu_limit=7.0)}), {}),
    (
        Case("Gemma3", "two-ropes", _GEMMA3),
        {"gemma3__attention__sliding_window_pattern": [True, False, True]},
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows are whole blocks of every type."""
    sizes = {**shape(4, 2, 256), **TIED, "intermediate_size": 256, "num_hidden_layers": 1}
    return write_checkpoint(Case("Llama", "wide", sizes), tmp_path_factory.mktemp("wide"))


def logits_of(path: Path) -> Tensor:
    return torch.cat(runner_logits(load(path), make_prompts(), (MAX_POSITIONS,)))


@pytest.mark.parametrize(("case", "more"), CASES, ids=str)
def test_families_compute_what_they_do_in_safetensors(
    case: Case, more: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_checkpoint(case, tmp_path)
    file = as_gguf(folder, tmp_path / "model.gguf", **more)
    torch.testing.assert_close(logits_of(file), logits_of(folder), rtol=0, atol=3e-5)
    ours, theirs = (read_decoder_config(Checkpoint(path)) for path in (file, folder))
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_every_type_gives_the_numbers_of_its_blocks(
    kind: GgufType, whole_blocks: Path, tmp_path: Path
) -> None:
    file = as_gguf(whole_blocks, tmp_path / "blocks.gguf", kind)
    tensors = Checkpoint(file).container.tensors
    assert {it.kind for it in tensors.values() if len(it.shape) > 1} == {kind}
    plain = {name: floats(numbers(file, name)) for name in tensors}
    whole = write_gguf(tmp_path / "whole.gguf", Checkpoint(file).container.metadata, plain)
    # Sums of products of integers are rounded in other places than those of floats.
    rtol = 0 if kind.floats is not None else 1e-3
    torch.testing.assert_close(logits_of(file), logits_of(whole), rtol=rtol, atol=rtol)


def numbers(file: Path, name: str) -> Tensor:
    tensor = Checkpoint(file).container.tensors[name]
    content = file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, tensor.kind.nbytes)
    return tensor.kind.decode(raw).view(tensor.shape)


def test_what_is_rounded_further_is_rounded_once(whole_blocks: Path, tmp_path: Path) -> None:
    file = as_gguf(whole_blocks, tmp_path / "model.gguf", Q4_K)
    options = LoadOptions(torch.bfloat16, CPU, "auto", 64, quantization="int8")
    network = load_decoder(Checkpoint(file), options)
    down, _ = network.layers[0].feed_forward.parts.down  # type: ignore[union-attr]
    truth = numbers(file, "blk.0.ffn_down.weight")
    step = truth.abs().amax(-1, keepdim=True) / 127
    assert ((down.dequantised() - truth).abs() <= step * 0.5001).all()


def test_sizes_and_words(whole_blocks: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(as_gguf(whole_blocks, tmp_path / "model.gguf", Q8_0))
    config = read_decoder_config(checkpoint)
    assert config.dtype == torch.bfloat16
    options = LoadOptions(config.dtype, CPU, "auto", 64)
    network = load_decoder(checkpoint, options)
    size = decoder_bytes(checkpoint, config, options)
    held = sum(entry.nbytes for entry in checkpoint.entries.values())
    assert abs(size - held) < 0.1 * held
    assert network.embedding.dtype == torch.bfloat16
    on_gpu = replace(options, kept=options.kept - {BlockMatrix})
    assert 1.8 * held < decoder_bytes(checkpoint, config, on_gpu) < 2 * held
    assert load_decoder(checkpoint, on_gpu).embedding.dtype == torch.bfloat16
    stored = read_quantization(checkpoint.config)
    assert stored is not None
    assert stored.description == "GGUF, Q8_0"
    require_format(checkpoint, "gguf")
    plain = Checkpoint(as_gguf(whole_blocks, tmp_path / "plain.gguf"))
    assert read_decoder_config(plain).dtype == torch.float32
    assert read_quantization(plain.config) is None
    with pytest.raises(UsageError, match=r"quantization=gguf is how some .* is not quantised"):
        require_format(plain, "gguf")


def test_a_split_file(llama: Path, tmp_path: Path) -> None:
    metadata, tensors = converted(llama)
    stored = {name: floats(values) for name, values in tensors.items()}
    files = write_split(tmp_path, "model", metadata, stored, 3)
    assert torch.equal(logits_of(files[0]), logits_of(llama))


def test_a_file_without_an_ending(llama: Path, tmp_path: Path) -> None:
    named = as_gguf(llama, tmp_path / "model.gguf")
    blob = named.rename(tmp_path / "sha256-0123.5")
    assert resolve_checkpoint(blob) == blob
    assert torch.equal(logits_of(blob), logits_of(llama))
    assert split_stem(blob) == "sha256-0123.5"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"general__architecture": "mamba"}, "architecture is 'mamba'; read from GGUF .* llama"),
        ({"general__architecture": None}, "architecture is None"),
        ({"general__type": "adapter"}, "holds no model but the kind 'adapter'"),
        ({"llama__embedding_length": None}, '"llama.embedding_length" is missing'),
        ({"llama__embedding_length": "48"}, '"llama.embedding_length" must be an integer'),
        ({"llama__attention__head_count": None}, '"llama.attention.head_count" is missing'),
        ({"llama__attention__head_count": [6, 6, 3]}, 'head_count" differs between layers'),
        ({"llama__attention__value_length": 9}, '"llama.attention.value_length" is 9, but only 10'),
        ({"llama__rope__dimension_count": 4}, '"llama.rope.dimension_count" is 4, but only 10'),
        ({"llama__rope__scaling__type": "longrope"}, "is 'longrope', but only none, linear"),
        ({"llama__expert_count": 8}, '"llama.expert_count" is 8, but only 0'),
        ({"llama__ssm__state_size": 4}, '"llama.ssm.state_size" is unknown .value 4. and might'),
        ({"llama__block_count": 2}, "holds tensors that this architecture does not use"),
        ({"llama__block_count": 4}, "has no tensor model.layers.3"),
        ({"llama__feed_forward_length": 71}, "tensor model.layers.0.mlp.gate_proj.weight .* shape"),
    ],
)
def test_what_is_refused(more: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    file = as_gguf(llama, tmp_path / "model.gguf", **more)
    with pytest.raises(CheckpointError, match=words):
        load(file)


def test_tensors_that_are_refused(llama: Path, tmp_path: Path) -> None:
    metadata, tensors = converted(llama)
    stored = {name: floats(values) for name, values in tensors.items()}
    file = tmp_path / "model.gguf"

    def with_tensor(name: str, tensor: Stored | None) -> Path:
        left = {key: value for key, value in stored.items() if key != name}
        return write_gguf(file, metadata, left if tensor is None else {**left, name: tensor})

    with pytest.raises(CheckpointError, match=r"does not use \(blk.0.ssm_a.weight\)"):
        load(with_tensor("blk.0.ssm_a.weight", floats(torch.ones(3))))
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd.weight"):
        load(with_tensor("token_embd.weight", None))
    values = torch.ones(70, 48)
    values[3, 4] = torch.inf
    with pytest.raises(CheckpointError, match=r"gate_proj.weight .* holds NaN or infinity"):
        load(with_tensor("blk.0.ffn_gate.weight", floats(values)))
    blocks = random_blocks(Q4_0, (48, 64), torch.Generator())
    with pytest.raises(
        CheckpointError, match=r"has 70 columns in .*down_proj, which are no whole groups of 32"
    ):
        load(with_tensor("blk.0.ffn_down.weight", blocks))


def test_scales_that_are_not_finite(whole_blocks: Path, tmp_path: Path) -> None:
    for kind in (Q4_K, MXFP4):
        file = as_gguf(whole_blocks, tmp_path / f"{kind.name}.gguf", kind)
        tensor = Checkpoint(file).container.tensors["blk.0.attn_v.weight"]
        content = bytearray(file.read_bytes())
        content[tensor.offset + kind.nbytes : tensor.offset + kind.nbytes + 2] = b"\xff\xff"
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"NaN or infinity in .*v_proj.weight"):
            load(file)


def test_what_a_user_puts_in_the_place_of_metadata(llama: Path, tmp_path: Path) -> None:
    sampling = {"general__sampling__temp": 0.5, "general__sampling__top_k": 7}
    file = as_gguf(llama, tmp_path / "model.gguf", F32, **sampling)
    checkpoint = Checkpoint(file, Replaced(config={"max_position_embeddings": 11}))
    assert read_decoder_config(checkpoint).max_position_embeddings == 11
    assert checkpoint.generation_config == {"temperature": 0.5, "top_k": 7}
    with pytest.raises(UsageError, match="has its config in itself; leave out hf_config_path"):
        _ = Checkpoint(file, Replaced(config_folder=llama)).config
    own = tmp_path / "own"
    own.mkdir()
    (own / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    assert Checkpoint(file, Replaced(generation_folder=own)).generation_config == {"top_p": 0.5}


def test_no_metadata_raises_anything_else(tmp_path: Path) -> None:
    """Keys that are left out, or have values of any type, in the place of one after the other."""
    checkpoint = write_checkpoint(Case("Gemma3", "two-ropes", _GEMMA3), tmp_path)
    tokenizer = Checkpoint(byte_level(tmp_path / "vocabulary.gguf")).container.metadata
    metadata, tensors = converted(checkpoint)
    metadata |= {**tokenizer, "gemma3.rope.scaling.type": "yarn"}
    stored = {name: floats(values) for name, values in tensors.items()}
    values = [None, -1, 0, 1 << 31, "x", "", [], [1, 2], ["a", ""], 1e30, -0.0, math.nan, True]
    refused = 0
    pairs = random.Random(4).sample(list(product(metadata, values)), 120)
    for index, (key, value) in enumerate(pairs):
        changed = {name: old for name, old in metadata.items() if name != key}
        if value is not None:
            changed[key] = value
        file = write_gguf(tmp_path / f"{index}.gguf", changed, stored)
        for read in (read_whole, Tokenizer):
            try:
                read(file)
            except CheckpointError:
                refused += 1
        file.unlink()
    assert refused > 50


def read_whole(file: Path) -> None:
    checkpoint = Checkpoint(file)
    read_decoder_config(checkpoint)
    assert checkpoint.size_bytes > 0
    assert all(token >= 0 for token in checkpoint.eos_token_ids)
