"""Greedy output of Gemmas and the small dense families with speculation is the plain output."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams
from tests.lossless.test_greedy import make_llm, make_prompts, tokens
from tests.models.gemma_cases import GEMMA
from tests.models.parity_cases import Case
from tests.models.small_cases import SMALL
from tests.models.test_parity import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
DRAFT_LAYERS = 2


def write_draft(target: Path, folder: Path) -> Path:
    """The first two layers of the target, with its embedding, last norm and head."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    count = config["num_hidden_layers"]
    for key, value in config.items():
        if isinstance(value, list) and len(value) == count:  # one entry a layer
            config[key] = value[:DRAFT_LAYERS]
    config |= {"num_hidden_layers": DRAFT_LAYERS, "num_kv_shared_layers": None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / "model.safetensors")
    left_out = tuple(f"model.layers.{layer}." for layer in range(DRAFT_LAYERS, count))
    kept = {name: value for name, value in tensors.items() if not name.startswith(left_out)}
    size = config.get("hidden_size_per_layer_input")
    if size:
        of_layers = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
        table, projection = (f"{name}.weight" for name in of_layers)
        kept[table] = kept[table][:, : DRAFT_LAYERS * size].contiguous()
        kept[projection] = kept[projection][: DRAFT_LAYERS * size].contiguous()
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", [*SMALL, *GEMMA], ids=str)
def test_greedy_output_is_the_plain_output(case: Case, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_checkpoint(replace(case, shard_size=None), target)
    prompts, options = make_prompts(4), {"rows": 24, "blocks": 100}
    expected = tokens(make_llm(str(target), None, options).generate(prompts, GREEDY))
    assert min(len(set(text)) for text in expected) > 2  # no text stands still

    draft = write_draft(target, tmp_path / "draft")
    drafters: list[dict[str, Any]] = [
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"model": str(draft)},
    ]
    accepted = 0
    for drafter in drafters:
        llm = make_llm(str(target), {**drafter, "num_speculative_tokens": 3}, options)
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == expected
        accepted += sum(output.metrics.num_accepted_tokens for output in outputs)
    assert accepted > 0
