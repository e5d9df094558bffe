"""`slipstream inspect`."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.geometries import write_config
from slipstream.cli import inspect
from slipstream.cli.open_llm import open_llm
from slipstream.core.config import EngineConfig
from tests.checkpoints import write_qwen3
from tests.cli.conftest import CommandLine
from tests.drafters.assistants import write_assistant, write_sliding_target
from tests.drafters.blocks import as_wrapped_dflash, write_dflash
from tests.drafters.heads import (
    as_pickle,
    as_wrapper,
    write_eagle1,
    write_eagle3,
    write_p_eagle,
)
from tests.drafters.mtp_heads import add_mtp, write_mtp
from tests.hybrid_checkpoints import write_hybrid
from tests.last_hidden_checkpoints import medusa_for, medusa_tensors, mlp_for, write_medusa
from tests.mixture_checkpoints import write_mixture
from tests.quantized_checkpoints import edit_config, gptq, write_quantized


def test_facts_of_a_checkpoint(slipstream: CommandLine, tiny_target: str) -> None:
    ran = slipstream("inspect", tiny_target, "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    layer = 2 * 48 + 2 * 16 + 48 * (96 + 32 + 32 + 96) + 3 * 48 * 80
    assert document == {
        "path": tiny_target,
        "architecture": "Qwen3ForCausalLM",
        "kind": "language_model",
        "features": None,
        "num_speculative_tokens": None,
        "target": None,
        "target_adapter": None,
        "trained_tokens": None,
        "own_drafter": None,
        "num_parameters": 96 * 48 + 48 + 2 * layer,
        "num_bytes": 4 * (96 * 48 + 48 + 2 * layer),
        "quantization": None,
        "types": [],
        "dtype": "float32",
        "dtype_note": None,
        "num_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "latent_size": None,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "experts": None,
        "eos_token_ids": [0],
        "has_chat_template": False,
        "kv_bytes_per_token": 2 * 2 * 2 * 16 * 4,
        "kv_bytes_per_block": 16 * 2 * 2 * 2 * 16 * 4,
        "kv_bytes_in_windows": 0,
        "window": None,
        "state_bytes_per_request": 0,
        "state_bytes_per_draft_token": 0,
        "kernels": document["kernels"],
        "problem": None,
    }
    words = slipstream("inspect", tiny_target).out
    for part in ("Qwen3ForCausalLM", "512 bytes per token", "8.00 KiB per block of 16", "tied"):
        assert part in words


def test_tensors_that_do_not_fit_are_told_from_their_headers(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    folder = write_qwen3(tmp_path / "model")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    for changes, problem in (
        (
            {"num_hidden_layers": 3},
            "has no tensor model.layers.2.input_layernorm.weight, which its",
        ),
        (
            {"num_hidden_layers": 1},
            "it has tensors of 2 layers, where num_hidden_layers asks for 1",
        ),
        ({"intermediate_size": 81}, "has shape [80, 48], but its config.json asks for [81, 48]"),
    ):
        file.write_text(json.dumps({**content, **changes}))
        ran = slipstream("inspect", str(folder), "--json")
        assert ran.code == 1
        assert problem in json.loads(ran.out)["problem"]
        shown = slipstream("inspect", str(folder))
        assert shown.code == 1
        (line,) = [line for line in shown.out.splitlines() if line.startswith("does not load")]
        assert problem in line


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_weights_that_are_not_read_are_told(
    name: str, slipstream: CommandLine, tmp_path: Path
) -> None:
    folder = write_qwen3(tmp_path / "model")
    if name.endswith(".bin"):
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        (folder / "model.safetensors").unlink()
    else:
        (folder / "model.safetensors").rename(folder / name)
    ran = slipstream("inspect", str(folder), "--json")
    assert ran.code == 1
    assert "has neither model.safetensors nor" in json.loads(ran.out)["problem"]
    (folder / name).unlink()  # a config alone is none that is broken
    assert slipstream("inspect", str(folder)).code == 0


@pytest.mark.parametrize("broken", ["draft", "target"])
def test_tensors_that_do_not_load_fit_no_target(
    broken: str, slipstream: CommandLine, tmp_path: Path
) -> None:
    target = str(write_qwen3(tmp_path / "target"))
    draft = str(write_qwen3(tmp_path / "draft", keep_layers=1))
    assert slipstream("inspect", draft, "--target", target, "--json").code == 0
    file = tmp_path / broken / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 81}))
    ran = slipstream("inspect", draft, "--target", target, "--json")
    fit = json.loads(ran.out)["drafter"]
    assert (ran.code, fit["fits"]) == (1, False)
    assert f"{tmp_path / broken} has shape [80, 48]" in fit["problems"][0]


def test_experts_in_a_format_that_nothing_is_rounded_to(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    folder = write_mixture(tmp_path, "qwen3_moe")
    edit_config(folder, quantization_config=gptq().config)
    for name in ("model.safetensors", "generation_config.json"):
        (folder / name).unlink()
    ran = slipstream("inspect", str(folder), "--json")
    assert ran.code == 0
    found = json.loads(ran.out)["experts"]["touched"]
    assert [(it["rows"], it["num_bytes"]) for it in found] == [(1, None), (5, None), (32, None)]
    shown = slipstream("inspect", str(folder)).out
    assert any(re.match(r"read for 1 row +2 experts of a layer", it) for it in shown.splitlines())


def test_layers_with_a_window_keep_less(slipstream: CommandLine, tmp_path: Path) -> None:
    target = write_sliding_target(tmp_path / "target")
    document = json.loads(slipstream("inspect", target, "--json").out)
    assert document["kv_bytes_per_token"] == 3 * 256
    assert (document["kv_bytes_in_windows"], document["window"]) == (2 * 256, 9)
    words = " ".join(slipstream("inspect", target).out.split())
    assert "512 bytes per token are kept for the last 9 tokens only" in words


def test_layers_with_states_keep_the_same_of_any_request(
    slipstream: CommandLine, tmp_path: Path
) -> None:
    target = write_hybrid(tmp_path / "target", "qwen3_5_text")
    document = json.loads(slipstream("inspect", target, "--json").out)
    channels = 2 * 2 * 16 + 4 * 8
    assert document["state_bytes_per_request"] == 3 * 4 * (4 * 16 * 8 + 3 * channels)
    assert document["state_bytes_per_draft_token"] == 3 * 4 * (channels + 2 * 4)
    words = " ".join(slipstream("inspect", target).out.split())
    assert "recurrent states 9.38 KiB per request and per checkpoint of a prefix, 1.22 KiB" in words


def test_latent_attention(slipstream: CommandLine, tmp_path: Path) -> None:
    target = str(write_mixture(tmp_path / "target", "glm4_moe_lite"))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    document = json.loads(slipstream("inspect", target, "--json").out)
    size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert (document["latent_size"], document["num_kv_heads"]) == (size, None)
    assert document["head_dim"] == config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    assert document["kv_bytes_per_token"] == 4 * size * config["num_hidden_layers"]
    assert f"share a latent row of {size} numbers a token" in slipstream("inspect", target).out


def test_a_model_with_states_is_no_drafter(slipstream: CommandLine, tmp_path: Path) -> None:
    target = write_hybrid(tmp_path / "target", "qwen3_5_text")
    ran = slipstream("inspect", target, "--target", target)
    assert ran.code == 1
    assert "layers keep a state of each request are not supported" in ran.out


def test_a_mixture_of_experts(slipstream: CommandLine, tmp_path: Path) -> None:
    folder = str(write_config(tmp_path, "gpt-oss-20b"))
    experts = json.loads(slipstream("inspect", folder, "--json").out)["experts"]
    assert (experts["num_experts"], experts["num_experts_per_token"]) == (32, 4)
    assert (experts["expert_size"], experts["shared_expert_size"]) == (2880, None)
    assert experts["num_active_parameters"] == pytest.approx(3.6e9, rel=0.01)
    found = [(one["rows"], one["experts"]) for one in experts["touched"]]
    assert found == [(1, 4.0), (5, 15.6), (32, 31.6)]
    # Attention 1.27 GB and head 1.16 GB in bf16, and an expert 13.2 MB a layer in MXFP4.
    sizes = [one["num_bytes"] for one in experts["touched"]]
    for size, (_, touched) in zip(sizes, found, strict=True):
        assert size == pytest.approx(2.43e9 + 24 * touched * 13.22e6, rel=0.01)
    lines = slipstream("inspect", folder).out
    assert "32 of width 2880 a layer, 4 for a token" in lines
    assert "read for 32 rows" in lines
    assert "\nactive           3.6" in lines


def test_a_quantised_checkpoint(slipstream: CommandLine, tmp_path: Path) -> None:
    write_quantized(tmp_path, gptq(group=32))
    ran = slipstream("inspect", str(tmp_path), "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["quantization"] == "gptq, 4 bits, groups of 32"
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256
    assert document["num_parameters"] == 2 * 96 * 128 + 2 * layer
    assert document["num_bytes"] < 2 * document["num_parameters"]
    assert "gptq, 4 bits, groups of 32" in slipstream("inspect", str(tmp_path)).out


def test_a_config_without_weights_can_be_inspected(slipstream: CommandLine, tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert json.loads(slipstream("inspect", str(folder), "--json").out)["num_parameters"] is None
    assert "no weights" in slipstream("inspect", str(folder)).out


def test_a_method_without_a_checkpoint_cannot_be_inspected(slipstream: CommandLine) -> None:
    ran = slipstream("inspect", "ngram")
    assert ran.code == 2
    assert "ngram is a drafting method without a checkpoint" in ran.err


def test_the_bundled_draft_fits_the_demo(slipstream: CommandLine) -> None:
    ran = slipstream("inspect", "demo/draft", "--target", "demo", "--json")
    assert ran.code == 0
    fit = json.loads(ran.out)["drafter"]
    assert fit["fits"] is True
    assert fit["target"] == "demo"
    assert 0 < fit["relative_size"] < 0.25
    assert "fits demo as a drafter" in slipstream("inspect", "demo/draft", "--target", "demo").out


def test_a_drafter_as_large_as_its_target_gets_a_note(slipstream: CommandLine) -> None:
    for target in ("demo/draft", "demo"):
        ran = slipstream("inspect", "demo", "--target", target)
        assert ran.code == 0
        assert f"fits {target} as a drafter" in ran.out
        assert "times the parameters of the target" in ran.out


def test_a_drafter_of_one_pass_tells_what_it_was_trained_for(slipstream: CommandLine) -> None:
    lines = slipstream("inspect", "demo/p-eagle").out.splitlines()
    assert "trained for      6 draft tokens per step, all in one pass" in lines


def test_another_vocabulary_does_not_fit(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    draft = str(write_qwen3(tmp_path / "draft", keep_layers=1, vocab_size=64))
    ran = slipstream("inspect", draft, "--target", tiny_target, "--json")
    assert ran.code == 1
    fit = json.loads(ran.out)["drafter"]
    assert fit["fits"] is False
    assert "vocabulary" in fit["problems"][0]


def test_a_large_drafter_of_short_context_gets_notes(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    draft = str(write_qwen3(tmp_path / "draft", keep_layers=1, max_position_embeddings=100))
    ran = slipstream("inspect", draft, "--target", tiny_target, "--json")
    assert ran.code == 0
    notes = " ".join(json.loads(ran.out)["drafter"]["notes"])
    assert "parameters" in notes
    assert "beyond 100" in notes


@dataclass(frozen=True)
class Head:
    """A drafter's checkpoint, and the expected output of inspect.

    Attributes:
        write: (folder, target) -> the checkpoint.
        shown: parts of the page beside a target that it fits.
        facts: entries of its document.
        other: how another target differs that it does not fit.
        problem: why it does not.
    """

    write: Callable[[Path, str], Path | str]
    shown: tuple[str, ...]
    facts: dict[str, Any]
    other: dict[str, int] = field(default_factory=lambda: {"hidden_size": 64})
    problem: str = "trained for another target"


_STREAMS = "streams that enter layers 0, 1, 2"
_ON_HIDDEN = (
    "last hidden state of one token",
    "7 tokens per step",
    "96 tokens",
    "KV cache         none",
)
HEADS = {
    "eagle": Head(lambda to, target: write_eagle1(to, target), (), {}),
    "eagle3": Head(
        lambda to, target: as_pickle(write_eagle3(to, target, draft_vocab=60)),
        (_STREAMS,),
        {"num_layers": 1},
    ),
    "p-eagle": Head(
        lambda to, target: write_p_eagle(to, target, fit=False, num_depths=8),
        (
            _STREAMS,
            "all draft tokens from one pass (method p-eagle), with mask token 2; it was trained "
            "for 8",
        ),
        {},
    ),
    "medusa": Head(
        lambda to, target: medusa_for(target), _ON_HIDDEN, {"hidden_size": 48, "num_layers": None}
    ),
    "mlp_speculator": Head(
        lambda to, target: mlp_for(target), _ON_HIDDEN, {"hidden_size": 48, "num_layers": None}
    ),
    "mtp": Head(
        lambda to, target: write_mtp(to, target, "qwen", modules=2),
        ("last hidden state, after the final norm (2 modules",),
        {"num_layers": 2},
    ),
    "mtp deepseek": Head(
        lambda to, target: write_mtp(to, target, "deepseek", modules=2),
        ("last hidden state, after the final norm (2 modules",),
        {"num_layers": 2},
    ),
    "gemma4_assistant": Head(
        write_assistant,
        ("the cache of its last layers", "0 bytes per token"),
        {"kv_bytes_per_token": 0},
        {"head_dim": 24},
        "2 heads of 16 numbers",
    ),
    "dflash": Head(
        write_dflash, ("enter layers 1, 2", "one pass, 7 at most, with mask token 90"), {}
    ),
    "dflash wrapped": Head(lambda to, target: as_wrapped_dflash(write_dflash(to, target)), (), {}),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_drafter_and_its_fit(
    name: str, slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    case, kind = HEADS[name], name.partition(" ")[0]
    path = str(case.write(tmp_path / "head", tiny_target))
    ran = slipstream("inspect", path, "--target", tiny_target)
    assert ran.code == 0, ran.err
    for part in (f"drafter, method {kind}", f"fits {tiny_target} as a drafter", *case.shown):
        assert part in ran.out
    other = str(write_qwen3(tmp_path / "other", **case.other))
    ran = slipstream("inspect", path, "--target", other, "--json")
    assert ran.code == 1
    document = json.loads(ran.out)
    assert {key: document[key] for key in case.facts} == case.facts
    assert document["kind"] == kind
    assert case.problem in document["drafter"]["problems"][0]


def test_a_drafting_head_is_no_target(slipstream: CommandLine, tiny_target: str) -> None:
    for path, head in ((tiny_target, medusa_for(tiny_target)), ("demo/draft", "demo/eagle3")):
        ran = slipstream("inspect", path, "--target", head)
        assert ran.code == 1
        assert "is no language model" in ran.out


@pytest.mark.parametrize("style", ["qwen", "deepseek"])
def test_a_target_with_modules_stays_a_target(
    style: str, slipstream: CommandLine, tmp_path: Path
) -> None:
    target = str(add_mtp(write_qwen3(tmp_path / "target"), style))
    document = json.loads(slipstream("inspect", target, "--json").out)
    assert document["kind"] == "language_model"
    assert document["num_layers"] == 2
    assert "method mtp, which reads the last hidden state" in document["own_drafter"]
    assert "own drafter" in slipstream("inspect", target).out


def test_a_wrapped_head_names_its_target(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    head = str(as_wrapper(write_eagle3(tmp_path / "head", tiny_target)))
    assert json.loads(slipstream("inspect", head, "--json").out)["target"] == "target"
    assert "target           target" in slipstream("inspect", head).out


def test_medusa_heads_without_a_config(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    path = Path(write_medusa(tmp_path, medusa_tensors(48, 96, heads=3), "medusa_lm_head.pt"))
    (path / "config.json").unlink()
    document = json.loads(slipstream("inspect", str(path), "--json").out)
    assert (document["kind"], document["num_speculative_tokens"]) == ("medusa", 3)
    assert document["architecture"] is None


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "medusa", "mlp_speculator", "mtp"])
def test_a_drafter_without_weights_is_a_broken_one(
    kind: str, slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    writers: dict[str, Callable[[], object]] = {
        "eagle3": lambda: write_eagle3(tmp_path / "head", tiny_target, draft_vocab=60),
        "p-eagle": lambda: write_p_eagle(tmp_path / "head", tiny_target, fit=False),
        "medusa": lambda: medusa_for(tiny_target),
        "mlp_speculator": lambda: mlp_for(tiny_target),
        "mtp": lambda: write_mtp(tmp_path / "head", tiny_target, "speculators"),
    }
    folder = Path(str(writers[kind]()))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    for arguments in ((str(bare),), (str(bare), "--target", tiny_target)):
        ran = slipstream("inspect", *arguments)
        assert ran.code == 1
        assert f"of the kind {kind} by its config.json, but has no weights" in ran.err
        assert ran.err.count("\n") == 1


def test_a_draft_model_without_weights_does_not_fit(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    draft = write_qwen3(tmp_path / "draft", keep_layers=1)
    (draft / "model.safetensors").unlink()
    ran = slipstream("inspect", str(draft), "--target", tiny_target)
    assert ran.code == 1
    assert f"{draft} has no weights" in ran.out


def test_an_unknown_architecture(slipstream: CommandLine, tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model", architectures=["GPT9"])
    ran = slipstream("inspect", str(folder))
    assert ran.code == 1
    assert "GPT9" in ran.err
    assert ran.err.count("\n") == 1


def test_a_parallel_drafter_is_told_from_a_draft_model(
    slipstream: CommandLine, tiny_target: str, tmp_path: Path
) -> None:
    parallel = write_qwen3(tmp_path / "pard", keep_layers=1, spd_type="pard", pard_token=90)
    chain = write_qwen3(tmp_path / "chain", keep_layers=1)
    ran = slipstream("inspect", str(parallel), "--target", tiny_target)
    assert ran.code == 0
    assert "all draft tokens from one pass (method pard), with mask token 90" in ran.out
    assert "method pard" not in slipstream("inspect", str(chain), "--target", tiny_target).out


def test_tells_what_steps_cost(slipstream: CommandLine, tiny_target: str, tiny_draft: str) -> None:
    ran = slipstream("inspect", tiny_target, "--costs", "--drafter", tiny_draft, "--json")
    document = json.loads(ran.out)
    rows = document["costs"]
    assert (document["model"], document["drafter"]) == (tiny_target, tiny_draft)
    assert {row["requests"] for row in rows} == {1, 2, 4, 8, 16, 32, 64}
    for row in rows:
        assert row["seconds"] > 1e-5
        assert (row["drafts"] == 0) <= (row["least_acceptance"] is None)
    words = slipstream("inspect", tiny_target, "--costs").out
    assert words.startswith(f"{tiny_target}, drafts of ngram\n")
    assert "milliseconds per step" in words
    assert "acceptance rate from which drafting pays" in words
    both = json.dumps({"drafters": [{"method": "ngram"}, {"model": tiny_draft}]})
    flags = "--speculative-config", both, "--max-num-seqs", "1"
    words = slipstream("inspect", tiny_target, "--costs", *flags).out
    assert words.startswith(f"{tiny_target}, drafts of ngram + {tiny_draft}\n")


def test_costs_are_of_the_engine_that_the_flags_describe(
    slipstream: CommandLine, tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []

    def opened(config: EngineConfig, verbose: bool) -> Any:
        configs.append(config)
        return open_llm(config, verbose)

    monkeypatch.setattr(inspect, "open_llm", opened)
    config = json.dumps({"model": tiny_draft, "num_speculative_tokens": 2})
    line = ("inspect", tiny_target, "--costs", "--json", "--max-num-seqs", "2", "--dtype")
    ran = slipstream(*line, "float32", "-q", "int8", "--speculative-config", config)
    rows = json.loads(ran.out)["costs"]
    assert [(row["requests"], row["drafts"]) for row in rows] == [
        (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    slipstream(*line, "float32", "--drafter", tiny_draft, "--drafter-quantization", "int8")
    first, second = configs
    assert (first.quantization, first.dtype, first.max_num_seqs) == ("int8", "float32", 2)
    assert second.drafter_options == {
        "model": tiny_draft, "quantization": "int8", "num_speculative_tokens": "auto",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("-k", "50"), "the costs of 1 to 7 draft tokens with this drafter, not of 50"),
        (("--no-speculation",), "leave out --no-speculation"),
    ],
)
def test_costs_that_are_not_measured(
    slipstream: CommandLine, tiny_target: str, tiny_draft: str, flags: tuple[str, ...], says: str
) -> None:
    drafter = () if "--no-speculation" in flags else ("--drafter", tiny_draft)
    ran = slipstream("inspect", tiny_target, "--costs", *drafter, *flags)
    assert ran.code == 2
    assert says in ran.err


@pytest.mark.parametrize(
    "other",
    [
        ("--target", "demo", "--costs"),
        ("--drafter", "ngram"),
        ("--max-num-seqs", "2"),
        ("-k", "3"),
    ],
)
def test_costs_are_of_a_model(slipstream: CommandLine, other: tuple[str, ...]) -> None:
    ran = slipstream("inspect", "demo", *other)
    assert ran.code == 2
    assert "--costs" in ran.err
