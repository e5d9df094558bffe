"""Shares of a network: each rank's parameters are slices, and the ranks together are the whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.reference import REFERENCE
from slipstream.layers.layer import BuildContext
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import COLUMNS, ROWS, Part, Share
from slipstream.layers.rope import RopeTables
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.models.parameter_sources import CheckpointSource, DummySource, TensorSource
from slipstream.models.precision import PRECISIONS, in_precision
from slipstream.models.twin import TwinSource
from tests.checkpoints import write_qwen3
from tests.kernels.batches import Requests, Shape, attention_inputs, filled_cache
from tests.quantized_checkpoints import Format, awq, float8, gptq, int_tensors, write_quantized

pytestmark = pytest.mark.usefixtures("plain_torch")

CPU, SIZE = torch.device("cpu"), 2
SHARES = [Share(rank, SIZE) for rank in range(SIZE)]
LAYER = "model.layers.0."
QKV = [
    Part(f"{LAYER}self_attn.{it}_proj.weight", rows, ROWS)
    for it, rows in zip("qkv", (96, 32, 32), strict=True)
]
DOWN = [Part(f"{LAYER}mlp.down_proj.weight", 48, COLUMNS)]
NORM = [Part(f"{LAYER}input_layernorm.weight", 48)]


def slices(whole: Tensor, parts: list[Part], rank: int) -> Tensor:
    """A rank's slices of whole parts, computed independently."""
    kept, start = [], 0
    for part in parts:
        block = whole[start : start + part.rows]
        start += part.rows
        if part.split is not None:
            block = block.chunk(SIZE, part.split)[rank]
        kept.append(block)
    return torch.cat(kept)


def from_files(folder: Path, share: Share) -> TensorSource:
    return CheckpointSource(Checkpoint(folder), torch.bfloat16, CPU, share=share)


def dummy(folder: Path, share: Share) -> TensorSource:
    return DummySource(torch.bfloat16, CPU, 3, share)


def twin(folder: Path, share: Share) -> TensorSource:
    config = read_decoder_config(Checkpoint(folder))
    return TwinSource(torch.bfloat16, CPU, 3, config, share)


SOURCES: list[Callable[[Path, Share], TensorSource]] = [from_files, dummy, twin]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize(("parts", "columns"), [(QKV, 48), (DOWN, 80)])
def test_shares_of_matrices_are_slices(
    tmp_path: Path, make: Callable[[Path, Share], TensorSource], parts: list[Part], columns: int
) -> None:
    folder = write_qwen3(tmp_path / "model")
    whole = make(folder, Share()).matrix(parts, columns)
    for share in SHARES:
        own = make(folder, share).matrix(parts, columns)
        assert torch.equal(own, slices(whole, parts, share.rank))


@pytest.mark.parametrize("make", SOURCES)
def test_shares_of_vectors_are_slices(
    tmp_path: Path, make: Callable[[Path, Share], TensorSource]
) -> None:
    folder = write_qwen3(tmp_path / "model")
    norm = make(folder, Share()).vector(NORM)
    halves = [Part(NORM[0].name, 48, ROWS)]
    for share in SHARES:
        assert torch.equal(make(folder, share).vector(NORM), norm)
        assert torch.equal(make(folder, share).vector(halves), slices(norm, halves, share.rank))


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("parts", "columns"), [(QKV, 64), (DOWN, 128)])
def test_a_share_is_cut_before_it_is_rounded(
    tmp_path: Path, quantization: str, parts: list[Part], columns: int
) -> None:
    folder = write_qwen3(tmp_path / "model", hidden_size=64, intermediate_size=128)
    parts = [Part(part.name, 64, part.split) if part in DOWN else part for part in parts]
    whole = from_files(folder, Share()).matrix(parts, columns)
    for share in SHARES:
        source = in_precision(from_files(folder, share), quantization, REFERENCE)
        own, part = source.matrix(parts, columns), slices(whole, parts, share.rank)
        expected = PRECISIONS[quantization].matrix.for_columns(part.shape[1]).round(part)
        assert type(own) is type(expected)
        assert own.shape == expected.shape
        assert torch.equal(own.dequantised(), expected.dequantised())


STORED: dict[str, Format] = {
    "gptq": gptq(group=32),
    "awq": awq(group=32),
    "int8": int_tensors(),
    "fp8": float8(),
}


@pytest.mark.parametrize("name", STORED)
def test_shares_of_stored_formats_are_slices_of_their_numbers(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path, STORED[name])
    whole = matrices(load(tmp_path, Share()))
    for share in SHARES:
        own = matrices(load(tmp_path, share))
        for place, (weight, parts) in own.items():
            assert type(weight) is type(whole[place][0])
            expected = slices(whole[place][0].dequantised(), parts, share.rank)
            assert torch.equal(weight.dequantised(), expected), place


def load(folder: Path, share: Share, **options: Any) -> Decoder:
    return load_decoder(
        Checkpoint(folder), LoadOptions(torch.float32, CPU, "auto", 64, share=share, **options)
    )


def matrices(network: Decoder) -> dict[str, tuple[Weight, list[Part]]]:
    """The matrices of a network, and the whole parts that they are made of."""
    found: dict[str, tuple[Weight, list[Part]]] = {}
    for index, layer in enumerate(network.layers):
        spec, inner = network.config.attention, network.config.intermediate_size
        rows = (spec.query_rows, spec.kv_rows, spec.kv_rows)
        width = network.config.hidden_size
        found[f"{index}.qkv"] = layer.mixer.qkv.weight, [Part("", it, ROWS) for it in rows]
        found[f"{index}.output"] = layer.mixer.output.weight, [Part("", width, COLUMNS)]
        found[f"{index}.gate_up"] = layer.feed_forward.inner.weight, [Part("", inner, ROWS)] * 2
        found[f"{index}.down"] = layer.feed_forward.down.weight, [Part("", width, COLUMNS)]
    return found


@dataclass
class Ranks:
    """Threads that wait for each other, and add or concatenate their tensors."""

    barrier: Barrier
    brought: list[Tensor | None]

    def together(self, rank: int, mine: Tensor, join: Callable[[Any], Tensor]) -> Tensor:
        self.brought[rank] = mine
        self.barrier.wait(60)
        joined = join(self.brought)
        self.barrier.wait(60)
        return joined

    def share(self, rank: int) -> Share:
        return Share(
            rank,
            SIZE,
            reduce=lambda x: self.together(rank, x, lambda all_of: sum(all_of[1:], all_of[0])),
            gather=lambda x: self.together(rank, x, lambda all_of: torch.cat(all_of, -1)),
        )


def logits(network: Decoder, shape: Shape) -> Tensor:
    requests = Requests([0, 0], [5, 3])
    inputs = attention_inputs(requests, shape.block_size)
    caches = [filled_cache(inputs, requests, shape) for _ in network.layers]
    hidden, _ = network(torch.arange(8) * 9 % 96, inputs, caches)
    return network.head(hidden)


@pytest.mark.parametrize("tied", [True, False])
def test_the_ranks_together_are_the_whole_network(tmp_path: Path, tied: bool) -> None:
    folder = write_qwen3(tmp_path / "model", tie_word_embeddings=tied, attention_bias=True)
    add_biases(folder)
    whole = load(folder, Share())
    config = whole.config
    shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, 16)
    expected = logits(whole, shape)
    ranks = Ranks(Barrier(SIZE), [None] * SIZE)
    found: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        own = load(folder, ranks.share(rank))
        assert isinstance(own.head.weight, DenseMatrix)
        assert own.head.weight.shape[0] == config.vocab_size // SIZE
        found[rank] = logits(
            own, Shape(shape.heads // SIZE, shape.kv_heads // SIZE, shape.head_dim, 16)
        )

    threads = [Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == [0, 1]
    joined = torch.cat((found[0], found[1]), -1)  # each has the logits of its own tokens
    assert_close(joined, expected, rtol=1e-4, atol=1e-4)


def test_ranks_share_sinks_by_query_head(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model")
    config = read_decoder_config(Checkpoint(folder))
    spec, layer = replace(config.attention, sinks=True), LAYER.removesuffix(".")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}self_attn.sinks"] = torch.arange(spec.num_heads).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    for share in SHARES:
        source = in_precision(from_files(folder, share), None, REFERENCE)
        context = BuildContext(source, config.hidden_size, RopeTables(8, CPU), share)
        own = spec.build(context, layer, LayerNorms(1e-6)).heads.sinks
        assert own is not None
        each = spec.num_heads // SIZE
        assert own.tolist() == list(range(share.rank * each, (share.rank + 1) * each))


def test_caches_hold_the_heads_of_a_rank(tmp_path: Path) -> None:
    config = read_decoder_config(Checkpoint(write_qwen3(tmp_path / "model")))
    whole, *shares = (config.cache_layout(torch.bfloat16, it) for it in (Share(), *SHARES))
    assert [share.bytes_per_token for share in shares] == [whole.bytes_per_token // SIZE] * SIZE


def add_biases(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".self_attn." in name and "_proj.weight" in name]:
        tensors[name.replace("weight", "bias")] = torch.randn(len(tensors[name]))
    save_file(tensors, folder / "model.safetensors")


def test_sizes_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model")
    with pytest.raises(UsageError, match=r"\(\d+\) cannot be split over 5 ranks; use a number of"):
        load(folder, Share(0, 5))
    with pytest.raises(UsageError, match=r"num_key_value_heads \(2\) cannot be split over 3 ranks"):
        load(folder, Share(0, 3))
