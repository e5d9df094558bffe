"""Settings of checkpoints in four-bit floats: where they stand, lists of modules, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix, ToMxfp4
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.kernels.formats.weight import Weight, stacked
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.module import StackAllocator, StoredModule
from slipstream.models.quantized.module_lists import matches
from tests.float4_checkpoints import modelopt, packed_mxfp4, packed_nvfp4, quark
from tests.quantized_checkpoints import Format, edit_config, edit_tensors, write_quantized

pytestmark = pytest.mark.usefixtures("plain_torch")

CPU = torch.device("cpu")
ALL_FLOATS: frozenset[type[Weight]] = frozenset({Float8Matrix, Nvfp4Matrix, Mxfp4Matrix})


def load(folder: Path) -> Any:
    return load_decoder(
        Checkpoint(folder), LoadOptions(torch.float32, CPU, "auto", 64, kept=ALL_FLOATS)
    )


def write_settings(folder: Path, **settings: Any) -> None:
    """A checkpoint with hf_quant_config.json instead of a quantization_config."""
    edit_config(folder, quantization_config=None)
    content = {"producer": {"name": "modelopt"}, "quantization": settings}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))


SETTINGS = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head", "model.embed_tokens"],
}


def test_settings_beside_config_json(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, modelopt())
    write_settings(tmp_path, **SETTINGS)
    weight = load(tmp_path).layers[0].mixer.output.weight
    assert isinstance(weight, Nvfp4Matrix)
    assert torch.equal(weight.dequantised(), meant["model.layers.0.self_attn.o_proj.weight"])
    write_settings(tmp_path, **{**SETTINGS, "quant_algo": "NVFP4_AWQ"})
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: \"quantization.quant_algo"):
        load(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json is not valid JSON"):
        load(tmp_path)


def test_scales_of_caches_are_passed_over(tmp_path: Path) -> None:
    style = modelopt(ignore=["lm_head", "*self_attn*"])
    write_quantized(tmp_path, style, skip=("lm_head", "self_attn"))
    name = "model.layers.0.self_attn"
    scales = {f"{name}.k_proj.k_scale": torch.tensor(0.5), f"{name}.v_proj.v_scale": torch.ones(1)}
    scales |= {f"{name}.{end}_scale": torch.ones(1) for end in ("q", "k", "v", "prob")}
    edit_tensors(tmp_path, **scales)
    load(tmp_path)


def test_each_module_of_a_mixture_has_its_own_algorithm(tmp_path: Path) -> None:
    """Attention in FP8 and the rest in NVFP4, by a table of modules."""
    fp8, nvfp4 = modelopt("FP8"), modelopt("NVFP4")
    meant = write_quantized(tmp_path, nvfp4, skip=("lm_head", "self_attn"))
    found = load_of(tmp_path)
    for name in [name for name in found if "self_attn" in name and "proj" in name]:
        stored = fp8.write(found[name].float().numpy())
        edit_tensors(tmp_path, **{name: None})
        module = name.removesuffix(".weight")
        edit_tensors(tmp_path, **{f"{module}.{end}": it for end, it in stored.tensors.items()})
        meant[name] = stored.weight
    table = {
        "model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "layers.*.mlp.*": {"quant_algo": "nvfp4", "group_size": 16},
        "model.language_model.layers.*.self_attn*": {"quant_algo": "FP8"},
    }
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": table, "config_groups": None}
    edit_config(tmp_path, quantization_config={**nvfp4.config, **settings})
    layer = load(tmp_path).layers[1]
    for weight, kind, names in (
        (layer.mixer.qkv.weight, Float8Matrix, [f"self_attn.{it}_proj" for it in "qkv"]),
        (layer.feed_forward.inner.weight, Nvfp4Matrix, ["mlp.gate_proj", "mlp.up_proj"]),
    ):
        assert type(weight) is kind
        expected = [meant[f"model.layers.1.{name}.weight"] for name in names]
        assert torch.equal(weight.dequantised(), torch.cat(expected))
    del table["model.language_model.layers.*.self_attn*"]
    edit_config(tmp_path, quantization_config={**nvfp4.config, **settings})
    with pytest.raises(CheckpointError, match=r"q_proj quantised, but nothing in its"):
        load(tmp_path)


def load_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"ignore": ["model.layers.7.mlp", "*.vision*"]}, "ignore"),
        ({"ignore": ["lm_head", "model.layers.7.mlp"]}, "ignore"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.blocks.0.mlp": {"quant_algo": "NVFP4"}},
            },
            "quantized_layers",
        ),
    ],
)
def test_lists_that_name_nothing(settings: dict[str, Any], key: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, modelopt(**settings))
    with pytest.raises(CheckpointError, match=f"{key} of its quantization config names no module"):
        load(tmp_path)


@pytest.mark.parametrize(
    "style",
    [
        packed_nvfp4(ignore=["lm_head", "re:.*vision.*"]),
        quark(exclude=["lm_head", "re:.*vision.*"]),
    ],
    ids=["ignore", "exclude"],
)
def test_other_lists_that_name_nothing_are_warned_about(
    style: Format, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantized(tmp_path, style)
    load(tmp_path)
    assert "names no module of the checkpoint (such as 're:.*vision.*')" in caplog.text


@pytest.mark.parametrize("entries", [["lm_head"], ["lm_head", "*router*"], ["lm_head", "*mlp*"]])
@pytest.mark.parametrize("make", [modelopt, packed_nvfp4])
def test_lists_that_fit(
    make: Any, entries: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Patterns of ModelOpt's recipes name what a model may lack."""
    write_quantized(tmp_path, make(ignore=entries))
    load(tmp_path)
    assert ("names no module" in caplog.text) == (make is packed_nvfp4 and "*router*" in entries)


def test_lists_may_name_a_tower(tmp_path: Path) -> None:
    """The modules of a vision tower are not the language model's."""
    from safetensors.torch import save_file

    write_quantized(tmp_path, modelopt(ignore=["lm_head", "model.visual*"]))
    whole = {
        name.replace("model.", "model.language_model."): it
        for name, it in load_of(tmp_path).items()
    }
    save_file({**whole, "model.visual.patch.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    load(tmp_path)


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("model.layers.0.self_attn", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn", "model.layers.0.self_attn_norm", False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("layers.*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("model.language_model.layers.3*", "model.layers.3.mlp.gate", True),
        ("language_model.model.layers.3", "layers.3.mlp.gate", True),
        ("re:.*self_attn.*", "model.layers.3.self_attn.q_proj", True),
        ("re:layers.*q_proj$", "model.layers.3.self_attn.q_proj", True),
        ("re:.*k_proj$", "model.layers.3.self_attn.q_proj", False),
    ],
)
def test_entries_of_lists(entry: str, module: str, expected: bool) -> None:
    assert matches(entry, module) is expected


def test_global_scales_stay_those_of_their_matrices(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, modelopt())
    weight = load(tmp_path).layers[0].mixer.qkv.weight
    assert isinstance(weight, Nvfp4Matrix)
    assert len(weight.global_scales.unique()) == 3
    names = [f"model.layers.0.self_attn.{it}_proj.weight" for it in "qkv"]
    assert torch.equal(weight.dequantised(), torch.cat([meant[name] for name in names]))
    assert stacked([weight, weight]) is not None


def test_random_weights_follow_the_lists() -> None:
    gpt_oss = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    stored = read_quantization({"quantization_config": gpt_oss})
    assert stored is not None
    assert stored.rounding("model.layers.0.mlp.experts.0.up_proj") == ToMxfp4()
    assert stored.rounding("model.layers.0.self_attn.q_proj") is None
    assert stored.rounding("lm_head") is None
    stored = read_quantization({"quantization_config": modelopt(ignore=["*.mlp*"]).config})
    assert stored is not None
    assert stored.rounding("model.layers.0.mlp.up_proj") is None
    assert stored.rounding("model.layers.0.self_attn.q_proj") == ToNvfp4()


def of_modelopt(**changes: Any) -> dict[str, Any]:
    return {**modelopt().config, **changes}


def of_quark(*path: str, **changes: Any) -> dict[str, Any]:
    return changed(quark(), *path, **changes)


def changed(style: Format, *path: str, **changes: Any) -> dict[str, Any]:
    """A quantization_config in which keys of a nested object are changed."""
    config: dict[str, Any] = json.loads(json.dumps(style.config))
    inner = config
    for key in path:
        inner = inner[key]
    inner.update(changes)
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
GLOBAL = ("global_quant_config", "weight")
REFUSED: list[tuple[dict[str, Any], str]] = [
    (of_modelopt(quant_algo="NVFP4_AWQ"), 'quant_algo" is NVFP4_AWQ, .* use a checkpoint in NVFP4'),
    (of_modelopt(quant_algo="NVFP4_SVDQUANT"), 'quant_algo" is NVFP4_SVDQUANT, which is not'),
    (of_modelopt(quant_algo="W4A8_MXFP4_FP8"), 'quant_algo" is W4A8_MXFP4_FP8, which is not'),
    (of_modelopt(quant_algo="MXFP8"), 'quant_algo" is MXFP8, which is not supported'),
    (of_modelopt(quant_algo=None), 'quant_algo" is missing'),
    (of_modelopt(pre_quant_scale=True), 'pre_quant_scale" is true, but only false'),
    (of_modelopt(group_size=32), 'group_size" is 32, but only 16'),
    (changed(modelopt(), *WEIGHTS, group_size=24), 'weights.group_size" is 24, but only 16'),
    (
        changed(modelopt(), *WEIGHTS, num_bits=8),
        r'group_0\.weights\.num_bits" is 8, but "quant_algo" is NVFP4, which means 4; they contra',
    ),
    (
        changed(modelopt(), *WEIGHTS, type="int"),
        'weights.type" is \'int\', but "quant_algo" is NVF',
    ),
    (
        of_modelopt(quant_algo="FP8"),
        r'config_groups\.group_0\.weights\.num_bits" is 4, but "quant_algo" is FP8, which means 8',
    ),
    (
        of_modelopt(
            quant_algo="MIXED_PRECISION",
            quantized_layers={"model.a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            config_groups={"one": {"targets": ["b", "a"], "weights": {"num_bits": 4}}},
        ),
        r'config_groups\.one\.weights\.num_bits" is 4, but "quantized_layers" gives a FP8',
    ),
    (
        changed(modelopt(), *WEIGHTS, num_bits=[4, 3]),
        r'group_0\.weights\.num_bits" is 8, but "quant_algo" is NVFP4, which means 4; they contra',
    ),
    (
        of_modelopt(
            quant_algo="MIXED_PRECISION",
            quantized_layers={"model.a": {"quant_algo": "FP8"}},
            config_groups=[{"targets": "a", "weights": {"num_bits": [2, 1]}}],
        ),
        r'config_groups\.0\.weights\.num_bits" is 4, but "quantized_layers" gives a FP8',
    ),
    (changed(modelopt(), *WEIGHTS, num_bits=[5, 2]), r'num_bits" is \[5, 2\], but "quant_algo"'),
    (of_modelopt(ignore=[3]), 'ignore" must be names of modules'),
    (of_modelopt(ignore=["re:*"]), r"ignore\" holds 're:\*', which is no regular expression"),
    (of_modelopt(odd=1), 'odd" is unknown'),
    (of_modelopt(quant_algo="MIXED_PRECISION"), 'quantized_layers" is missing'),
    (of_modelopt(quant_algo="MIXED_PRECISION", quantized_layers={}), "names no module, which MIX"),
    (
        of_modelopt(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "INT4"}}),
        'quantized_layers.a.quant_algo" is INT4',
    ),
    (of_quark(*GLOBAL, dtype="int4"), 'dtype" is "int4", but only "fp4"'),
    (of_quark(*GLOBAL, group_size=16), 'weight.group_size" is 16, but only 32'),
    (of_quark(*GLOBAL, scale_format="e4m3"), 'scale_format" is "e4m3"'),
    (of_quark("global_quant_config", bias={"dtype": "fp4"}), 'bias" is quantised, which is not'),
    (of_quark(layer_quant_config={"*mlp*": {"weight": 1}}), 'layer_quant_config" has settings of'),
    (of_quark(odd=1), 'odd" is unknown'),
    ({"quant_method": "mxfp4", "odd": 1}, 'odd" is unknown'),
    ({"quant_method": "mxfp8"}, "quant_method\" is 'mxfp8'; supported are awq"),
    (changed(packed_nvfp4(), *WEIGHTS, group_size=32), 'group_size" must be 16, and strategy tens'),
    (changed(packed_mxfp4(), *WEIGHTS, group_size=24), 'group_size" must be 32, and strategy gro'),
    (changed(packed_nvfp4(), *WEIGHTS, num_bits=8), 'num_bits" is 8, which nvfp4-pack-quantized'),
    (changed(packed_mxfp4(), *WEIGHTS, type="int"), 'type" does not go with the format mxfp4-pack'),
]


@pytest.mark.parametrize(
    ("algorithm", "bits"), [("NVFP4", [2, 1]), ("NVFP4", 4), ("FP8", [4, 3]), ("FP8", 8)]
)
def test_bits_may_be_those_of_exponent_and_mantissa(algorithm: str, bits: object) -> None:
    """ModelOpt spells e2m1 and e4m3 so; groups may be a list, whose targets are one name."""
    table = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": algorithm}}}
    weights = {"num_bits": bits, "type": "float"}
    for settings, targets in (({"quant_algo": algorithm}, ["Linear"]), (table, "a")):
        group = {"targets": targets, "weights": weights}
        for groups in ([group], {"group_0": group}):
            config = of_modelopt(**settings, config_groups=groups)
            stored = read_quantization({"quantization_config": config})
            assert stored is not None
            assert [form.bits for form in stored.forms] == [8 if algorithm == "FP8" else 4]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quantization({"quantization_config": settings})


@pytest.mark.parametrize(
    ("style", "group"), [(modelopt(), 16), (packed_mxfp4(), 32), (quark(), 32)]
)
def test_columns_that_are_no_whole_groups(style: Format, group: int, tmp_path: Path) -> None:
    stored = read_quantization({"quantization_config": style.config})
    assert stored is not None
    module = StoredModule(
        "gate_proj", tmp_path, {}, lambda name, entry: None, StackAllocator(1, CPU)
    )
    with pytest.raises(
        CheckpointError, match=rf"has 40 columns in gate_proj, .* groups of {group}"
    ):
        stored.read(module, 8, 40)
