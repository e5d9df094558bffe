"""Targets in the blocks of GGUF files: greedy output with drafts is the plain output."""

from pathlib import Path

import pytest

from slipstream import SamplingParams
from slipstream.models.gguf.blocks import BY_NAME
from tests.gguf_checkpoints import as_gguf
from tests.lossless.test_greedy import make_llm, make_prompts, tokens
from tests.models.parity_cases import TIED, Case, shape
from tests.models.test_parity import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**shape(4, 2, 256), **TIED, "intermediate_size": 256, "num_hidden_layers": 2}
    return write_checkpoint(Case("Llama", "wide", sizes), tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q8_0"])
def test_greedy_output_is_the_plain_output(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    target = as_gguf(checkpoint, tmp_path / "target.gguf", BY_NAME[kind])
    prompts, options = make_prompts(4), {"rows": 24, "blocks": 100, "dtype": "bfloat16"}
    expected = tokens(make_llm(str(target), None, options).generate(prompts, GREEDY))
    drafter = {"model": str(target), "num_speculative_tokens": 3}
    outputs = make_llm(str(target), drafter, options).generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert sum(out.metrics.num_accepted_tokens for out in outputs) > 0
