"""Assistants that read the target's cache, against an oracle in plain torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import CheckpointError
from tests.drafters.assistants import (
    FULL,
    SLIDING,
    Assistant,
    oracle_of,
    write_assistant,
    write_gemma4_assistant,
    write_sliding_target,
)
from tests.drafters.engines import PROMPT, check_drafts, make
from tests.models.gemma_cases import GEMMA
from tests.models.test_parity import write_checkpoint
from tests.padded_steps import use_padded_steps


def oracle(folder: Path, target: str, **flags: Any) -> Assistant:
    return Assistant(folder, oracle_of(target), **flags)


def check(target: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    check_drafts(target, folder, oracle(folder, target), monkeypatch, **options)


MIXED = {"kinds": (SLIDING, FULL, SLIDING, FULL)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_layer": {"kinds": (FULL,)},
    "listed": {"listed": True},
    "softcap": {"text": {"final_logit_softcapping": 1.5}},
    "suppressed": {"suppressed": (3, 44)},
    "centroids": {"centroids": (16, 4)},
    "capped_centroids": {
        "centroids": (8, 3),
        "suppressed": (7,),
        "text": {"final_logit_softcapping": 2.0},
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_the_oracles(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_assistant(tmp_path, tiny_target, **LAYOUTS[name])
    check(tiny_target, folder, monkeypatch)


@pytest.mark.parametrize(
    ("kinds", "padded"),
    [
        ((SLIDING, FULL, SLIDING, FULL), True),
        ((SLIDING,), False),
        pytest.param((SLIDING, FULL, SLIDING, FULL), False, marks=pytest.mark.full),
        pytest.param((SLIDING,), True, marks=pytest.mark.full),
    ],
)
def test_layers_read_the_last_layer_like_them(
    kinds: tuple[str, ...], padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_sliding_target(tmp_path / "target")
    last = () if kinds[-1] == FULL else (FULL,)  # as every published one ends
    folder = write_assistant(tmp_path / "draft", target, kinds=(*kinds, *last))
    if padded:
        use_padded_steps(monkeypatch)
    check(target, folder, monkeypatch, max_num_seqs=1)


@pytest.mark.parametrize("name", ["two-heads", "inputs"])
def test_drafts_of_gemma_4_are_the_oracles(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes of heads and ropes, and caches that the last layers share."""
    case = next(case for case in GEMMA if str(case) == f"Gemma4-{name}")
    sizes = {"head_dim": 8, "global_head_dim": 12}  # so small that scores differ little
    case = replace(case, shard_size=None, changes={**case.changes, **sizes})
    target = write_checkpoint(case, tmp_path / "target")
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 512}))
    folder = Path(write_gemma4_assistant(tmp_path / "draft", target, case))
    if "num_kv_shared_layers" in case.changes:
        use_padded_steps(monkeypatch)
    check(str(target), folder, monkeypatch, max_num_seqs=1)


def test_windows_wider_than_the_targets_are_refused(tmp_path: Path) -> None:
    """The target gives back what its own layers no longer see."""
    target = write_sliding_target(tmp_path / "target")
    wider = {"sliding_window": 10}
    folder = write_assistant(tmp_path / "draft", target, kinds=(SLIDING, FULL), text=wider)
    with pytest.raises(CheckpointError, match="see 10 tokens, and the target's cache has 9"):
        make(target, folder)


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer_types": (MIXED, {"layer_types": [FULL] * 4}),
    "sliding_window": (MIXED, {"sliding_window": 9}),
    "final_logit_softcapping": ({}, {"final_logit_softcapping": 1.0}),
    "backbone_hidden_size": ({}, {"backbone_hidden_size": 1}),
    "use_ordered_embeddings": ({"centroids": (16, 4)}, {"use_ordered_embeddings": False}),
    "centroid_intermediate_top_k": ({"centroids": (16, 4)}, {"centroid_intermediate_top_k": 1}),
    "rope_parameters": ({}, {"rope_parameters": {FULL: {"rope_theta": 5.0}}}),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_drafts(flag: str, tmp_path: Path) -> None:
    options, other = FLAGS[flag]
    target = write_sliding_target(tmp_path / "target")
    folder = write_assistant(tmp_path / "draft", target, **options)
    ours, theirs = (oracle(folder, target, **flags) for flags in ({}, other))
    gap = ours.drafts(PROMPT, 2)[1][1] - theirs.drafts(PROMPT, 2)[1][1]
    assert gap.nan_to_num(0.0).abs().max() > 1e-2
