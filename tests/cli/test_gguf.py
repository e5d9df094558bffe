"""GGUF files on the command line: described, and served with a drafter that is one as well."""

import json
from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.gguf.blocks import F16, Q4_0, Q4_K
from tests.cli.conftest import CommandLine
from tests.gguf_checkpoints import as_gguf
from tests.models.parity_cases import TIED, Case, shape
from tests.models.test_gguf_tokenizer import byte_level
from tests.models.test_parity import write_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target in Q4_K and a draft model in Q4_0, of one vocabulary."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = Checkpoint(byte_level(folder / "vocabulary.gguf")).container.metadata
    files = []
    for name, kind, layers in (("target", Q4_K, 2), ("draft", Q4_0, 1)):
        sizes = {**shape(4, 2, 256), **TIED, "intermediate_size": 256, "num_hidden_layers": layers}
        checkpoint = write_checkpoint(Case("Llama", name, sizes, seed=layers), folder / name)
        metadata = {key.replace(".", "__"): value for key, value in tokenizer.items()}
        files.append(as_gguf(checkpoint, folder / f"{name}.gguf", kind, **metadata))
    return files


def test_a_file_is_described(models: list[Path], slipstream: CommandLine) -> None:
    facts = json.loads(slipstream("inspect", str(models[0]), "--json").out)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["quantization"] == "GGUF, Q4_K"
    assert facts["dtype"] == "bfloat16"
    assert facts["eos_token_ids"] == [0]
    assert facts["has_chat_template"]
    blocks, plain = facts["types"]
    becomes = "bfloat16" if torch.cuda.is_available() else None
    assert (blocks["type"], blocks["becomes"]) == ("Q4_K", becomes)
    assert blocks["rounded"] is (becomes is not None)
    assert plain["type"] == "F32"
    words = slipstream("inspect", str(models[1])).out
    assert "Q4_0 (" in words
    assert ("as bfloat16" if becomes else "as stored") in words
    fits = slipstream("inspect", str(models[1]), "--target", str(models[0])).out
    assert "fits" in fits
    assert "does not fit" not in fits


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in float16")
def test_float16_is_told_to_become_bfloat16(
    models: list[Path], tmp_path: Path, slipstream: CommandLine
) -> None:
    file = as_gguf(models[0].with_suffix(""), tmp_path / "half.gguf", F16)
    facts = json.loads(slipstream("inspect", str(file), "--json").out)
    assert facts["dtype"] == "float16"
    assert facts["dtype_note"].startswith("bfloat16 by default: ")
    assert facts["types"][0] | {"num_bytes": 0} == {
        "type": "F16", "num_bytes": 0, "becomes": "bfloat16", "rounded": True
    }  # fmt: skip
    assert "float32 keeps every bit" in slipstream("inspect", str(file)).out


def test_a_draft_model_in_gguf_changes_no_text(models: list[Path]) -> None:
    target, draft = map(str, models)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["the other in", "<tool> ... the"]
    texts = []
    for drafter in (None, {"model": draft, "num_speculative_tokens": 3}):
        llm = LLM(target, speculative_config=drafter, dtype="float32", num_kv_blocks=64)
        texts.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert [len(ids) for ids in texts[0]] == [24, 24]


def test_the_models_of_a_folder_are_listed(
    models: list[Path], tmp_path: Path, slipstream: CommandLine
) -> None:
    folder = models[0].parent
    blob = tmp_path / "blobs" / "sha256-01"
    blob.parent.mkdir()
    blob.write_bytes(models[1].read_bytes())
    (tmp_path / "notes.gguf.txt").write_text("none")
    listed = json.loads(slipstream("list", str(tmp_path), "--json").out)
    assert [it["name"] for it in listed] == [str(blob)]
    listed = json.loads(slipstream("list", str(folder), "--json").out)
    kinds = {it["name"]: it["kind"] for it in listed}
    assert kinds[str(models[0])] == "LlamaForCausalLM, GGUF, Q4_K"
    assert kinds[str(folder / "target")] == "LlamaForCausalLM"
    assert kinds.keys() >= {str(models[1]), str(folder / "draft")}
    assert "demo" not in kinds
    assert "is not a directory" in slipstream("list", str(models[0])).err
    ran = slipstream("list", str(tmp_path), "--download-dir", str(tmp_path))
    assert (ran.code, "not both" in ran.err) == (2, True)


def test_the_help_of_inspect_names_gguf_files(slipstream: CommandLine) -> None:
    assert "a GGUF file" in " ".join(slipstream("inspect", "--help").out.split())
