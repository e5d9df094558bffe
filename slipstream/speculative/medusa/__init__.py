"""`medusa`: heads on the target's last hidden state, one for each position after the next token.

The likeliest or sampled tokens of the heads form a chain; candidate trees are not supported.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from slipstream.models.config_reader import architecture_names
from slipstream.speculative.method import Method

# Names of tensors; `checkpoint.py` has the canonical ones.
PREFIX = re.compile(r"^(medusa_heads?|model)\.(?=\d+\.|blocks\.|lm_heads?\.|token_map)")
_LAYER = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")


def own_head(index: int) -> str:
    return f"lm_heads.{index}"


def names_medusa(config: Mapping[str, Any], tensor_names: Collection[str]) -> bool:
    """Whether a checkpoint holds Medusa heads."""
    architectures = architecture_names(config)
    if config.get("model_type") == "medusa" or any("Medusa" in it for it in architectures):
        return True
    if "medusa_num_heads" in config or "medusa_num_layers" in config:
        return True
    names = {canonical_name(name) for name in tensor_names}
    return any(BLOCK.match(name) for name in names)


def canonical_name(name: str) -> str:
    name = PREFIX.sub("", name)
    if layer := _LAYER.match(name):
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if head := HEAD.match(name):
        return f"{own_head(int(head[1]))}.weight"
    return name


METHOD = Method(
    name="medusa",
    module="slipstream.speculative.medusa.network",
    recognise=lambda signs: names_medusa(signs.config, signs.names),
    weight_files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    library_names=("medusa",),
    is_head=True,
)
