"""`dflash`: drafts a block of tokens in one pass, from the target's hidden states (DFlash)."""

from slipstream.speculative.method import MOST_AT_ONCE, Method

METHOD = Method(
    name="dflash",
    module="slipstream.speculative.dflash.drafter",
    architectures=("DFlashDraftModel",),
    recognise=lambda signs: "dflash_config" in signs.config,
    library_names=("dflash",),
    is_head=True,
    most_chosen=MOST_AT_ONCE,
)
