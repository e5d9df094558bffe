"""Quantised checkpoints: the numbers that are read are those that were stored, bit for bit."""

import json
import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.core.config import EngineConfig
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.engine.resolve import require_stored_precision
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, decoder_bytes, load_decoder
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.runner.capability import kept_formats, require_stored
from tests.checkpoints import write_qwen3
from tests.float4_checkpoints import modelopt, packed_mxfp4, packed_nvfp4, quark
from tests.quantized_checkpoints import (
    DYNAMIC,
    SIZES,
    Format,
    awq,
    edit_config,
    edit_tensors,
    float8,
    float_tensors,
    gptq,
    int_tensors,
    packed_tensors,
    write_quantized,
    write_whole,
)

pytestmark = pytest.mark.usefixtures("plain_torch")

CPU = torch.device("cpu")
KEPT = kept_formats(CPU)
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}

# The format, and what its matrices become: with the group of four bits.
FORMATS: dict[str, tuple[Format, type, int | None]] = {
    "gptq": (gptq(), Int4Matrix, 128),
    "gptq-32": (gptq(group=32), Int4Matrix, 32),
    "gptq-64": (gptq(group=64), Int4Matrix, 32),
    "gptq-rows": (gptq(group=-1), Int4Matrix, 128),
    "gptq-asym": (gptq(group=32, symmetric=False), Int4Matrix, 32),
    "gptq-v2": (gptq(version="gptq_v2", symmetric=False), Int4Matrix, 128),
    "gptq-16": (gptq(group=16), DenseMatrix, None),
    "gptq-ordered": (gptq(group=32, ordered=True, symmetric=False), DenseMatrix, None),
    "gptq-ordered-rows": (gptq(group=-1, ordered=True), Int4Matrix, 128),
    "gptq-bias": (gptq(with_bias=True), Int4Matrix, 128),
    "gptq-8": (gptq(bits=8, group=-1), Int8Matrix, None),
    "gptq-8-groups": (gptq(bits=8, group=32), DenseMatrix, None),
    "gptq-8-asym": (gptq(bits=8, group=-1, symmetric=False), DenseMatrix, None),
    "awq": (awq(), Int4Matrix, 128),
    "awq-64": (awq(group=64), Int4Matrix, 32),
    "awq-rows": (awq(group=-1), Int4Matrix, 128),
    "packed": (packed_tensors(), Int4Matrix, 128),
    "packed-32": (packed_tensors(group=32), Int4Matrix, 32),
    "packed-asym": (packed_tensors(group=64, symmetric=False), Int4Matrix, 32),
    "packed-rows": (packed_tensors(group=-1), Int4Matrix, 128),
    "packed-ordered": (packed_tensors(group=32, actorder="group"), DenseMatrix, None),
    "packed-by-weight": (packed_tensors(actorder="weight"), Int4Matrix, 128),
    "packed-8": (packed_tensors(bits=8, group=-1), Int8Matrix, None),
    "packed-8-groups": (packed_tensors(bits=8, group=32), DenseMatrix, None),
    "int": (int_tensors(activations=DYNAMIC), Int8Matrix, None),
    "int-tensor": (int_tensors("tensor", activations=DYNAMIC), Int8Matrix, None),
    "int-weights": (int_tensors(), Int8Matrix, None),
    "float": (float_tensors(activations=DYNAMIC), DenseMatrix, None),
    "float-tensor": (float_tensors("tensor", activations=STATIC), DenseMatrix, None),
    "float-block": (float_tensors("block"), DenseMatrix, None),
    "fp8": (float8(), DenseMatrix, None),
    "fp8-odd": (float8(block=48), DenseMatrix, None),
    "fp8-tensor": (float8(block=None), DenseMatrix, None),
    "fp8-static": (float8(block=None, scheme="static"), DenseMatrix, None),
    "fp8-inv": (float8(block=None, name="weight_scale_inv"), DenseMatrix, None),
    "fp8-128": (float8(block=128), DenseMatrix, None),
    "packed-mxfp4": (packed_mxfp4(), Mxfp4Matrix, None),
    "packed-nvfp4": (packed_nvfp4(), Nvfp4Matrix, None),
    "packed-nvfp4-activations": (packed_nvfp4(activations=True), Nvfp4Matrix, None),
    "quark": (quark(), Mxfp4Matrix, None),
    "modelopt-nvfp4": (modelopt(), Nvfp4Matrix, None),
    "modelopt-nvfp4-weights": (modelopt("W4A16_NVFP4"), Nvfp4Matrix, None),
    "modelopt-fp8": (modelopt("FP8"), DenseMatrix, None),
    "modelopt-fp8-rows": (modelopt("fp8_per_channel_per_token"), DenseMatrix, None),
    "modelopt-fp8-blocks": (modelopt("FP8_PB_WO"), DenseMatrix, None),
}


def load(folder: Path, **options: Any) -> Decoder:
    chosen = {"load_format": "auto", "max_positions": 64, **options}
    return load_decoder(Checkpoint(folder), LoadOptions(torch.float32, CPU, **chosen))


def matrices(network: Decoder) -> dict[str, tuple[Weight, tuple[str, ...]]]:
    """The network's matrices by name, each with the checkpoint's modules that it is made of."""
    found: dict[str, tuple[Weight, tuple[str, ...]]] = {}
    for index, layer in enumerate(network.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        queries = tuple(f"{attention}.{it}_proj.weight" for it in "qkv")
        gates = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        found[f"{index}.qkv"] = layer.mixer.qkv.weight, queries
        found[f"{index}.output"] = layer.mixer.output.weight, (f"{attention}.o_proj.weight",)
        found[f"{index}.gate_up"] = layer.feed_forward.inner.weight, gates
        found[f"{index}.down"] = layer.feed_forward.down.weight, (f"{mlp}.down_proj.weight",)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_stored_numbers_are_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    style, kind, group = FORMATS[name]
    meant = write_quantized(tmp_path / "m", style)
    network = load(tmp_path / "m")
    for place, (weight, parts) in matrices(network).items():
        expected = torch.cat([meant[part] for part in parts])
        assert torch.equal(weight.dequantised(), expected), place
        assert isinstance(weight, kind), place
        if isinstance(weight, Int4Matrix):
            assert weight.group == group
        if isinstance(weight, Int8Matrix):
            assert weight.rounds_input is (name in ("int", "int-tensor"))
    assert torch.equal(network.head.weight.dequantised(), meant["lm_head.weight"])
    assert isinstance(network.head.weight, DenseMatrix)
    assert torch.equal(network.embedding.weight.floats, meant["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_known_beforehand(name: str, tmp_path: Path) -> None:
    style, _, _ = FORMATS[name]
    write_quantized(tmp_path / "m", style)
    checkpoint = Checkpoint(tmp_path / "m")
    config = read_decoder_config(checkpoint)
    options = LoadOptions(torch.float32, CPU, "auto", 64)
    predicted = decoder_bytes(checkpoint, config, options)
    network = load(tmp_path / "m")
    taken = network.embedding.weight.nbytes + size_of(network.head.weight)
    taken += sum(size_of(weight) for weight, _ in matrices(network).values())
    # Groups of 64 are kept as groups of 32, and zeros in the middle are not kept at all.
    assert predicted == pytest.approx(taken, rel=0.15)


def size_of(weight: Weight) -> int:
    """Without zeros."""
    zeros = weight.zeros if isinstance(weight, Int4Matrix) else None
    return weight.nbytes - (0 if zeros is None else zeros.nbytes)


@pytest.mark.parametrize(
    "name",
    [
        *("gptq", "awq", "packed-asym", "fp8", "packed-mxfp4", "modelopt-nvfp4"),
        *(pytest.param(it, marks=pytest.mark.full) for it in ("int", "gptq-ordered")),
    ],
)
def test_output_is_that_of_the_unquantised_numbers_and_lossless(name: str, tmp_path: Path) -> None:
    style, _, _ = FORMATS[name]
    meant = write_quantized(tmp_path / "m", style)
    whole = write_whole(tmp_path / "whole", tmp_path / "m", meant)
    plain = tokens(tmp_path / "m")
    if name != "int":  # which rounds activations
        assert plain == tokens(whole)
    drafter = {"model": str(whole), "num_speculative_tokens": 3, "quantization": "int4"}
    assert tokens(tmp_path / "m", speculative_config=drafter) == plain
    quantized = {"model": str(tmp_path / "m"), "num_speculative_tokens": 3}
    assert tokens(whole, speculative_config=quantized) == tokens(whole)


def test_the_engine_says_how_a_checkpoint_is_stored(tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq(group=32))
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=8)
    found = {name: (value, why) for name, value, why in llm.engine.resolved.reasons}
    assert found["checkpoint quantization"][0] == "gptq, 4 bits, groups of 32"
    assert "integers and four-bit floats stay" in found["checkpoint quantization"][1]
    assert f"weights of {tmp_path.name}" in found


def test_the_stored_format_may_be_named(tmp_path: Path) -> None:
    write_quantized(tmp_path / "gptq", gptq(group=32))
    plain = tokens(tmp_path / "gptq")
    assert tokens(tmp_path / "gptq", quantization="gptq_marlin") == plain
    with pytest.raises(UsageError, match=r"quantization=awq is how .*, but gptq is gptq; leave it"):
        tokens(tmp_path / "gptq", quantization="awq")


def tokens(folder: Path, **options: Any) -> list[int]:
    llm = LLM(str(folder), skip_tokenizer_init=True, num_kv_blocks=64, **options)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 9, 14, 2, 71]}, params)
    return list(output.outputs[0].token_ids)


# Modules that differ


def test_modules_that_are_ignored_stay_whole(tmp_path: Path) -> None:
    style = packed_tensors(group=32, ignore=["lm_head", "re:.*self_attn.*"])
    meant = write_quantized(tmp_path, style, skip=("lm_head", "self_attn"))
    for place, (weight, parts) in matrices(load(tmp_path)).items():
        kept = Int4Matrix if "gate_up" in place or "down" in place else DenseMatrix
        assert isinstance(weight, kind_of(kept)), place
        assert torch.equal(weight.dequantised(), torch.cat([meant[part] for part in parts]))


def kind_of(kind: type) -> type:
    return kind


def test_matrices_that_are_stored_in_several_ways_become_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meant = write_quantized(tmp_path, gptq(group=32), skip=("lm_head", "0.self_attn.k_proj"))
    with caplog.at_level(logging.INFO, "slipstream"):
        found = matrices(load(tmp_path))
    assert isinstance(found["0.qkv"][0], DenseMatrix)
    assert isinstance(found["1.qkv"][0], Int4Matrix)
    for weight, parts in found.values():
        assert torch.equal(weight.dequantised(), torch.cat([meant[part] for part in parts]))
    assert "0.self_attn.q_proj.weight and the matrices stacked with it are stored in" in caplog.text


def test_a_quantised_head(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, gptq(group=32, lm_head=True), skip=())
    head = load(tmp_path).head.weight
    assert isinstance(head, Int4Matrix)
    assert torch.equal(head.dequantised(), meant["lm_head.weight"])


def test_groups_of_settings_go_by_name_and_class(tmp_path: Path) -> None:
    """Feed-forward modules in four bits, all others in eight."""
    eight, four = int_tensors(activations=DYNAMIC), packed_tensors(group=32)
    groups = {
        "group_0": {**eight.config["config_groups"]["group_0"], "format": "int-quantized"},
        "group_1": {
            **four.config["config_groups"]["group_0"],
            "format": "pack-quantized",
            "targets": ["re:.*mlp.*", "model.layers.9.nothing"],
        },
    }
    config = {**eight.config, "format": "mixed-precision", "config_groups": groups}
    meant = write_quantized(tmp_path / "eight", eight, skip=("lm_head", "mlp"))
    other = write_quantized(tmp_path / "four", four, skip=("lm_head", "attn"))
    meant |= {name: tensor for name, tensor in other.items() if "mlp" in name}
    mix(tmp_path / "four", tmp_path / "eight", "mlp")
    edit_config(tmp_path / "eight", quantization_config=config)
    for place, (weight, parts) in matrices(load(tmp_path / "eight")).items():
        kept = Int4Matrix if "gate_up" in place or "down" in place else Int8Matrix
        assert isinstance(weight, kind_of(kept)), place
        assert torch.equal(weight.dequantised(), torch.cat([meant[part] for part in parts]))
    stored = read_quantization(Checkpoint(tmp_path / "eight").config)
    assert stored is not None
    words = "compressed-tensors, 8 bits, a scale a row, activations too; 4 bits, groups of 32"
    assert stored.description == words


def mix(source: Path, target: Path, part: str) -> None:
    """Give `target` the tensors of `source` that have `part` in their names."""
    from safetensors.torch import load_file

    both = (load_file(folder / "model.safetensors") for folder in (source, target))
    theirs, ours = ({n: t for n, t in each.items() if part in n} for each in both)
    gone: dict[str, Tensor | None] = dict.fromkeys(ours)
    edit_tensors(target, **{**gone, **theirs})


# Together with --quantization


@pytest.mark.parametrize("name", ["gptq", "int"])
def test_integers_stay_and_the_rest_is_rounded(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    style, kind, _ = FORMATS[name]
    meant = write_quantized(tmp_path, style)
    with caplog.at_level(logging.INFO, "slipstream"):
        network = load(tmp_path, quantization="int8")
    for weight, parts in matrices(network).values():
        assert isinstance(weight, kind)
        assert torch.equal(weight.dequantised(), torch.cat([meant[part] for part in parts]))
    assert isinstance(network.head.weight, Int8Matrix)
    assert "matrices without a kernel are quantised to int8" in caplog.text


@pytest.mark.parametrize("name", ["fp8", "float", "fp8-static", "gptq-8-groups", "gptq-ordered"])
def test_what_has_no_form_in_integers_is_rounded(name: str, tmp_path: Path) -> None:
    style, _, _ = FORMATS[name]
    meant = write_quantized(tmp_path, style)
    for weight, parts in matrices(load(tmp_path, quantization="int8")).values():
        assert isinstance(weight, Int8Matrix)
        expected = torch.cat([meant[part] for part in parts])
        error = (weight.dequantised() - expected).norm() / expected.norm()
        assert float(error) < 0.02


@pytest.mark.parametrize("name", ["float", "float-tensor", "fp8-tensor"])
@pytest.mark.parametrize("options", [{"kept": frozenset({Float8Matrix})}, {"quantization": "fp8"}])
def test_fp8_rows_stay_where_they_are_wanted(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    meant = write_quantized(tmp_path, FORMATS[name][0])
    for weight, parts in matrices(load(tmp_path, **options)).values():
        assert isinstance(weight, Float8Matrix)
        assert torch.equal(weight.dequantised(), torch.cat([meant[part] for part in parts]))


def test_a_tied_head_is_the_table_or_a_rounded_copy(tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq(), tie_word_embeddings=True)
    network = load(tmp_path)
    assert network.head.weight is network.embedding.weight
    assert isinstance(load(tmp_path, quantization="int4").head.weight, Int8Matrix)


@pytest.mark.parametrize("quantization", ["int4", "mxfp4"])
def test_a_tied_head_that_stays_takes_no_bytes(quantization: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq(), tie_word_embeddings=True)
    checkpoint = Checkpoint(tmp_path)
    config = read_decoder_config(checkpoint)
    options = LoadOptions(torch.float32, CPU, "auto", 64)
    rounded = replace(options, quantization=quantization)
    copy = decoder_bytes(checkpoint, config, rounded) - decoder_bytes(checkpoint, config, options)
    assert copy == (config.vocab_size * config.hidden_size if quantization == "int4" else 0)


@pytest.mark.parametrize("load_format", ["dummy", "twin"])
def test_random_weights_are_not_rounded_to_every_form(load_format: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq())
    with pytest.raises(UsageError, match=r"rounded to gptq, 4 bits.*leave that out"):
        load(tmp_path, load_format=load_format)


@pytest.mark.parametrize(
    "name", ["packed-mxfp4", "modelopt-nvfp4", "quark", "fp8-128", "float", "int"]
)
@pytest.mark.parametrize("load_format", ["dummy", "twin"])
def test_random_weights_have_the_stored_form(load_format: str, name: str, tmp_path: Path) -> None:
    style, kind, _ = FORMATS[name]
    write_quantized(tmp_path / "m", style)
    network = load(tmp_path / "m", load_format=load_format, kept=KEPT | {Float8BlockMatrix})
    write_qwen3(tmp_path / "whole", **SIZES)
    whole = load(tmp_path / "whole", load_format=load_format)
    for (weight, _), (numbers, _) in zip(
        matrices(network).values(), matrices(whole).values(), strict=True
    ):
        assert type(weight) is (Float8BlockMatrix if name == "fp8-128" else kind)
        error = (weight.dequantised() - numbers.dequantised()).norm()
        assert 0 < float(error) < 0.13 * float(numbers.dequantised().norm())
    assert torch.equal(network.head.weight.dequantised(), whole.head.weight.dequantised())
    checkpoint = Checkpoint(tmp_path / "m")
    options = LoadOptions(torch.float32, CPU, load_format, 64, kept=KEPT | {Float8BlockMatrix})
    taken = network.embedding.weight.nbytes + network.head.weight.nbytes
    taken += sum(weight.nbytes for weight, _ in matrices(network).values())
    predicted = decoder_bytes(checkpoint, read_decoder_config(checkpoint), options)
    assert predicted == pytest.approx(taken, rel=0.05)


# What GPUs have kernels for


@pytest.mark.parametrize("name", FORMATS)
def test_gpus_take_every_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    stored = read_quantization({"quantization_config": FORMATS[name][0].config})
    assert stored is not None
    require_stored(CPU, "m", stored)
    require_stored(torch.device("cuda"), "m", stored)


@pytest.mark.parametrize("name", ["gptq-asym", "gptq-8-groups", "awq", "int", "float-block"])
def test_old_gpus_take_what_needs_no_e4m3(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    stored = read_quantization({"quantization_config": FORMATS[name][0].config})
    assert stored is not None
    require_stored(torch.device("cuda"), "m", stored)


@pytest.mark.parametrize("activations", [DYNAMIC, None])
def test_gpus_take_four_bits_beside_fp8_with_rounded_activations(
    activations: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    mixed = deepcopy(packed_nvfp4().config)
    eight = float_tensors(activations=activations).config
    mixed["config_groups"]["more"] = {
        **eight["config_groups"]["group_0"],
        "format": eight["format"],
    }
    stored = read_quantization({"quantization_config": mixed})
    assert stored is not None
    if activations:
        require_stored(torch.device("cuda"), "m", stored)
        return
    with pytest.raises(UsageError, match="no kernels on a GPU"):
        require_stored(torch.device("cuda"), "m", stored)


def test_old_gpus_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    stored = read_quantization({"quantization_config": float8(block=None).config})
    assert stored is not None
    with pytest.raises(UsageError, match=r"needs compute capability 8\.9 .* A100 has 8\.0"):
        require_stored(torch.device("cuda"), "m", stored)


def test_fp8_rows_are_not_batch_invariant_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    stored = read_quantization({"quantization_config": float8(block=None).config})
    assert stored is not None
    gpu, config = torch.device("cuda"), EngineConfig(batch_invariant=True)
    require_stored_precision(EngineConfig(), gpu, "m", stored)
    require_stored_precision(config, CPU, "m", stored)
    with pytest.raises(UsageError, match="in which m is stored; leave out batch_invariant"):
        require_stored_precision(config, gpu, "m", stored)


# Settings


def changed(style: Format, *path: str, **changes: Any) -> dict[str, Any]:
    """A quantization_config in which keys of a nested object are changed."""
    config: dict[str, Any] = json.loads(json.dumps(style.config))
    inner = config
    for key in path:
        inner = inner[key]
    inner.update(changes)
    return config


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")
INPUTS = (*GROUP, "input_activations")
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "aqlm"},
        "quant_method\" is 'aqlm'; supported are awq, comp.*fp8, gguf, gptq",
    ),
    ({"bits": 4}, 'quant_method" is None'),
    (changed(gptq(), bits=3), 'bits" is 3, but 4 and 8'),
    (changed(gptq(), group_size=0), 'group_size" is 0, but must be pos'),
    (changed(gptq(), checkpoint_format="marlin"), "checkpoint_format\" is 'marlin'"),
    (changed(gptq(), is_marlin_format=True), 'is_marlin_format" is true'),
    (changed(gptq(), pack_dtype="int16"), 'pack_dtype" is "int16"'),
    (changed(gptq(), dynamic={"+:.*": {"bits": 8}}), 'dynamic" has modules with other'),
    (changed(gptq(), rotation="hadamard"), 'quantization_config.rotation" is unknown'),
    (changed(gptq(), sym="yes"), 'sym" must be true or false'),
    (changed(awq(), bits=8), 'bits" is 8, but only 4'),
    (changed(awq(), version="gemv"), "version\" is 'gemv', but only gemm"),
    (changed(awq(), format="llm-awq"), "format\" is 'llm-awq'"),
    (changed(awq(), zero_point=False), 'zero_point" is false'),
    (changed(awq(), odd=1), 'quantization_config.odd" is unknown'),
    (changed(float8(), fmt="e5m2"), 'fmt" is "e5m2"'),
    (changed(float8(), activation_scheme="none"), "activation_scheme\" is 'none'"),
    (changed(float8(), weight_block_size=[128]), 'weight_block_size" must be two'),
    (changed(float8(), scale_fmt="e9m0"), "scale_fmt\" is 'e9m0'"),
    (changed(float8(), modules_to_convert=["x"]), 'modules_to_convert" is unknown'),
    (changed(packed_tensors(), format="marlin-24"), "format\" is 'marlin-24'; supported are fl"),
    (changed(packed_tensors(), quantization_status="calibration"), "finish the quantization"),
    (changed(packed_tensors(), config_groups=["Linear"]), 'config_groups.0" must be'),
    (changed(packed_tensors(), transform_config={"a": 1}), 'transform_config" is not supported'),
    (changed(packed_tensors(), sparsity_config={"format": "sparse-24"}), "sparsity_config.form"),
    (changed(packed_tensors(), config_groups={}), 'config_groups" is missing|has no group'),
    (changed(packed_tensors(), odd=1), 'quantization_config.odd" is unknown'),
    (changed(packed_tensors(), *GROUP, odd=1), r'config_groups\.group_0\.odd" is unknown'),
    (changed(packed_tensors(), *GROUP, targets=[1]), 'targets" must be names'),
    (changed(packed_tensors(), *GROUP, targets=[]), 'targets" names nothing'),
    (changed(packed_tensors(), *GROUP, targets=["re:("]), "targets\" holds 're:\\(', which is no"),
    (changed(packed_tensors(), ignore=["re:["]), "ignore\" holds 're:\\[', which is no regular"),
    (changed(packed_tensors(), *GROUP, output_activations=DYNAMIC), 'output_activations" is not'),
    (changed(packed_tensors(), *GROUP, input_activations=DYNAMIC), 'activations" ask for 8 bits'),
    (changed(packed_tensors(), *WEIGHTS, num_bits=3), 'weights.num_bits" is 3'),
    (changed(packed_tensors(), *WEIGHTS, type="float"), 'weights.type" does not go with'),
    (changed(packed_tensors(), *WEIGHTS, type="nf"), "weights.type\" is 'nf'"),
    (changed(packed_tensors(), *WEIGHTS, strategy="tensor"), "strategy\" is 'tensor'"),
    (changed(packed_tensors(), *WEIGHTS, actorder="odd"), "actorder\" is 'odd'"),
    (changed(packed_tensors(), *WEIGHTS, dynamic=True), 'weights.dynamic" is true'),
    (changed(packed_tensors(), *WEIGHTS, odd=1), 'weights.odd" is unknown'),
    (changed(int_tensors(), *WEIGHTS, symmetric=False), 'symmetric" is false'),
    (changed(int_tensors(), *WEIGHTS, num_bits=4), 'num_bits" is 4, which int-quantized'),
    (changed(int_tensors(activations=DYNAMIC), *INPUTS, dynamic=False), 'dynamic" must be dyn'),
    (changed(int_tensors(activations=DYNAMIC), *INPUTS, strategy="tensor"), 'strategy" must be'),
    (changed(int_tensors(activations=DYNAMIC), *INPUTS, symmetric=False), 'symmetric" is false'),
    (changed(int_tensors(activations=DYNAMIC), *INPUTS, odd=1), 'input_activations.odd" is unk'),
    (changed(float_tensors("block"), *WEIGHTS, block_structure=[0, 1]), "two positive integers"),
]


GROUP_OF_ONE = packed_tensors().config["config_groups"]["group_0"]
OF_ATTENTION = {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": DYNAMIC}
SAME = [
    (packed_tensors(), {"config_groups": [GROUP_OF_ONE]}),
    (packed_tensors(), {"config_groups": {"a": {**GROUP_OF_ONE, "targets": "Linear"}}}),
    (packed_tensors(), {"ignore": "lm_head"}),
    (packed_tensors(), {"config_groups": {"a": GROUP_OF_ONE, "b": OF_ATTENTION}}),
    (packed_tensors(), {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
    (float8(), {"kv_cache_scheme": "static"}),
]


@pytest.mark.parametrize(("style", "changes"), SAME)
def test_other_spellings_of_the_same_settings(style: Format, changes: dict[str, Any]) -> None:
    """Lists in place of objects, a name in place of a list, settings of caches and attention."""
    given = {"quantization_config": changed(style, **changes)}
    assert read_quantization(given) == read_quantization({"quantization_config": style.config})


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_are_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, gptq())
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(CheckpointError, match=message):
        read_decoder_config(Checkpoint(tmp_path))


def test_settings_under_two_keys(tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq())
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, compression_config=config["quantization_config"])
    assert isinstance(matrices(load(tmp_path))["0.qkv"][0], Int4Matrix)
    edit_config(tmp_path, quantization_config=None)
    assert isinstance(matrices(load(tmp_path))["0.qkv"][0], Int4Matrix)
    edit_config(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match='"compression_config" differ; remove one'):
        load(tmp_path)
    edit_config(tmp_path, quantization_config="int4")
    with pytest.raises(CheckpointError, match='"quantization_config" must be an object'):
        load(tmp_path)


# Tensors

K_PROJ = "model.layers.1.self_attn.k_proj"
BROKEN: list[tuple[Format, str, Tensor | None, str]] = [
    (gptq(), "qweight", None, "k_proj.qweight, which its quantization_config asks for"),
    (gptq(), "scales", torch.ones(2, 64), r"k_proj.scales as \[2, 64\] of float32, .* \[1, 64\]"),
    (gptq(), "qweight", torch.ones(16, 64), "of float32, where .* of int32"),
    (gptq(), "qzeros", torch.zeros(1, 8, dtype=torch.int32), 'says "sym" .* not in the middle'),
    (gptq(), "g_idx", torch.full((128,), 3, dtype=torch.int32), "g_idx beyond its 1 groups"),
    (gptq(ordered=True), "g_idx", None, "no tensor .*k_proj.g_idx, which desc_act asks for"),
    (gptq(with_bias=True), "bias", torch.ones(64), "does not use .*k_proj.bias"),
    (packed_tensors(), "weight_shape", torch.tensor([9, 9]), r"weight_shape \[9, 9\], where"),
    (packed_tensors(symmetric=False), "weight_zero_point", None, "no tensor .*weight_zero_point"),
    (packed_tensors(actorder="group"), "weight_g_idx", torch.full((128,), 7), "g_idx beyond"),
    (int_tensors(), "weight_zero_point", torch.ones(64, 1).char(), "zero_point other than 0"),
    (int_tensors(), "odd", torch.ones(1), "does not use .*k_proj.odd"),
    (float8(), "weight_scale_inv", None, r"has no tensor .*k_proj\.weight_scale_inv, which"),
    (float8(), "weight_scale_inv", torch.ones(3, 3), r"as \[3, 3\] of float32, where .*\[1, 2\]"),
]


@pytest.mark.parametrize(("style", "suffix", "tensor", "message"), BROKEN)
def test_tensors_that_are_refused_by_name(
    style: Format, suffix: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, style)
    edit_tensors(tmp_path, **{f"{K_PROJ}.{suffix}": tensor})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


NAN, INF = float("nan"), float("inf")
NOT_FINITE: list[tuple[Format, str, float]] = [
    (gptq(), "scales", NAN),
    (gptq(), "scales", INF),
    (awq(), "scales", NAN),
    (packed_tensors(), "weight_scale", NAN),
    (int_tensors(), "weight_scale", INF),
    (float_tensors(), "weight_scale", NAN),
    (float8(), "weight_scale_inv", -INF),
    (float8(), "weight", NAN),
]


@pytest.mark.parametrize(("style", "suffix", "value"), NOT_FINITE)
def test_numbers_that_are_not_finite_are_refused_by_name(
    style: Format, suffix: str, value: float, tmp_path: Path
) -> None:
    write_quantized(tmp_path, style)
    name = f"{K_PROJ}.{suffix}"
    tensor = load_file(tmp_path / "model.safetensors")[name]
    changed = tensor.float()
    changed.view(-1)[len(changed.view(-1)) // 2] = value
    edit_tensors(tmp_path, **{name: changed.to(tensor.dtype)})
    with pytest.raises(CheckpointError, match=f"tensor {name} in .* holds NaN or infinity"):
        load(tmp_path)


def test_a_module_without_any_tensor(tmp_path: Path) -> None:
    write_quantized(tmp_path, awq())
    gone = dict.fromkeys(f"{K_PROJ}.{it}" for it in ("qweight", "qzeros", "scales"))
    edit_tensors(tmp_path, **gone)
    with pytest.raises(CheckpointError, match=f"no tensor {K_PROJ}.weight, nor one of its quant"):
        load(tmp_path)


def test_a_module_that_no_group_of_settings_is_about(tmp_path: Path) -> None:
    style = packed_tensors()
    write_quantized(tmp_path, style)
    edit_config(tmp_path, quantization_config=changed(style, *GROUP, targets=["re:.*mlp.*"]))
    with pytest.raises(CheckpointError, match="q_proj quantised, but nothing in its"):
        load(tmp_path)


def test_columns_that_do_not_fill_words(tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq(group=-1), hidden_size=132, skip=("lm_head", "o_proj", "down"))
    with pytest.raises(CheckpointError, match=r"has 132 columns in .*q_proj, which do not fill"):
        load(tmp_path)


def test_quantised_weights_without_a_word_in_the_config(tmp_path: Path) -> None:
    write_quantized(tmp_path, float8())
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"as float8_e4m3fn; .* unless its config\.json"):
        load(tmp_path)
