"""What the keys of Gemma 4 and of its assistants say of attention."""

from collections.abc import Sequence
from typing import Any

from slipstream.layers.attention import AttentionSpec
from slipstream.layers.rope import RopeConfig
from slipstream.models.config_reader import ConfigReader
from slipstream.models.gemma_keys import FULL, SLIDING, read_typed_ropes

PATTERN = 6  # every sixth layer has full attention, unless the layers are listed
_ROPES = {FULL: RopeConfig(1e6, "proportional", rotated=0.25), SLIDING: RopeConfig(10_000.0)}
_LISTED = "per_layer_config"


def read_ropes(reader: ConfigReader, max_positions: int) -> dict[str, RopeConfig]:
    """What layers rotate by, for each type of them."""
    return read_typed_ropes(reader, max_positions, _ROPES)


def read_attention(
    reader: ConfigReader, attention: AttentionSpec, max_positions: int, slides: Sequence[bool]
) -> list[AttentionSpec]:
    """Layer by layer; those without a window may have heads of another size.

    Args:
        attention: of layers with a window, by its heads; the rest is read here.
    """
    ropes = read_ropes(reader, max_positions)
    window = reader.take("sliding_window", int, 512)
    if window < 1:
        raise reader.error("sliding_window", f"must be positive, not {window}")
    keys_as_values = reader.take("attention_k_eq_v", bool, False)
    full = {
        "head_dim": reader.take("global_head_dim", int, 512),
        "num_kv_heads": reader.take("num_global_key_value_heads", int, attention.num_kv_heads),
    }
    if not keys_as_values:
        full["num_kv_heads"] = attention.num_kv_heads
    listed = reader.take_optional(_LISTED, dict)
    layers = []
    for index, sliding in enumerate(slides):
        sizes = {} if sliding else full
        if listed is not None:
            sizes = _read_listed(reader, listed.get(str(index), {}))
        layers.append(
            AttentionSpec(
                num_heads=attention.num_heads,
                num_kv_heads=sizes.get("num_kv_heads", attention.num_kv_heads),
                head_dim=sizes.get("head_dim", attention.head_dim),
                rope=ropes[SLIDING if sliding else FULL],
                window=window if sliding else None,
                qk_norm=True,
                scale=1.0,
                keys_as_values=keys_as_values and not sliding,
                value_norm=True,
            )
        )
    return layers


def _read_listed(reader: ConfigReader, own: Any) -> dict[str, int]:
    """What differs in one layer, as newer exports have it."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if not isinstance(own, dict) or any(
        key not in names or type(value) is not int or value < 1 for key, value in own.items()
    ):
        raise reader.error(_LISTED, f"must give {' or '.join(names)} a layer, not {own}")
    return {names[key]: value for key, value in own.items()}
