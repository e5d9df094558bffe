"""EAGLE heads against oracles in plain torch: every layout of a checkpoint, every flag."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from tests.drafters.engines import GREEDY, PROMPT, check_drafts, make, run
from tests.drafters.heads import as_pickle, as_wrapper, write_eagle1, write_eagle3
from tests.drafters.oracles import Eagle1, Eagle3, Target

THREE: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers.0": {"naming": "layers.0."},
    "model.layers.0": {"naming": "layers.0.", "prefix": "model."},
    "reduced": {"draft_vocab": 60},
    "own_embedding": {"own_embedding": True},
    "shared_head": {"own_head": False},
    "qk_norm": {"qk_norm": True, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "window": {
        "qk_norm": True,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"],
    },
    "llama_qk_norm": {"qk_norm": True},
    "layers": {"num_hidden_layers": 3},
    "rope": {"rope_theta": 500.0},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "draft_vocab": 60},
    "no_aux": {"use_aux_hidden_state": False},
    # Heads for gpt-oss, as speculators and Model-Optimizer write them, and a narrow one.
    "of_speculators": {
        "naming": "layers.0.",
        "num_hidden_layers": 2,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "draft_vocab": 60,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * 2,
    },
    "of_model_optimizer": {
        "draft_vocab": 60,
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 128,
        },
        "eagle_config": {
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    },
    "narrow": {"hidden_size": 32, "own_embedding": True, "attention_bias": True},
    "two_layers_read": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
}
FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]


# What they vary is varied by others too, with more.
LESS_TRIED = (
    *("layers.0", "reduced", "own_embedding", "qk_norm", "rope"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.full) if it in LESS_TRIED else it for it in THREE],
)
def test_eagle3_drafts_what_the_oracle_drafts(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_eagle3(tmp_path, tiny_target, **THREE[name])
    check_drafts(tiny_target, folder, Eagle3(folder, Target(tiny_target)), monkeypatch)


WITH_AND_WITHOUT: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(FLAGS, (True, False)),
    "rope_theta": (500.0, 10000.0),
    "rope_scaling": (THREE["of_model_optimizer"]["rope_scaling"], None),
    "use_sliding_window": (True, False),
}


@pytest.mark.parametrize("flag", WITH_AND_WITHOUT)
def test_every_flag_changes_the_drafts(flag: str, tiny_target: str, tmp_path: Path) -> None:
    given, other = WITH_AND_WITHOUT[flag]
    folder = write_eagle3(tmp_path, tiny_target, **{"sliding_window": 6, flag: given})
    with_flag = Eagle3(folder, Target(tiny_target))
    without = Eagle3(folder, Target(tiny_target), **{flag: other})
    ours, theirs = (head.drafts(PROMPT, 2)[1][1] for head in (with_flag, without))
    assert (ours - theirs).abs().max() > 1e-2


ONE: dict[str, dict[str, Any]] = {
    "bias": {},
    "no_bias": {"bias": False},
    "own_embedding": {"own_embedding": True},
    "layers": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", ONE)
def test_eagle1_drafts_what_the_oracle_drafts(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_eagle1(tmp_path, tiny_target, **ONE[name])
    check_drafts(tiny_target, folder, Eagle1(folder, Target(tiny_target)), monkeypatch)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_pickled_weights_are_the_same_head(kind: str, tiny_target: str, tmp_path: Path) -> None:
    write = write_eagle1 if kind == "eagle" else write_eagle3
    folder = write(tmp_path, tiny_target)
    expected = run(make(tiny_target, folder), GREEDY).metrics.num_accepted_tokens_per_pos
    llm = make(tiny_target, as_pickle(folder))
    assert llm.engine.resolved.method == kind
    assert run(llm, GREEDY).metrics.num_accepted_tokens_per_pos == expected


def test_a_speculators_wrapper_is_the_same_head(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """norm_before_residual is true by default there, and the wrapper has its own K."""
    folder = write_eagle3(
        tmp_path, tiny_target, naming="layers.0.", draft_vocab=60, norm_before_residual=True
    )
    head = Eagle3(folder, Target(tiny_target))
    as_wrapper(folder, norm_before_residual=None)
    llm = LLM(
        tiny_target,
        speculative_config={"model": str(folder)},
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    assert llm.engine.resolved.limits.num_speculative_tokens == 3
    check_drafts(tiny_target, folder, head, monkeypatch)
