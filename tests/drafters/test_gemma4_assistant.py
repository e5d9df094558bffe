"""Assistants that read the target's cache, against an oracle in plain torch."""

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.assistants import (
    FULL,
    SLIDING,
    Assistant,
    MixedTarget,
    write_assistant,
    write_sliding_target,
)
from tests.drafters.engines import PROMPT, check_drafts
from tests.padded_steps import use_padded_steps


def oracle(folder: Path, target: str, **flags: Any) -> Assistant:
    return Assistant(folder, MixedTarget(target), **flags)


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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kinds", [(SLIDING, FULL, SLIDING, FULL), (SLIDING,)])
def test_layers_read_the_last_layer_like_them(
    kinds: tuple[str, ...], padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_sliding_target(tmp_path / "target")
    last = () if kinds[-1] == FULL else (FULL,)  # as every published one ends
    folder = write_assistant(tmp_path / "draft", target, kinds=(*kinds, *last))
    if padded:
        use_padded_steps(monkeypatch)
    check(target, folder, monkeypatch, max_num_seqs=1)


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
