"""Shared by the tests of training."""

import json
from pathlib import Path

import pytest

from slipstream.train.metrics import MetricsLog
from tests.checkpoints import write_qwen3
from tests.tokenizers import write_tokenizer
from tests.train.small_runs import write_own_words

# Every turn opens with its role's token and closes with w3.
TEMPLATE = (
    "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }} w3 "
    "{% endfor %}{% if add_generation_prompt %}w2 {% endif %}"
)


@pytest.fixture(autouse=True)
def _curves_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of small runs take longer than these; a test in test_resume.py draws them."""
    monkeypatch.setattr(MetricsLog, "draw", lambda self: None)


@pytest.fixture(scope="session")
def taught_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random three-layer Qwen3 of 96 tokens, each of them a word."""
    folder = write_qwen3(tmp_path_factory.mktemp("taught"), num_hidden_layers=3)
    words = [f"w{index}" for index in range(96)]
    write_tokenizer(folder, words, pre_tokenizer={"type": "Whitespace"})
    settings = {"eos_token": "w0", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="session")
def own_words(taught_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences that it wrote."""
    return write_own_words(taught_target, tmp_path_factory.mktemp("words") / "own.safetensors")
