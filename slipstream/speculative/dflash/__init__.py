"""`dflash`: draft blocks from one pass over features of the target."""

from slipstream.speculative.method import CheckpointSigns, Method

_ARCHITECTURES = {"DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel"}


def _recognise(signs: CheckpointSigns) -> bool:
    return "dflash_config" in signs.config or bool(signs.architectures & _ARCHITECTURES)


METHOD = Method(
    name="dflash",
    module="slipstream.speculative.dflash.drafter",
    recognise=_recognise,
    library_names=("dflash", "dspark"),
    is_head=True,
)
