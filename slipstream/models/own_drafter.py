"""Which tensors and config keys of a checkpoint belong to MTP modules, by their published names.

    mtp.fc, mtp.norm, mtp.layers.{i}.*          Qwen3-Next and Qwen3.5
    model.mtp_layers.{i}.*                      MiMo
    model.layers.{n}.eh_proj and its layer      DeepSeek-V3 and GLM, n after the model's last layer
    mtp_layers.{i}.*                            the speculators library

A language model's checkpoint may include them; the model itself does not use them.
"""

import re
from collections.abc import Iterable
from typing import Final

OWN_DRAFTER_KEYS: Final = frozenset(
    {
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "num_mtp_layers",
        "num_nextn_predict_layers",
    }
)
"""Keys of a model's config.json that describe the MTP modules in its checkpoint."""

_PREFIXES = ("mtp.", "mtp_layers.")
_PROJECTION = re.compile(r"layers\.(\d+)\.eh_proj\.(?:weight|weight_packed|qweight)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def appended_layers(names: Iterable[str]) -> tuple[int, ...]:
    """The indices of the layers that are MTP modules, rising."""
    found = (_PROJECTION.fullmatch(name.removeprefix("model.")) for name in names)
    return tuple(sorted(int(match[1]) for match in found if match))


def own_drafter_tensors(names: Iterable[str]) -> frozenset[str]:
    """The subset of tensor names, stored or canonical, that belong to MTP modules."""
    names = list(names)
    layers = set(appended_layers(names))
    found = set()
    for name in names:
        short = name.removeprefix("model.")
        match = _LAYER.match(short)
        if short.startswith(_PREFIXES) or (match and int(match[1]) in layers):
            found.add(name)
    return frozenset(found)
