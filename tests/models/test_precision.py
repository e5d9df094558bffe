"""Rounded matrices: what is stored, what is computed with it, and that a drafter may have them."""

import json
import logging
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream import LLM, SamplingParams
from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.kernels.formats import float8
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix, ToFloat8
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.reference import REFERENCE, ReferenceOps
from slipstream.layers.embedding import LanguageModelHead
from slipstream.layers.parameters import Part
from slipstream.models import loading
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.models.parameter_sources import CheckpointSource
from slipstream.models.precision import weight_bytes
from tests.checkpoints import QWEN3, write_qwen3
from tests.pass_inputs import pass_inputs

pytestmark = pytest.mark.usefixtures("plain_torch")

CPU = torch.device("cpu")
ROWS = 23


def load(folder: Path, **options: Any) -> Decoder:
    chosen = {"load_format": "auto", "max_positions": 64, "quantization": "fp8", **options}
    return load_decoder(Checkpoint(folder), LoadOptions(torch.float32, CPU, **chosen))


def matrices(network: Decoder) -> dict[str, Weight]:
    found: dict[str, Weight] = {"head": network.head.weight}
    for index, layer in enumerate(network.layers):
        found |= {
            f"{index}.qkv": layer.mixer.qkv.weight,
            f"{index}.output": layer.mixer.output.weight,
            f"{index}.gate_up": layer.feed_forward.inner.weight,
            f"{index}.down": layer.feed_forward.down.weight,
        }
    return found


def exact(weight: Weight) -> Tensor:
    return weight.dequantised()


def logits(network: Decoder) -> Tensor:
    """[ROWS, vocabulary] of one prompt."""
    layout = network.config.cache_layout(torch.float32)
    cache = ModelCache(layout, CacheSizes(num_blocks=2, block_size=16, num_slots=1, device=CPU))
    positions = torch.arange(ROWS)
    inputs = pass_inputs(
        query_start=torch.tensor([0, ROWS]),
        context_lens=torch.tensor([ROWS]),
        block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
        positions=positions,
        slots=positions,
        max_rows=ROWS,
    )
    hidden, _ = network(7 * positions % 89, inputs, cache.layers)
    return network.head(hidden)


# What is stored


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("load_format", ["auto", "dummy", "twin"])
def test_matrices_are_rounded_and_nothing_else(
    tmp_path: Path, load_format: str, tied: bool
) -> None:
    folder = write_qwen3(tmp_path / "model", tie_word_embeddings=tied)
    network = load(folder, load_format=load_format)
    whole = load(folder, load_format=load_format, quantization=None)
    for (name, weight), full in zip(
        matrices(network).items(), matrices(whole).values(), strict=True
    ):
        assert isinstance(weight, Float8Matrix), name
        full = full.dequantised()
        assert weight.values.dtype == torch.float8_e4m3fn
        assert weight.values.shape == full.shape
        assert weight.scales.dtype == torch.float32
        torch.testing.assert_close(weight.scales, full.abs().amax(-1) / 448)
        # e4m3 keeps three bits after the leading one; below 2^-6 its steps are even.
        bound = full.abs() / 16 + weight.scales.unsqueeze(-1) * 2.0**-10
        assert bool(((exact(weight) - full).abs() <= bound * 1.001).all()), name
    assert network.embedding.weight.table_dtype == torch.float32
    assert torch.equal(network.embedding.weight.floats, whole.embedding.weight.floats)
    assert torch.equal(network.norm.weight, whole.norm.weight)


def test_rounding_does_not_depend_on_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(37, 24, generator=torch.Generator().manual_seed(1))
    whole = ToFloat8().round(matrix)
    monkeypatch.setattr(float8, "_SLICE", 100)
    parts = ToFloat8().round(matrix)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))


def test_a_row_of_zeros_stays_zero() -> None:
    matrix = torch.randn(3, 16)
    matrix[1] = 0
    assert torch.equal(exact(ToFloat8().round(matrix))[1], torch.zeros(16))


def test_one_matrix_at_a_time_is_in_memory_unrounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_qwen3(tmp_path / "model", tie_word_embeddings=False)
    read, made, alive = CheckpointSource.matrix, [], []

    def spy(self: CheckpointSource, parts: Sequence[Part], columns: int) -> Tensor:
        matrix = read(self, parts, columns)
        if matrix.is_meta:  # of the comparison with the headers
            return matrix
        alive.append(sum(tensor() is not None for tensor in made))
        made.append(weakref.ref(matrix))
        return matrix

    monkeypatch.setattr(CheckpointSource, "matrix", spy)
    load(folder)
    # The embedding stays; then four matrices in each of two layers, and the head.
    assert alive == [0] + [1] * 9


def test_the_bytes_are_known_beforehand(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = write_qwen3(tmp_path / str(tied), tie_word_embeddings=tied)
        network = load(folder)
        table = network.embedding.weight.nbytes
        values = [
            weight.values.nbytes
            for weight in matrices(network).values()
            if isinstance(weight, Float8Matrix)
        ]
        assert weight_bytes(network.config, torch.float32, "fp8") == table + sum(values)
        whole = load(folder, quantization=None)
        size = sum(exact(weight).nbytes for weight in matrices(whole).values())
        size += 0 if tied else table
        assert weight_bytes(whole.config, torch.float32, None) == size


def test_the_second_copy_of_a_tied_head_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slipstream"):
        load(write_qwen3(tmp_path / "tied"))
        assert "tied to the embedding, is a second copy" in caplog.text
        caplog.clear()
        load(write_qwen3(tmp_path / "untied", tie_word_embeddings=False))
        assert "rounded to fp8" in caplog.text
        assert "second copy" not in caplog.text


# What is computed


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_equal_those_of_a_float32_network_of_the_rounded_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    folder = write_qwen3(tmp_path / "model", tie_word_embeddings=tied, attention_bias=False)
    found, whole = logits(load(folder)), logits(load(folder, quantization=None))
    monkeypatch.setattr(loading, "kernels_for", lambda *_: SimpleNamespace(network=_Oracle()))
    expected = logits(load(folder))
    spread = expected.std()
    # A sum that differs in its last bit now and then moves an activation to the next number of
    # e4m3, which shows in its row; most rows must be equal.
    assert (found - expected).abs().median() < 1e-5 * spread
    assert (found - expected).abs().max() < 0.2 * spread
    effect = (found - whole).abs()
    assert effect.median() > 5e-3 * spread
    assert effect.max() < spread


class _Oracle(ReferenceOps):
    """Products of float32 numbers, after activations and weights were rounded by hand."""

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return F.linear(_nearest(x / scale) * scale, exact(weight), bias)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self.product(x, weight, None)


def _nearest(x: Tensor) -> Tensor:
    """Round to e4m3, ties to even: three bits after the leading one, from 2^-6 on."""
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(2.0**-6))) - 3)
    return torch.round(x / step) * step


def test_a_head_over_some_tokens_takes_their_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix, hidden = torch.randn(50, 32, generator=generator), torch.randn(4, 32)
    head = LanguageModelHead(REFERENCE, ToFloat8().round(matrix))
    ids = torch.tensor([3, 8, 9, 41])
    assert torch.equal(head.over(ids)(hidden), head(hidden)[:, ids])


# What may have them


PROMPT = {"prompt_token_ids": [5, 9, 14, 2, 71]}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories for `load_format="twin"`: a target whose first layer is the draft."""
    folder = tmp_path_factory.mktemp("twins")
    for name, layers in (("target", 4), ("draft", 1)):
        config = {**QWEN3, "num_hidden_layers": layers, "vocab_size": 160}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return str(folder / "target"), str(folder / "draft")


def tokens(target: str, load_format: str = "twin", **options: Any) -> tuple[list[int], float]:
    llm = LLM(
        target, load_format=load_format, skip_tokenizer_init=True, num_kv_blocks=64, **options
    )
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    return list(output.outputs[0].token_ids), output.metrics.acceptance_length


@cache
def whole_tokens(target: str) -> list[int]:
    """The target's tokens without quantisation."""
    return tokens(target)[0]


@pytest.mark.parametrize("subset", [{}, {"draft_vocab_size": 80}], ids=["whole", "subset"])
def test_a_rounded_drafter_leaves_greedy_output_as_it_is(
    twins: tuple[str, str], subset: dict[str, int]
) -> None:
    target, draft = twins
    plain = whole_tokens(target)
    drafter = {"model": draft, "num_speculative_tokens": 3, "quantization": "fp8", **subset}
    drafted, length = tokens(target, speculative_config=drafter)
    assert drafted == plain
    assert length > 1.2


def test_target_and_drafter_are_rounded_each_by_its_own_option(twins: tuple[str, str]) -> None:
    target, draft = twins
    plain, _ = tokens(target, quantization="fp8")
    assert plain != whole_tokens(target)
    drafter = {"model": draft, "num_speculative_tokens": 3}
    drafted, length = tokens(target, quantization="fp8", speculative_config=drafter)
    assert drafted == plain
    assert length > 1.5


def test_prefixes_of_a_rounded_drafter_are_apart_from_those_of_a_whole_one(
    tiny_target: str, tiny_draft: str
) -> None:
    identities = {
        LLM(
            tiny_target,
            skip_tokenizer_init=True,
            num_kv_blocks=8,
            speculative_config={"model": tiny_draft, "quantization": quantization},
        ).engine.resolved.limits.cache_identity
        for quantization in (None, "fp8")
    }
    assert len(identities) == 2


INTEGERS = ["int8", "int8-dynamic", "int4", "int4-g128", "int4-asym", "int4-g128-asym"]
WIDE = {"hidden_size": 128, "intermediate_size": 160}  # of which 160 has no groups of 128


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("quantization", INTEGERS)
def test_integers_in_every_matrix(
    tmp_path: Path, quantization: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_qwen3(tmp_path / "model", tie_word_embeddings=tied, **WIDE)
    with caplog.at_level(logging.INFO, "slipstream"):
        network = load(folder, quantization=quantization)
    whole = load(folder, quantization=None)
    assert torch.equal(network.embedding.weight.floats, whole.embedding.weight.floats)
    size = network.embedding.weight.nbytes
    for (name, weight), full in zip(
        matrices(network).items(), matrices(whole).values(), strict=True
    ):
        full = full.dequantised()
        error = (weight.dequantised() - full).norm() / full.norm()
        assert float(error) < (0.02 if isinstance(weight, Int8Matrix) else 0.12), name
        size += weight.nbytes
        if quantization.startswith("int8") or name == "head":
            assert isinstance(weight, Int8Matrix)
            assert weight.rounds_input is (quantization == "int8-dynamic" and name != "head")
            size -= weight.scales.nbytes  # which are left out of the account
            continue
        assert isinstance(weight, Int4Matrix)
        assert (weight.zeros is not None) is ("asym" in quantization)
        assert weight.group == (
            128 if "g128" in quantization and "down" not in name and "output" not in name else 32
        )
    predicted = weight_bytes(network.config, torch.float32, quantization)
    assert predicted == pytest.approx(size, rel=0.05)
    assert "second copy" in caplog.text or not tied
    assert ("the head becomes" in caplog.text) is (quantization != "int8")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quantization", "kind"), [("mxfp4", Mxfp4Matrix), ("nvfp4", Nvfp4Matrix)])
def test_four_bit_floats_leave_the_head(
    quantization: str, kind: type, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": tied}
    folder = write_qwen3(tmp_path / "model", **sizes)
    with caplog.at_level(logging.INFO, "slipstream"):
        network = load(folder, quantization=quantization)
    whole = matrices(load(folder, quantization=None))
    size = network.embedding.weight.nbytes * (1 if tied else 2)
    for (name, weight), full in zip(matrices(network).items(), whole.values(), strict=True):
        if name == "head":
            assert torch.equal(weight.dequantised(), full.dequantised())
            continue
        assert type(weight) is kind
        error = (weight.dequantised() - full.dequantised()).norm() / full.dequantised().norm()
        assert 0.03 < float(error) < 0.13, name
        size += weight.nbytes
    assert weight_bytes(network.config, torch.float32, quantization) == pytest.approx(
        size, rel=0.08
    )
    assert f"rounded to {quantization} as they are loaded (" in caplog.text
    assert "the head stays as it is" in caplog.text


def test_four_bit_floats_leave_columns_that_no_group_divides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_qwen3(tmp_path / "model")  # widths of 48, 80 and 96
    with caplog.at_level(logging.INFO, "slipstream"):
        found = matrices(load(folder, quantization="mxfp4"))
    assert type(found["0.qkv"]) is DenseMatrix
    assert type(found["0.output"]) is Mxfp4Matrix
    assert "matrices of this width are not quantised" in caplog.text
    assert type(matrices(load(folder, quantization="nvfp4"))["0.qkv"]) is Nvfp4Matrix


def test_matrices_that_no_group_divides_are_rounded_to_int8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_qwen3(tmp_path / "model")  # widths of 48, 80 and 96
    with caplog.at_level(logging.INFO, "slipstream"):
        found = matrices(load(folder, quantization="int4-g128"))
    kinds = {name: type(weight) for name, weight in found.items()}
    assert kinds["0.qkv"] is kinds["0.gate_up"] is kinds["0.down"] is Int8Matrix
    assert kinds["0.output"] is Int4Matrix
    assert caplog.text.count("of this width are rounded to int8") == 2
    assert "model.layers.0.self_attn.q_proj.weight has 48 columns" in caplog.text
    assert "model.layers.0.mlp.down_proj.weight has 80 columns" in caplog.text


@pytest.mark.parametrize(
    "quantization",
    [
        *("int8", "int8-dynamic", "int4-g128-asym"),
        *(pytest.param(it, marks=pytest.mark.full) for it in ("int4", "int4-g128", "int4-asym")),
    ],
)
def test_greedy_output_of_integers_is_the_same_with_a_drafter(
    twins: tuple[str, str], quantization: str
) -> None:
    target, draft = twins
    plain, _ = tokens(target, quantization=quantization)
    drafter = {"model": draft, "num_speculative_tokens": 3, "quantization": quantization}
    drafted, length = tokens(target, quantization=quantization, speculative_config=drafter)
    assert drafted == plain
    assert length > 1.2
    assert tokens(target, speculative_config=drafter)[0] == whole_tokens(target)


def test_the_other_name_of_int8_dynamic(twins: tuple[str, str]) -> None:
    llm = LLM(twins[0], load_format="twin", skip_tokenizer_init=True, quantization="w8a8")
    assert ("quantization", "int8-dynamic") in [row[:2] for row in llm.engine.resolved.reasons]


def test_dummy_weights_run_rounded(twins: tuple[str, str]) -> None:
    assert len(tokens(twins[0], load_format="dummy", quantization="fp8")[0]) == 80
