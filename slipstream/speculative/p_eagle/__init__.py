"""`p-eagle`: EAGLE-3 heads that draft all tokens in one pass."""

from slipstream.speculative.eagle3 import is_eagle3
from slipstream.speculative.method import CheckpointSigns, Method
from slipstream.speculative.parallel import MASK_ID_KEYS


def _recognise(signs: CheckpointSigns) -> bool:
    if "PEagleDraftModel" in signs.architectures:
        return True
    masked = any(signs.config.get(key) is not None for key in MASK_ID_KEYS)
    return is_eagle3(signs) and (masked or "mask_hidden" in signs.names)


METHOD = Method(
    name="p-eagle",
    module="slipstream.speculative.p_eagle.drafter",
    spellings=("p_eagle", "peagle"),
    recognise=_recognise,
    library_names=("peagle",),
    is_head=True,
    parallel_of="eagle3",
)
