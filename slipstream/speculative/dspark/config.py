"""What a DSpark drafter is made of."""

from dataclasses import dataclass, fields

from slipstream.core.errors import CheckpointError
from slipstream.speculative.dflash.config import BlockKeys, DFlashConfig, read_block_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint

_HEAD_TYPES = ("vanilla", "gated", "rnn")
_USUAL_RANK = 256


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Everything that the network is built from.

    Attributes:
        rank: of the correction by the token before; 0: there is none.
        head_type: "vanilla": the correction follows from that token alone; "gated": the hidden
            state gates it; "rnn": it follows from all tokens of the block before.
        tells_confidence: a head estimates whether a place's token will be accepted.
        confidence_sees_token: that head reads the token before as well.
    """

    rank: int
    head_type: str
    tells_confidence: bool
    confidence_sees_token: bool


def read_dspark_config(checkpoint: HeadCheckpoint) -> DSparkConfig:
    """The keys of DFlash, and those of the two heads; tensors say which heads there are."""
    rank, head_type = _USUAL_RANK, "vanilla"
    confident, sees_token = True, True

    def read_own(keys: BlockKeys) -> None:
        nonlocal rank, head_type, confident, sees_token
        keys.expect("projector_type", "dspark")
        # A way to compute the correction for the likeliest tokens only, which costs nothing here.
        keys.take("dspark_draft_topk", int)
        rank = keys.take_or("markov_rank", int, _USUAL_RANK)
        head_type = keys.take_or("markov_head_type", str, "vanilla")
        confident = keys.take_or("enable_confidence_head", bool, True)
        sees_token = keys.take_or("confidence_head_with_markov", bool, True)
        if head_type not in _HEAD_TYPES:
            known = ", ".join(_HEAD_TYPES)
            raise keys.outer.error("markov_head_type", f"is {head_type!r}; supported are {known}")
        if rank < 0:
            raise keys.outer.error("markov_rank", f"must not be below 0, but is {rank}")

    base = read_block_config(checkpoint, read_own, from_anchor=True)
    if checkpoint.has_weights:
        confident = confident and "confidence_head.proj.weight" in checkpoint.tensor_names
    if confident and sees_token and not rank:
        raise CheckpointError(
            f"{checkpoint.config_file}: confidence_head_with_markov needs a markov_rank above 0"
        )
    return DSparkConfig(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        rank=rank,
        head_type=head_type,
        tells_confidence=confident,
        confidence_sees_token=sees_token,
    )
