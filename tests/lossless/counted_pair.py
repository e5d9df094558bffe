"""A target of few tokens for samples that are counted, a draft and heads for it."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.checkpoints import write_qwen3
from tests.drafters.assistants import write_assistant
from tests.drafters.blocks import write_dflash, write_dflash2, write_dspark
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp
from tests.pard_checkpoints import write_pard2

VOCAB = 6
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,  # else the last token itself is far too likely
}
KINDS: dict[str, Callable[[Path, str], object]] = {
    "assistant": write_assistant,
    "assistant_of_parts": partial(write_assistant, centroids=(3, 2)),
    "dflash": partial(write_dflash, mask=3),
    "dflash_reduced": partial(write_dflash, mask=3, draft_vocab=4),
    "dflash2": partial(write_dflash2, mask=3),
    "dspark": partial(write_dspark, mask=3),
    "dspark_reduced": partial(write_dspark, mask=3, draft_vocab=4, head_type="rnn"),
    "eagle": write_eagle1,
    "eagle3": partial(write_eagle3, norm_output=True),
    "eagle3_reduced": partial(write_eagle3, draft_vocab=4),
    "pard2": lambda folder, _: write_pard2(
        folder, [-1, 1], target_width=32, pard_token=3, logit_scale=0.8, **SHAPE
    ),
    "p-eagle": partial(write_p_eagle, draft_vocab=5),
    "mtp": write_mtp,
    "mtp_modules": lambda folder, target: write_mtp(folder, target, "deepseek", modules=2),
}


class Heads(Mapping[str, str]):
    """The folders of drafting heads for a target, each written when it is first asked for."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder, self._target = folder, target

    def __getitem__(self, name: str) -> str:
        write, folder = KINDS[name], self._folder / str(name)
        if not folder.exists():
            write(folder, self._target)
        return str(folder)

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


def write_pair(root: Path) -> tuple[str, str]:
    """A target and a draft, its first layer, that disagree now and then."""
    options = {"seed": 3, "logit_scale": 0.8, **SHAPE}
    target = write_qwen3(root / "target", **options)
    return str(target), str(write_qwen3(root / "draft", keep_layers=1, **options))
