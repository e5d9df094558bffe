"""Every kind of drafter with a network: a target, a drafter for it, and its oracle."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import write_qwen3
from tests.drafters.assistants import Assistant, MixedTarget, write_assistant
from tests.drafters.blocks import (
    Blocks,
    Blocks2,
    Sparks,
    write_dflash,
    write_dflash2,
    write_dspark,
)
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp
from tests.drafters.mtp_oracle import Mtp
from tests.drafters.oracles import Eagle1, Eagle3, Target, p_eagle_oracle
from tests.last_hidden_checkpoints import (
    Guess,
    medusa_oracle,
    mlp_oracle,
    write_cycle_target,
    write_right_medusa,
    write_right_mlp,
)
from tests.pard_checkpoints import Chain, Pard, Pard2, write_pard, write_pard2


class Oracle(Protocol):
    """Computes the expected drafts of one kind of drafter."""

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy: (draft tokens, the logits of each) after `ids`."""


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        config: keys of `speculative_config`.
        most: draft tokens that it can make.
        early: where a prefix hit leaves one token it drafts at once, a step before it does so
            without a hit.
        shares: its requests share blocks with those that do not draft.
    """

    target: str
    config: dict[str, Any]
    oracle: Oracle
    most: int = 15
    early: bool = False
    shares: bool = False


class LastHidden:
    """Heads that guess from the target's last hidden state."""

    def __init__(self, target: str, guess: Guess) -> None:
        self.target, self.guess = Target(target), guess

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        hidden = self.target(ids[:-1])[1][-1]
        logits = self.guess(hidden, ids[-1], count)
        return [int(row.argmax()) for row in logits], logits


def _draft_model(folder: Path, target: str) -> Kind:
    path = str(write_qwen3(folder, keep_layers=1))
    return Kind(target, {"model": path}, Chain(path), early=True)


def _pard(folder: Path, target: str) -> Kind:
    path = write_pard(folder)
    return Kind(target, {"model": path}, Pard(path), early=True)


def _pard2(folder: Path, target: str) -> Kind:
    path = write_pard2(folder, [-1, -2])
    return Kind(target, {"model": path}, Pard2(target, path), early=True)


def _eagle(folder: Path, target: str) -> Kind:
    path = write_eagle1(folder, target)
    return Kind(target, {"model": str(path)}, Eagle1(path, Target(target)))


def _eagle3(folder: Path, target: str) -> Kind:
    path = write_eagle3(folder, target, draft_vocab=60)
    return Kind(target, {"model": str(path)}, Eagle3(path, Target(target)))


def _p_eagle(folder: Path, target: str) -> Kind:
    path = write_p_eagle(folder, target, draft_vocab=80)
    return Kind(target, {"model": str(path)}, p_eagle_oracle(path, target))


def _mtp(folder: Path, target: str) -> Kind:
    path = write_mtp(folder, target, "qwen")
    return Kind(target, {"model": str(path)}, Mtp(path, Target(target), "qwen"))


def _mtp_modules(folder: Path, target: str) -> Kind:
    path = write_mtp(folder, target, "deepseek", modules=3)
    return Kind(target, {"model": str(path)}, Mtp(path, Target(target), "deepseek"))


def _dflash(folder: Path, target: str) -> Kind:
    path = write_dflash(folder, target, block=16)
    return Kind(target, {"model": str(path)}, Blocks(path, Target(target)), early=True)


def _dspark(folder: Path, target: str) -> Kind:
    # Without a confidence head, whose numbers are no probabilities of the oracle's.
    options: dict[str, Any] = {"head_type": "gated", "confident": False, "draft_vocab": 80}
    path = write_dspark(folder, target, block=16, **options)
    return Kind(target, {"model": str(path)}, Sparks(path, Target(target)), early=True)


def _dflash2(folder: Path, target: str) -> Kind:
    path = write_dflash2(folder, target, block=16)
    return Kind(target, {"model": str(path)}, Blocks2(path, Target(target)), early=True)


def _assistant(folder: Path, target: str) -> Kind:
    path = write_assistant(folder, target, centroids=(16, 4))
    oracle = Assistant(path, MixedTarget(target))
    return Kind(target, {"model": str(path)}, oracle, shares=True)


def _medusa(folder: Path, target: str) -> Kind:
    cycle = write_cycle_target(folder / "target")
    path = write_right_medusa(folder / "heads", cycle)
    guess = medusa_oracle(load_file(Path(path) / "medusa_lm_head.safetensors"))
    return Kind(cycle, {"model": path}, LastHidden(cycle, guess), most=7, shares=True)


def _mlp_speculator(folder: Path, target: str) -> Kind:
    cycle = write_cycle_target(folder / "target")
    path = write_right_mlp(folder / "heads", cycle)
    config = json.loads((Path(path) / "config.json").read_text())
    guess = mlp_oracle(load_file(Path(path) / "model.safetensors"), config)
    return Kind(cycle, {"model": path}, LastHidden(cycle, guess), most=7, shares=True)


# A kind that is new is one line here. Trees have tests of their own (test_trees, lossless).
KINDS: dict[str, Callable[[Path, str], Kind]] = {
    "draft_model": _draft_model,
    "pard": _pard,
    "pard2": _pard2,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "p-eagle": _p_eagle,
    "mtp": _mtp,
    "mtp_modules": _mtp_modules,
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "assistant": _assistant,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
}
