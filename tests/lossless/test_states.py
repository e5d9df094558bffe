"""Recurrent states under speculation: the text is that of plain decoding, and the state that of the
tokens that stay, whatever was refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.core.errors import UsageError
from slipstream.engine.prompts import EncodedPrompt
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.rows import PassRows
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.checkpoints import write_qwen3
from tests.drafters.blocks import write_dflash
from tests.drafters.heads import write_eagle3
from tests.hybrid_checkpoints import FAMILIES, add_module, write_hybrid
from tests.lossless.test_greedy import (
    MAX_TOKENS,
    make_llm,
    make_prompts,
    plain_tokens,
    remember,
    tokens,
)
from tests.models.delta_cases import DELTA
from tests.padded_steps import use_steps
from tests.pairwise import Case

AXES: dict[str, list[Any]] = {
    "target": list(FAMILIES),
    "drafter": [
        *("right", "in turn", "wrong", "ngram", "draft_model"),
        *("mtp", "eagle3", "dflash"),
    ],
    "k": [1, 3, 7],
    "batch": [1, 8],
    "rows": [512, 24],  # 24: prompts come in chunks, mixed with decoding
    "blocks": [400, 16],  # 16 blocks of 8 tokens: requests are preempted
    "prefix": [False, True],  # the same prompts were run before
    "seeded": [False, True],
    "dtype": ["float32"] if torch.cuda.is_available() else ["float32", "bfloat16"],
    "steps": ["exact", "padded", "packed"],
}
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FAKES = {"right": "perfect", "in turn": "in turn", "wrong": "wrong"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str], str]:
    """A target for each model_type, with a module beside it."""
    return cache(lambda kind: str(add_module(write_hybrid(folder / kind, kind), kind)))


@pytest.fixture(scope="module")
def drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """Models and heads that were made for a plain target of the same sizes."""
    plain = str(write_qwen3(folder / "plain", num_hidden_layers=4))
    return {
        "draft_model": {"model": plain},
        "eagle3": {"model": str(write_eagle3(folder / "eagle3", plain, draft_vocab=80))},
        "dflash": {"model": str(write_dflash(folder / "dflash", plain, block=16, draft_vocab=80))},
        "mtp": {"method": "mtp"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        **{name: {"method": "fake", "model": model} for name, model in FAKES.items()},
    }


@pytest.mark.matrix(AXES)
def test_output_is_the_plain_output(
    case: Case,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    target, prompts = models(case["target"]), make_prompts(case["batch"])
    params = replace(GREEDY, temperature=0.8, seed=5) if case["seeded"] else GREEDY
    expected = plain_tokens(target, case["batch"], params, case["dtype"])
    remember(prompts, expected)
    assert min(len(set(text)) for text in expected) > 3  # no text stands still

    use_steps(case["steps"], monkeypatch)
    config = {**drafters[case["drafter"]], "num_speculative_tokens": case["k"]}
    llm = make_llm(target, config, case)
    if case["prefix"]:
        llm.generate(prompts, params)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == expected
    assert all(output.metrics.num_drafts > 0 for output in outputs)
    if case["blocks"] == 16 and case["batch"] == 8:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_after_every_round_the_state_is_that_of_a_fresh_prompt(
    k: int, steps: str, models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of accepted tokens from 0 to K occurs in turn."""
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    target, (prompt,) = models("qwen3_5_text"), make_prompts(1)
    case = {"rows": 24, "blocks": 400}
    long = replace(GREEDY, max_tokens=40)
    remember([prompt], tokens(make_llm(target, None, case).generate([prompt], long)))
    use_steps(steps, monkeypatch)
    config = {"method": "fake", "model": "in turn", "num_speculative_tokens": k}
    engine = make_llm(target, config, case).engine
    engine.add("a", EncodedPrompt(None, prompt["prompt_token_ids"], ()), long)
    runner, seen = engine._step._runner, set()
    while engine.has_unfinished:
        engine.step()
        slot = 0
        pending = int(runner._cache._pending[slot])
        length = int(runner._state.num_computed[slot]) - pending
        seen.add(pending)
        ids = runner._state.token_ids[slot, :length]
        for layer, fresh in zip(runner._cache.layers, states_of(runner, ids), strict=True):
            if fresh is not None:
                assert_same(layer.states[slot], fresh[0])
                assert_same(layer.windows[slot], fresh[1])
    assert seen == set(range(k + 1))


def test_a_model_without_any_attention(tmp_path: Path) -> None:
    """Its blocks have no memory, and its prefixes are resumed from checkpoints only."""
    target = write_hybrid(tmp_path, "qwen3_5_text", layer_types=[DELTA] * 4)
    prompts, roomy = make_prompts(3), {"rows": 512, "blocks": 400}
    expected = tokens(make_llm(target, None, roomy).generate(prompts, GREEDY))
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    llm = make_llm(target, config, {"rows": 24, "blocks": 400, "prefix": True})
    for _ in range(2):
        assert tokens(outputs := llm.generate(prompts, GREEDY)) == expected
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Equal bits on a CPU; on a GPU, where prompts are read in blocks of rows, close numbers."""
    if found.device.type == "cpu":
        assert torch.equal(found, wanted)
    else:
        found, wanted = found.float(), wanted.float()
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@torch.inference_mode()
def states_of(runner: ModelRunner, token_ids: Tensor) -> list[tuple[Tensor, Tensor] | None]:
    """State and window of each layer after a text that is read in one pass; None where a layer
    has none."""
    count, device = len(token_ids), token_ids.device
    state = DeviceState(1, count, 8, device)
    state.token_ids[0, :count] = token_ids
    state.block_tables[0] = torch.arange(state.block_tables.shape[1])
    network = runner._network
    layout = network.config.cache_layout(network.embedding.dtype)
    cache = ModelCache(layout, CacheSizes(-(-count // 8), 8, 2, device))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    ModelRunner(network, cache, state).forward(PassRows(zero, zero, zero + count))
    return [
        None if isinstance(layer, tuple) else (layer.states[0], layer.windows[0])
        for layer in cache.layers
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculative_config": {"model": "head", "speculative_token_tree": [[0], [0, 0]]}},
            "trees of draft tokens",
        ),
        ({"speculative_config": {"model": "target", "num_speculative_tokens": 2}}, "state of each"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8"),
        ({"num_state_checkpoints": 10**10}, "or num_state_checkpoints, which take"),
    ],
    ids=["trees", "draft with states", "int8", "places"],
)
def test_what_does_not_go_with_states_is_refused(
    options: dict[str, Any],
    message: str,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
) -> None:
    target = models("qwen3_5_text")
    config = options.get("speculative_config")
    if config is not None:
        drafter = {"model": target} if config["model"] == "target" else drafters["eagle3"]
        options = {"speculative_config": {**config, **drafter}}
    with pytest.raises(UsageError, match=message):
        LLM(target, skip_tokenizer_init=True, num_kv_blocks=40, **options)
