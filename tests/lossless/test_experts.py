"""On targets with mixtures of experts speculation changes nothing: greedy text token by token, in
float32 and on a CPU in bfloat16 bit for bit, and the distribution of sampled text."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.blocks import write_dflash, write_dflash2, write_dspark
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp
from tests.lossless import test_greedy, test_sampled
from tests.lossless import test_trees as test_trees_of_dense_targets
from tests.lossless.counted_pair import VOCAB
from tests.mixture_checkpoints import write_mixture
from tests.pairwise import Case

# Gemma's assistants are for targets of their own kind; the others differ from these on the host.
LEFT_OUT = ("assistant", "subset", "custom", "host_combination", "uneven_combination")
AXES: dict[str, list[Any]] = {
    "drafter": [name for name in test_greedy.AXES["drafter"] if name not in LEFT_OUT],
    "target": ["qwen3_moe", "gpt_oss"],
    "k": [1, 7],
    "batch": [1, 8],
    "rows": [512, 24],
    "blocks": [400, 16],
    "prefix": [False, True],
    "penalties": [False],  # with them some texts have nothing to look up
    "steps": ["exact", "padded"],
    "dtype": ["float32"] if torch.cuda.is_available() else ["float32", "bfloat16"],
}
TREE_CASE = {"k": 0, "batch": 8, "rows": 24, "blocks": 400, "prefix": False, "steps": "padded"}
Models = Callable[[str], tuple[str, str, dict[str, str]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target for each model_type, its first layer as a draft model, and heads for it."""
    root = tmp_path_factory.mktemp("mixtures")

    @cache
    def made(kind: str) -> tuple[str, str, dict[str, str]]:
        folder = root / kind
        target = str(write_mixture(folder / "target", kind))
        draft = str(write_mixture(folder / "draft", kind, keep_layers=1))
        return target, draft, write_heads(folder, target)

    return made


def write_heads(folder: Path, target: str) -> dict[str, str]:
    narrow: dict[str, Any] = {"hidden_size": 32, "own_embedding": True, "norm_before_fc": True}
    return {
        "assistant": "",
        "dflash": str(write_dflash(folder / "dflash", target, block=16, draft_vocab=80)),
        "dflash2": str(write_dflash2(folder / "dflash2", target, block=16)),
        "dspark": str(write_dspark(folder / "dspark", target, block=16, draft_vocab=80)),
        "eagle": str(write_eagle1(folder / "eagle", target)),
        "eagle3": str(write_eagle3(folder / "eagle3", target, draft_vocab=80, **narrow)),
        "p-eagle": str(write_p_eagle(folder / "p-eagle", target, draft_vocab=80)),
        "mtp": str(write_mtp(folder / "mtp", target, "speculators", fit=False)),
        "mtp_modules": str(write_mtp(folder / "two", target, "deepseek", modules=2, fit=False)),
    }


ORDINARY = [name for name in AXES["drafter"] if name in test_greedy.WAYS]


@pytest.mark.matrix(AXES, ordinary={"drafter": ORDINARY})
def test_greedy_output_is_the_plain_output(
    case: Case, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_greedy.check(case, *models(case["target"]), monkeypatch)


@pytest.mark.parametrize(
    ("target", "head", "tree"), [("qwen3_moe", "eagle", "wide"), ("gpt_oss", "eagle3", "static")]
)
def test_trees(
    target: str, head: str, tree: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a tree see their ancestors alone, and experts see rows alone."""
    path, _, heads = models(target)
    case = {**TREE_CASE, "head": head, "tree": tree, "sampling": "greedy"}
    test_trees_of_dense_targets.check(case, path, heads, monkeypatch)


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SAMPLED: dict[str, tuple[str, Case]] = {
    "draft_model": ("qwen3_moe", {"drafter": "draft"}),
    "eagle3": ("gpt_oss", {"drafter": "eagle3", "params": {"temperature": 0.8, "top_p": 0.95}}),
    "mtp": ("qwen3_moe", {"drafter": "mtp"}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_output_has_the_targets_distribution(name: str, tmp_path: Path) -> None:
    kind, case = SAMPLED[name]
    pair = tuple(
        str(write_mixture(tmp_path / str(keep), kind, keep, seed=3, **SIZES)) for keep in (None, 1)
    )
    heads = {
        "eagle3": str(write_eagle3(tmp_path / "eagle3", pair[0])),
        "mtp": str(write_mtp(tmp_path / "mtp", pair[0], fit=kind != "gpt_oss")),
    }
    test_sampled.check(case, (pair[0], pair[1]), heads, None)
