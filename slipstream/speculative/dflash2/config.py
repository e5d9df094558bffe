"""What a DFlash2 drafter is made of."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any

from slipstream.core.errors import CheckpointError
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.safetensors_file import TensorEntry
from slipstream.speculative.dflash.config import BlockKeys, DFlashConfig, read_block_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import is_wrapped

# Key: field, type, and what a config means that does not have it.
_OWN: dict[str, tuple[str, type[Any], float]] = {
    "conv_kernel_size": ("taps", int, 2),
    "conv_group_size": ("group_size", int, 16),
    "selector_rank": ("rank", int, 256),
    "selector_top_k": ("num_candidates", int, 16),
    "input_embedding_scale": ("embedding_scale", float, 1.0),
    "output_multiplier": ("logit_scale", float, 1.0),
    "final_logit_softcapping": ("softcap", float, 0.0),
}


class DFlash2Checkpoint(HeadCheckpoint):
    """The base kernels are [2, taps, H] in files; they are read as [2 taps, H]."""

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors by canonical names."""
        return {
            name: replace(entry, shape=(prod(entry.shape[:-1]), entry.shape[-1]))
            if name.endswith(".base_kernel") and len(entry.shape) == 3
            else entry
            for name, entry in super().entries.items()
        }


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """Everything that the network is built from.

    Attributes:
        taps: of each convolution, the row's own included.
        group_size: channels that share what a row adds to a kernel.
        rank: of the scores of pairs of tokens.
        num_candidates: tokens that are chosen among in each place, the likeliest ones.
        embedding_scale, logit_scale: factors of embeddings and logits.
        softcap: logits stay between it and its negative; 0: they are not capped.
    """

    taps: int
    group_size: int
    rank: int
    num_candidates: int
    embedding_scale: float
    logit_scale: float
    softcap: float

    def problems(self, target: DecoderConfig) -> list[str]:
        problems = super().problems(target)
        if self.draft_vocab_size != self.layers.vocab_size:
            problems.append("it drafts some of the tokens only, which its selector does not know")
        return problems


def read_dflash2_config(checkpoint: HeadCheckpoint) -> DFlash2Config:
    """The keys of DFlash, those of the convolutions and those of the selector."""
    own: dict[str, Any] = {}

    def read_own(keys: BlockKeys) -> None:
        keys.expect("projector_type", "dflash2")
        for key, (field, kind, usual) in _OWN.items():
            own[field] = value = keys.take_or(key, kind, usual)
            if value < 0 or (value == 0 and field != "softcap"):
                raise keys.outer.error(key, f"must be above 0, not {value}")

    free_windows = True if is_wrapped(checkpoint.config) else None
    base = read_block_config(checkpoint, read_own, free_windows=free_windows)
    width, vocab_size = base.layers.hidden_size, base.layers.vocab_size
    if width % own["group_size"] or own["num_candidates"] > vocab_size:
        raise CheckpointError(
            f"{checkpoint.config_file}: conv_group_size must divide the hidden size {width}, and "
            f"selector_top_k must not be above the {vocab_size} tokens of the vocabulary"
        )
    return DFlash2Config(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        **own,
    )
