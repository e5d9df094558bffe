"""The comparison on a real GGUF file, at tiny sizes and without the other engine."""

import json
from pathlib import Path

import pytest

from benchmarks import real_model
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.gguf.blocks import Q4_0
from tests.gguf_checkpoints import as_gguf
from tests.models.parity_cases import TIED, Case, shape
from tests.models.test_gguf_tokenizer import byte_level
from tests.models.test_parity import write_checkpoint


def test_a_gguf_file_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {**shape(2, 1, 64), **TIED, "intermediate_size": 64, "num_hidden_layers": 1}
    tokenizer = Checkpoint(byte_level(tmp_path / "vocabulary.gguf")).container.metadata
    metadata = {key.replace(".", "__"): value for key, value in tokenizer.items()}
    folder = write_checkpoint(Case("Llama", "small", sizes), tmp_path / "model")
    file = as_gguf(folder, tmp_path / "model.gguf", Q4_0, **metadata)
    figures = tmp_path / "figures.json"
    options = "--threads 1 --prompt 6 --new-tokens 4 --batches 1,2 --prefills 12 --rounds 1"
    command = [*options.split(), "--model", str(file), "--json", str(figures)]
    assert real_model.main([*command, "--venv", str(tmp_path / "none")]) == 1
    out = capsys.readouterr().out
    assert "decoding, batch 2" in out
    assert "reading 12 tokens" in out
    assert "llama.cpp: there is no" in out
    document = json.loads(figures.read_text())
    ours, _ = document["plans"][0]["engines"]
    assert [len(it["seconds"]) for it in ours["measures"].values()] == [1, 1, 1]
    assert ours["error"] is None
