"""`dflash2`: DFlash with local convolutions, which selects each token among a few candidates."""

from slipstream.speculative.method import MOST_AT_ONCE, Method

METHOD = Method(
    name="dflash2",
    module="slipstream.speculative.dflash2.network",
    architectures=("DFlash2DraftModel",),
    recognise=lambda signs: signs.has_tensors("candidate_selector."),
    library_names=("dflash2",),
    is_head=True,
    most_chosen=MOST_AT_ONCE,
)
