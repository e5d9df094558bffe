"""`p-eagle`: EAGLE-3 heads that draft all tokens in one pass."""

from slipstream.speculative.eagle3 import is_eagle3
from slipstream.speculative.method import MOST_AT_ONCE, CheckpointSigns, Method
from slipstream.speculative.parallel import MASK_ID_KEYS


def _recognise(signs: CheckpointSigns) -> bool:
    masked = any(signs.config.get(key) is not None for key in MASK_ID_KEYS)
    return is_eagle3(signs) and (masked or "mask_hidden" in signs.names)


METHOD = Method(
    name="p-eagle",
    module="slipstream.speculative.p_eagle.network",
    spellings=("p_eagle", "peagle"),
    architectures=("PEagleDraftModel",),
    recognise=_recognise,
    library_names=("peagle",),
    is_head=True,
    parallel_of="eagle3",
    most_chosen=MOST_AT_ONCE,
)
