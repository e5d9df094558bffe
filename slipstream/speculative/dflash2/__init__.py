"""`dflash2`: DFlash with local convolutions, which selects each token among a few candidates."""

from slipstream.speculative.method import CheckpointSigns, Method


def _recognise(signs: CheckpointSigns) -> bool:
    named = "DFlash2DraftModel" in signs.architectures
    return named or any(name.startswith("candidate_selector.") for name in signs.names)


METHOD = Method(
    name="dflash2",
    module="slipstream.speculative.dflash2.network",
    recognise=_recognise,
    library_names=("dflash2",),
    is_head=True,
)
