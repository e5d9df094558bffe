"""`dflash`: drafts a block of tokens in one pass, from the target's hidden states (DFlash)."""

from slipstream.speculative.method import CheckpointSigns, Method


def _recognise(signs: CheckpointSigns) -> bool:
    return "dflash_config" in signs.config or "DFlashDraftModel" in signs.architectures


METHOD = Method(
    name="dflash",
    module="slipstream.speculative.dflash.drafter",
    recognise=_recognise,
    library_names=("dflash",),
    is_head=True,
)
