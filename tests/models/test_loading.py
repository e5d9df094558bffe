"""Weights come into memory whole, in their places, and from nowhere else."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.core.errors import CheckpointError, UsageError
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.registry import Kernels, kernels_for
from slipstream.layers.parameters import Part
from slipstream.models import loading, parameter_sources, safetensors_file
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, dtype_named, load_decoder
from slipstream.models.parameter_sources import CheckpointSource, DummySource, Progress
from slipstream.models.safetensors_file import TensorEntry
from tests.checkpoints import QWEN3, VOCAB_SIZE, write_qwen3

pytestmark = pytest.mark.usefixtures("plain_torch")

CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
LAYER = "model.layers.0."
ATTENTION = LAYER + "self_attn."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_qwen3(tmp_path / "model")


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    chosen = {"load_format": "auto", "max_positions": 64, **options}
    return load_decoder(Checkpoint(folder), LoadOptions(dtype, CPU, **chosen))


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def parameters(network: Decoder) -> dict[str, Tensor]:
    """Every parameter of a network, by a name of this test's own."""
    found = {"norm": network.norm.weight}
    weights = {"embedding": network.embedding.weight, "head": network.head.weight}
    for index, layer in enumerate(network.layers):
        attention, mlp = layer.mixer, layer.feed_forward
        found |= {
            f"{index}.input_norm": attention.norm.weight,
            f"{index}.mlp_norm": mlp.norm.weight,
        }
        weights |= {
            f"{index}.qkv": attention.qkv.weight,
            f"{index}.output": attention.output.weight,
            f"{index}.gate_up": mlp.inner.weight,
            f"{index}.down": mlp.down.weight,
        }
    return found | {name: floats(weight) for name, weight in weights.items()}


def floats(weight: Weight) -> Tensor:
    assert weight.floats is not None
    return weight.floats


# What does not fit is refused


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBEDDING, "[96, 48]"),
        (QUERY, "[96, 48]"),
        (ATTENTION + "v_proj.weight", "[32, 48]"),
        (ATTENTION + "k_norm.weight", "[16]"),
        (LAYER + "mlp.down_proj.weight", "[48, 80]"),
        ("model.norm.weight", "[48]"),
    ],
)
def test_a_missing_tensor_is_named_with_its_shape(folder: Path, name: str, shape: str) -> None:
    tensors = stored(folder)
    del tensors[name]
    store(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"{folder} has no tensor {name}," in str(caught.value)
    assert shape in str(caught.value)


def test_tensors_of_multimodal_models_are_named_as_they_are_stored(folder: Path) -> None:
    whole = {
        name.replace("model.", "model.language_model."): it for name, it in stored(folder).items()
    }
    name = QUERY.replace("model.", "model.language_model.")
    left = {other: it for other, it in whole.items() if other != name}
    for tensors, message in (
        (left, f"has no tensor {name}, which"),
        ({**whole, name: torch.zeros(3)}, f"tensor {name} in {folder} has shape"),
        ({**whole, f"{name}s": torch.zeros(3)}, rf"does not use \({name}s\)"),
    ):
        store(folder, tensors)
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_an_untied_head_must_be_there(folder: Path) -> None:
    configure(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight.*\[96, 48\]"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape", "asked"),
    [
        (EMBEDDING, (VOCAB_SIZE + 1, 48), [VOCAB_SIZE, 48]),
        (QUERY, (96, 47), [96, 48]),
        (ATTENTION + "k_proj.weight", (48, 32), [32, 48]),  # transposed
        (ATTENTION + "q_norm.weight", (16, 1), [16]),
        ("model.norm.weight", (), [48]),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both(
    folder: Path, name: str, shape: tuple[int, ...], asked: list[int]
) -> None:
    store(folder, {**stored(folder), name: torch.zeros(shape)})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"tensor {name} in {folder} has shape {list(shape)}," in str(caught.value)
    assert str(asked) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        ATTENTION + "q_proj.bias",
        LAYER + "self_attn.sinks",
        "model.layers.2.mlp.up_proj.weight",  # of a layer that config.json does not count
        "lm_head.bias",
        "score.weight",
    ],
)
def test_a_surplus_tensor_is_refused_by_name(folder: Path, name: str) -> None:
    store(folder, {**stored(folder), name: torch.zeros(4)})
    with pytest.raises(CheckpointError, match="does not use") as caught:
        load(folder)
    assert f"({name});" in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [
        ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
        ["model.mtp_layers.0.input_proj.weight"],
        ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"],
    ],
)
def test_what_only_a_drafter_reads_is_left_where_it_is(names: list[str], folder: Path) -> None:
    alone = parameters(load(folder))
    store(folder, {**stored(folder), **{name: torch.ones(4) for name in names}})
    totals: list[int] = []

    @contextmanager
    def bar(name: str, size: int, unit: str) -> Iterator[Progress]:
        totals.append(size)
        yield lambda done: totals.append(-done)

    found = parameters(load(folder, progress_bar=bar))
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
    assert sum(totals) == 0  # the bar ends where the reading ends


def test_of_many_surplus_tensors_some_are_named(folder: Path) -> None:
    configure(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"layers\.1\..*, .*layers\.1\..* and 8 more\)"):
        load(folder)


def test_unknown_names_of_layers_are_not_told_as_no_layers(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): it for name, it in weights.items()}
    save_file(bare, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight, which .* \.\.\.\)$"):
        load(folder)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            4,
            r"has no tensor model\.layers\.2\.input_layernorm\.weight, .* shape \[48\]; 21 more "
            r"are missing \(model\.layers\.2\..*, model\.layers\.2\..*, \.\.\.\): it has tensors "
            "of 2 layers, where num_hidden_layers asks for 4$",
        ),
        (1, r"does not use \(model\.layers\.1\..*: it has tensors of 2 layers, where .* for 1$"),
    ],
)
def test_wrong_numbers_of_layers_are_found_in_the_headers(
    layers: int, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading a number."""
    configure(folder, num_hidden_layers=layers)
    monkeypatch.setattr(parameter_sources, "read_into", None)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [ATTENTION + "rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "lm_head.weight"],
)
def test_what_follows_from_the_rest_may_be_there(folder: Path, name: str) -> None:
    tensors = stored(folder)
    copy, other = tensors[EMBEDDING].clone(), torch.full((3, 2), 7.0)
    store(folder, {**tensors, name: copy if name == "lm_head.weight" else other})
    network = load(folder)
    assert network.head.weight is network.embedding.weight


@pytest.mark.parametrize("changed_row", [0, VOCAB_SIZE - 1])
def test_a_stored_head_counts_where_it_is_no_copy(folder: Path, changed_row: int) -> None:
    """Though config.json says that both are tied; transformers reads such files so."""
    tensors = stored(folder)
    head = tensors[EMBEDDING].clone()
    head[changed_row] += 0.5
    store(folder, {**tensors, "lm_head.weight": head})
    assert torch.equal(floats(load(folder).head.weight), head)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.get_output_embeddings().weight, head)
    store(folder, {**tensors, "lm_head.weight": torch.full((3, 2), 7.0)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* has shape \[3, 2\]"):
        load(folder)


def test_a_head_of_its_own_is_used_when_untied(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "untied", tie_word_embeddings=False)
    network = load(folder)
    torch.testing.assert_close(floats(network.head.weight), stored(folder)["lm_head.weight"])
    assert not torch.equal(floats(network.head.weight), floats(network.embedding.weight))


def test_quantised_weights_are_refused(folder: Path) -> None:
    tensors = stored(folder)
    store(folder, {**tensors, QUERY: tensors[QUERY].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*stored as int8"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [EMBEDDING, QUERY, LAYER + "input_layernorm.weight"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
def test_numbers_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, kept: str, name: str, value: float
) -> None:
    folder = write_qwen3(tmp_path / "model", torch_dtype=kept)
    tensors = stored(folder)
    tensors[name].view(-1)[-3] = value
    store(folder, tensors)
    for wanted in (torch.float32, tensors[name].dtype):
        with pytest.raises(CheckpointError, match=f"tensor {name} in .*model.* holds NaN"):
            load(folder, wanted)


def test_numbers_too_large_for_the_dtype_are_refused(folder: Path) -> None:
    tensors = stored(folder)
    tensors[QUERY][5, 7] = 1e5
    store(folder, tensors)
    load(folder, torch.float32)
    with pytest.raises(CheckpointError, match=f"tensor {QUERY} .* too large for float16; load it"):
        load(folder, torch.float16)


@pytest.mark.parametrize("name", [EMBEDDING, LAYER + "mlp.down_proj.weight"])
def test_numbers_so_large_that_norms_give_zeros_are_refused(name: str, folder: Path) -> None:
    """Every token would be equally probable, and a greedy text token 0 again and again."""
    tensors = stored(folder)
    tensors[name] = tensors[name] * 1e30
    store(folder, tensors)
    for wanted in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=f"tensor {name} in .* holds numbers above 1e"):
            load(folder, wanted)


@pytest.mark.parametrize(
    ("kept", "value"), [(torch.float32, 1e17), (torch.float16, torch.finfo(torch.float16).max)]
)
def test_large_numbers_whose_sum_is_too_large_are_read(
    tmp_path: Path, kept: torch.dtype, value: float
) -> None:
    name = str(kept).removeprefix("torch.")
    folder = write_qwen3(tmp_path / "model", torch_dtype=name)
    tensors = stored(folder)
    tensors[QUERY].fill_(value)
    store(folder, tensors)
    load(folder, kept)


# What fits is put in its place


def test_parts_are_stacked_in_their_order(folder: Path) -> None:
    network, tensors = load(folder), stored(folder)
    for index, layer in enumerate(network.layers):
        name = f"model.layers.{index}."
        query, key, value = (tensors[f"{name}self_attn.{p}_proj.weight"] for p in "qkv")
        qkv = floats(layer.mixer.qkv.weight)
        assert qkv.shape == (96 + 32 + 32, 48)
        assert torch.equal(qkv[:96], query)
        assert torch.equal(qkv[96:128], key)
        assert torch.equal(qkv[128:], value)
        gate_up = floats(layer.feed_forward.inner.weight)
        down = floats(layer.feed_forward.down.weight)
        assert torch.equal(gate_up[:80], tensors[name + "mlp.gate_proj.weight"])
        assert torch.equal(gate_up[80:], tensors[name + "mlp.up_proj.weight"])
        assert torch.equal(down, tensors[name + "mlp.down_proj.weight"])


def test_biases_are_stacked_as_their_weights_are(folder: Path) -> None:
    tensors = stored(folder)
    biases = {
        f"model.layers.{index}.self_attn.{part}_proj.bias": torch.randn(size)
        for index in range(2)
        for part, size in (("q", 96), ("k", 32), ("v", 32), ("o", 48))
    }
    store(folder, {**tensors, **biases})
    configure(folder, attention_bias=True)
    for index, layer in enumerate(load(folder).layers):
        own = [biases[f"model.layers.{index}.self_attn.{part}_proj.bias"] for part in "qkvo"]
        assert layer.mixer.qkv.bias is not None
        assert layer.mixer.output.bias is not None
        assert torch.equal(layer.mixer.qkv.bias, torch.cat(own[:3]))
        assert torch.equal(layer.mixer.output.bias, own[3])


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
def test_numbers_are_converted_to_the_dtype_that_was_asked_for(
    tmp_path: Path, kept: str, wanted: torch.dtype
) -> None:
    folder = write_qwen3(tmp_path / kept, torch_dtype=kept)
    network, tensors = load(folder, wanted), stored(folder)
    assert {parameter.dtype for parameter in parameters(network).values()} == {wanted}
    assert torch.equal(floats(network.embedding.weight), tensors[EMBEDDING].to(wanted))
    qkv = floats(network.layers[1].mixer.qkv.weight)
    assert torch.equal(qkv[:96], tensors[QUERY].to(wanted))


def test_the_same_numbers_come_through_a_buffer_of_any_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = parameters(load(folder, torch.bfloat16))
    monkeypatch.setattr(safetensors_file, "_SLICE_BYTES", 4 * 37)
    for name, parameter in parameters(load(folder, torch.bfloat16)).items():
        assert torch.equal(parameter, expected[name]), name


def test_files_are_read_straight_into_the_parameters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is in memory twice while a model loads."""
    read: dict[int, int] = {}  # address of a destination's storage -> bytes read into it

    def spy(entry: TensorEntry, destination: Tensor) -> None:
        storage = destination.untyped_storage().data_ptr()
        read[storage] = read.get(storage, 0) + entry.nbytes
        safetensors_file.read_into(entry, destination)

    monkeypatch.setattr(parameter_sources, "read_into", spy)
    network = load(folder)
    for name, parameter in parameters(network).items():
        assert read.get(parameter.data_ptr()) == parameter.nbytes, name
    assert sum(read.values()) == Checkpoint(folder).size_bytes


def test_the_progress_bar_is_told_of_every_byte(folder: Path) -> None:
    told: list[int] = []
    opened: list[tuple[str, int]] = []

    @contextmanager
    def progress_bar(name: str, size: int, unit: str) -> Iterator[Progress]:
        opened.append((name, size))
        yield told.append

    load(folder, progress_bar=progress_bar)
    assert opened == [("loading model", Checkpoint(folder).size_bytes)]
    assert sum(told) == opened[0][1]
    assert len(told) == len(stored(folder))


def test_a_part_can_be_asked_for_alone(folder: Path) -> None:
    """Drafters do so, whose layers have other names."""
    source = CheckpointSource(Checkpoint(folder), torch.float32, CPU)
    tensors = stored(folder)
    parts = [Part(LAYER + "mlp_norm", 1)]
    with pytest.raises(CheckpointError, match=r"mlp_norm.*\[1\]"):
        source.vector(parts)
    norms = [LAYER + "input_layernorm.weight", "model.norm.weight"]
    vector = source.vector([Part(name, 48) for name in norms])
    assert torch.equal(vector, torch.cat([tensors[name] for name in norms]))
    source.finish(ignored=sorted(set(tensors) - set(norms)))
    with pytest.raises(CheckpointError, match=f"and {len(tensors) - len(norms) - 3} more"):
        source.finish()


def test_the_column_of_kernels_is_that_of_the_device_and_the_promise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.device, torch.dtype, bool]] = []

    def spy(device: torch.device, dtype: torch.dtype, batch_invariant: bool) -> Kernels:
        asked.append((device, dtype, batch_invariant))
        return kernels_for(device, dtype, batch_invariant)

    monkeypatch.setattr(loading, "kernels_for", spy)
    load(folder)
    load(folder, batch_invariant=True)
    assert asked == [(CPU, torch.float32, False), (CPU, torch.float32, True)]


# Without weights


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "attention_bias": True}))
    return tmp_path


def test_dummy_weights_need_a_config_alone(config_only: Path) -> None:
    network = load(config_only, load_format="dummy")
    assert network.layers[0].mixer.qkv.weight.shape == (160, 48)
    for name, parameter in parameters(network).items():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            assert 0.015 < parameter.std() < 0.025, name
    bias = network.layers[0].mixer.qkv.bias
    assert bias is not None
    assert not bias.any()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(config_only)


def test_dummy_weights_follow_from_their_seed(config_only: Path) -> None:
    first, same, other = (
        parameters(load(config_only, load_format="dummy", seed=seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(same[name], parameter) for name, parameter in first.items())
    assert not any(
        torch.equal(other[name], parameter)
        for name, parameter in first.items()
        if "norm" not in name
    )
    assert not torch.equal(first["0.qkv"], first["1.qkv"])


def test_an_engine_runs_on_dummy_weights(config_only: Path) -> None:
    llm = LLM(
        str(config_only),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        kv_cache_memory=1 << 20,
    )
    assert llm.engine.resolved.dtype == torch.bfloat16
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize("names", [["a.norm.weight"], ["a.bias", "b.bias"]], ids=str)
def test_dummy_vectors(names: Sequence[str]) -> None:
    source = DummySource(torch.float32, CPU)
    vector = source.vector([Part(name, 3) for name in names])
    expected = 1.0 if names[0].endswith("norm.weight") else 0.0
    assert vector.tolist() == [expected] * 3 * len(names)


# Names of dtypes


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("half", torch.float16),
        ("fp16", torch.float16),
        ("float32", torch.float32),
        ("fp32", torch.float32),
    ],
)
def test_names_of_dtypes(name: str, dtype: torch.dtype) -> None:
    assert dtype_named(name) == dtype


def test_an_unknown_dtype() -> None:
    with pytest.raises(UsageError, match="bfloat16, float16, float32, not 'int4'"):
        dtype_named("int4")
