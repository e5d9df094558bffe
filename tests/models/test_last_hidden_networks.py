"""Medusa heads and MLPSpeculators against their oracles, in every format; and bad checkpoints."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import CheckpointError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.registry import kernels_for
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.loading import LoadOptions
from slipstream.speculative.catalogue import LANGUAGE_MODEL, recognise
from slipstream.speculative.medusa.checkpoint import MedusaCheckpoint, read_medusa_config
from slipstream.speculative.medusa.network import MedusaHeads, load_medusa
from slipstream.speculative.mlp_speculator.network import (
    MLPSpeculator,
    MLPSpeculatorCheckpoint,
    load_mlp_speculator,
    read_mlp_speculator_config,
)
from tests.last_hidden_checkpoints import (
    Guess,
    Tensors,
    converted,
    medusa_oracle,
    medusa_tensors,
    mlp_config,
    mlp_oracle,
    mlp_tensors,
    write_medusa,
    write_mlp,
)

CPU = torch.device("cpu")
WIDTH, VOCAB, INNER, HEADS = 24, 40, 20, 4
OPTIONS = LoadOptions(torch.float32, CPU, "auto", 64)
TARGET = SimpleNamespace(hidden_size=WIDTH, vocab_size=VOCAB)  # what is read of its config
ONE_LAYER = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}


def load_heads(path: str) -> MedusaHeads:
    checkpoint = MedusaCheckpoint(Path(path))
    return load_medusa(checkpoint, read_medusa_config(checkpoint), TARGET, OPTIONS)


def load_mlp(path: str) -> MLPSpeculator:
    checkpoint = MLPSpeculatorCheckpoint(Path(path))
    config = read_mlp_speculator_config(checkpoint)
    if problems := config.problems(TARGET):
        raise CheckpointError(problems[0])
    return load_mlp_speculator(checkpoint, config, TARGET, OPTIONS)


def chain(network: Any, hidden: Tensor, last: Tensor, count: int) -> Tensor:
    """Greedy logits [R, count, Vq] as the drafter asks for them."""
    state, rows = network.start(hidden, count), []
    for index in range(count):
        logits, state = network.logits(index, state, last)
        last = logits.argmax(-1)
        if network.vocabulary is not None:
            last = network.vocabulary[last]
        rows.append(logits)
    return torch.stack(rows, 1)


def assert_agree(network: Any, oracle: Guess, columns: Tensor | None = None) -> None:
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(5, WIDTH, generator=generator)
    last = torch.randint(0, VOCAB, (5,), generator=generator)
    for count in (1, HEADS):
        ours = chain(network, hidden, last, count)
        for row in range(5):
            theirs = torch.stack(oracle(hidden[row], int(last[row]), count))
            theirs = theirs if columns is None else theirs[:, columns]
            torch.testing.assert_close(ours[row], theirs, atol=1e-4, rtol=1e-4)


def heads(layers: int = 1) -> Tensors:
    return medusa_tensors(WIDTH, VOCAB, HEADS, layers)


# ---------------------------------------------------------------------- Medusa


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_original_heads(file: str, layers: int, tmp_path: Path) -> None:
    tensors = heads(layers)
    counts = {"medusa_num_heads": HEADS, "medusa_num_layers": layers}
    network = load_heads(write_medusa(tmp_path, tensors, file, **counts))
    assert len(network._heads) == HEADS
    assert_agree(network, medusa_oracle(tensors, layers))


def test_a_config_is_not_needed(tmp_path: Path) -> None:
    tensors = heads(2)
    path = write_medusa(tmp_path, tensors, "medusa_lm_head.pt")
    (tmp_path / "config.json").unlink()
    assert_agree(load_heads(path), medusa_oracle(tensors, 2))


def test_a_layer_that_is_repeated_may_be_stored_once(tmp_path: Path) -> None:
    tensors = heads(2)
    for head in range(HEADS):
        for kind in ("weight", "bias"):
            tensors[f"{head}.1.linear.{kind}"] = tensors[f"{head}.0.linear.{kind}"]
    oracle = medusa_oracle(tensors, 2)
    once = {name: value for name, value in tensors.items() if ".1.linear" not in name}
    assert_agree(load_heads(write_medusa(tmp_path, once, **ONE_LAYER)), oracle)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("bias", [True, False])
def test_converted_heads(file: str, bias: bool, tmp_path: Path) -> None:
    tensors = heads(2)
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 2}
    config |= {"hidden_size": 4096, "vocab_size": 32001, "medusa_fc_bias": bias}
    network = load_heads(write_medusa(tmp_path, converted(tensors, 2, bias), file, **config))
    if not bias:
        for name in tensors:
            if name.endswith("bias"):
                tensors[name] = torch.zeros(WIDTH)
    assert_agree(network, medusa_oracle(tensors, 2))


@pytest.mark.parametrize("whose", ["target", "one"])
def test_heads_that_share_an_lm_head(whose: str, tmp_path: Path) -> None:
    tensors = heads()
    rows = tensors["0.1.weight"]
    oracle = medusa_oracle(tensors | {f"{head}.1.weight": rows for head in range(HEADS)})
    kept = {name: value for name, value in tensors.items() if "linear" in name}
    if whose == "one":
        kept["lm_head.weight"] = rows
    network = load_heads(write_medusa(tmp_path, kept, **ONE_LAYER))
    shared = DenseMatrix(rows if whose == "target" else rows + 1)
    network.share(None, LanguageModelHead(kernels_for(CPU).network, shared))
    assert_agree(network, oracle)


@pytest.mark.parametrize("rows", ["all", "mapped"])
@pytest.mark.parametrize("rising", [True, False])
def test_a_reduced_vocabulary_stays_reduced(rows: str, rising: bool, tmp_path: Path) -> None:
    tensors = heads()
    ids = torch.tensor([3, 4, 9, 17, 30, 31])
    order = ids if rising else ids[torch.tensor([2, 0, 5, 1, 3, 4])]
    stored = converted(tensors) | {"token_map": order}
    if rows == "mapped":
        for name in stored:
            if "lm_heads" in name:
                stored[name] = stored[name][order]
    network = load_heads(write_medusa(tmp_path, stored, "pytorch_model.bin", **ONE_LAYER))
    assert network.vocabulary is not None
    assert network.vocabulary.tolist() == ids.tolist()
    assert network.num_legal_tokens == 6
    assert_agree(network, medusa_oracle(tensors), ids)


def test_a_truncated_vocabulary_is_its_first_tokens(tmp_path: Path) -> None:
    tensors = heads()
    stored = converted(tensors)
    stored = {n: value[:30] if "lm_heads" in n else value for n, value in stored.items()}
    path = write_medusa(tmp_path, stored, **ONE_LAYER, truncated_vocab_size=30)
    assert load_heads(path).num_legal_tokens == 30
    assert_agree(load_heads(path), medusa_oracle(tensors), torch.arange(30))
    write_medusa(tmp_path, stored, **ONE_LAYER)
    with pytest.raises(CheckpointError, match="guess among 30 tokens and the target has 40"):
        load_heads(path)


def test_one_pass_over_rows_equals_single_rows(tmp_path: Path) -> None:
    path = write_mlp(tmp_path / "m", mlp_tensors(WIDTH, VOCAB, INNER, HEADS), mlp())
    for network in (load_heads(write_medusa(tmp_path, heads(2), **ONE_LAYER)), load_mlp(path)):
        hidden, last = torch.randn(6, WIDTH), torch.arange(6)
        together = chain(network, hidden, last, HEADS)
        for row in range(6):
            part = slice(row, row + 1)
            alone = chain(network, hidden[part], last[part], HEADS)
            torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_random_weights_and_rounded_ones_run(quantization: str | None, tmp_path: Path) -> None:
    path = write_medusa(tmp_path, heads(2), medusa_num_heads=3, medusa_num_layers=2)
    for load_format in ("dummy", "auto"):
        options = LoadOptions(torch.bfloat16, CPU, load_format, 64, quantization=quantization)
        checkpoint = MedusaCheckpoint(Path(path))
        network = load_medusa(checkpoint, read_medusa_config(checkpoint), TARGET, options)
        logits = chain(network, torch.randn(2, WIDTH).bfloat16(), torch.zeros(2).long(), 3)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()


# ---------------------------------------------------------------------- MLPSpeculator


def mlp(**changes: Any) -> dict[str, Any]:
    return {**mlp_config(WIDTH, VOCAB, INNER, HEADS), **changes}


FLAGS: list[dict[str, Any]] = [
    {},
    {"scale_input": True},
    {"tie_weights": True},
    {"scale_input": True, "tie_weights": True},
]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_mlp_speculator(file: str, flags: dict[str, Any], tmp_path: Path) -> None:
    config = mlp(**flags)
    tensors = mlp_tensors(WIDTH, VOCAB, INNER, HEADS, tied=config["tie_weights"])
    assert_agree(load_mlp(write_mlp(tmp_path, tensors, config, file)), mlp_oracle(tensors, config))


def test_an_inner_width_of_zero_is_the_targets(tmp_path: Path) -> None:
    config = mlp(inner_dim=0)
    tensors = mlp_tensors(WIDTH, VOCAB, WIDTH, HEADS)
    assert_agree(load_mlp(write_mlp(tmp_path, tensors, config)), mlp_oracle(tensors, config))


def test_tied_weights_may_be_stored_again_but_not_differ(tmp_path: Path) -> None:
    config = mlp(tie_weights=True)
    tied = mlp_tensors(WIDTH, VOCAB, INNER, HEADS, tied=True)
    whole = dict(tied)
    for step in range(1, HEADS):
        for kind in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            whole["speculator." + kind.format(step)] = tied["speculator." + kind.format(0)].clone()
        whole[f"speculator.proj.{step}.weight"] = tied["speculator.proj.1.weight"].clone()
    path = write_mlp(tmp_path, whole, config)
    assert_agree(load_mlp(path), mlp_oracle(tied, config))
    whole["speculator.head.2.weight"][3, 4] += 1
    write_mlp(tmp_path, whole, config)
    with pytest.raises(CheckpointError, match=r"head\.2\.weight and head\.0\.weight differ"):
        load_mlp(path)


def test_every_flag_changes_the_logits(tmp_path: Path) -> None:
    tensors = mlp_tensors(WIDTH, VOCAB, INNER, HEADS)
    tied = {name: value for name, value in tensors.items() if name.split(".")[2] == "0"}
    tied["speculator.proj.1.weight"] = tensors["speculator.proj.1.weight"]
    hidden, last = 3 * torch.randn(2, WIDTH), torch.tensor([1, 2])
    found = []
    for index, flags in enumerate(FLAGS):
        used = tied if "tie_weights" in flags else tensors
        network = load_mlp(write_mlp(tmp_path / str(index), used, mlp(**flags)))
        found.append(chain(network, hidden, last, HEADS))
    for index, logits in enumerate(found):
        assert all((logits - other).abs().max() > 1e-2 for other in found[:index])


# ---------------------------------------------------------------------- bad checkpoints


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


BAD_HEADS: list[tuple[Any, dict[str, Any], str]] = [
    (lambda t: medusa_tensors(16, VOCAB, HEADS), {}, "hidden states of 16 numbers .* have 24"),
    (lambda t: medusa_tensors(WIDTH, 50, HEADS), {}, "among 50 tokens and the target has 40"),
    (lambda t: without(t, "1.0.linear.weight"), {}, r"no tensor blocks\.1\.layers\.0\.weight"),
    (lambda t: without(t, "2.1.weight"), {}, r"no tensor lm_heads\.2\.weight"),
    (lambda t: t | {"fc.weight": torch.ones(2)}, {}, r"does not use \(fc\.weight\)"),
    (lambda t: {"fc.weight": torch.ones(2)}, {}, "holds no Medusa heads"),
    (lambda t: t, {"medusa_num_heads": 5}, "holds 4 Medusa heads, but its config.json states 5"),
    (lambda t: t, {"medusa_num_heads": 0}, "must be above 0"),
    (lambda t: t, {"medusa_activation": "relu"}, '"medusa_activation" is unknown'),
    (lambda t: t | {"token_map": torch.tensor([1, 40])}, {}, "below the target's 40"),
    (lambda t: t | {"token_map": torch.tensor([1, 1])}, {}, "different token ids"),
    (lambda t: t | {"token_map": torch.ones(3)}, {}, "must be a list of integers"),
    (lambda t: t | {"0.0.linear.bias": torch.ones(3)}, {}, r"has shape \[3\]"),
]


@pytest.mark.parametrize(
    ("change", "config", "message"), BAD_HEADS, ids=[it[2] for it in BAD_HEADS]
)
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_bad_heads(
    change: Any, config: dict[str, Any], message: str, file: str, tmp_path: Path
) -> None:
    path = write_medusa(tmp_path, change(heads()), file, **{**ONE_LAYER, **config})
    with pytest.raises(CheckpointError, match=message):
        load_heads(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a file of tensors alone"),
        (b"no pickle at all", "cannot be read as a file of tensors alone"),
        ([1, 2], "holds a list, not tensors by name"),
        ({"0.0.linear.weight": 3}, "is a int and no tensor"),
    ],
)
def test_bad_pickles(content: Any, message: str, tmp_path: Path) -> None:
    path = write_medusa(tmp_path, {}, "medusa_lm_head.pt")
    file = tmp_path / "medusa_lm_head.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=message):
        load_heads(path)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    path = write_medusa(tmp_path, {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="cannot be read as a file of tensors alone"):
        load_heads(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"emb_dim": 16}, "hidden states of 16 numbers .* have 24"),
        ({"vocab_size": 41}, "vocabulary of 41 tokens and the target has 40"),
        ({"n_predict": 5}, r"no tensor proj\.4\.weight"),
        ({"n_predict": 3}, r"does not use \(speculator\.emb\.3\.weight, "),
        ({"n_predict": 0}, '"n_predict" must be above 0'),
        ({"inner_dim": 19}, "has shape"),
        ({"scale_input": 1}, "must be true or false"),
        ({"activation": "relu"}, '"activation" is unknown'),
        ({"emb_dim": None}, '"emb_dim" is missing'),
    ],
    ids=str,
)
def test_bad_speculators(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_mlp(tmp_path, mlp_tensors(WIDTH, VOCAB, INNER, HEADS), mlp(**changes))
    with pytest.raises(CheckpointError, match=message):
        load_mlp(path)


# ---------------------------------------------------------------------- recognition


def test_the_kinds_are_recognised(tmp_path: Path, tiny_target: str) -> None:
    plain = json.loads((Path(tiny_target) / "config.json").read_text())
    for config, names in (
        ({"model_type": "medusa"}, []),
        ({"medusa_num_heads": 3, "model_type": "llama"}, []),
        ({"architectures": ["MedusaModel"]}, []),
        ({}, ["0.0.linear.weight", "0.1.weight"]),
        ({}, ["medusa_heads.blocks.0.layers.0.weight"]),
    ):
        assert recognise(config, names) == "medusa"
    assert recognise(mlp(), mlp_tensors(WIDTH, VOCAB, INNER)) == "mlp_speculator"
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    assert recognise(plain, names) == LANGUAGE_MODEL
