"""Small language models in training: the network of the kinds that need nothing of the target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.flags import flag_name
from slipstream.layers.parameters import Part
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import CheckpointSource, TensorSource
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.parallel.mask_token import MASK_TOKEN_KEYS
from slipstream.train.dense import DENSE
from slipstream.train.files import copy_tokenizer, write_checkpoint
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.recipe import Order, Workshop

SHAPE_OPTIONS = frozenset(
    {
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "init",
    }
)
_SIZES = SHAPE_OPTIONS - {"init"}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A drafter that is a language model of the target's tokenizer.

    Attributes:
        config: its config.json.
        shape: the same, read.
    """

    config: dict[str, Any]
    shape: DecoderConfig
    network: Decoder
    trained: Trainable
    target: Path

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """As transformers would save it, the tokenizer beside it."""
        write_checkpoint(folder, self.config, dict(self.trained.named()), dtype)
        copy_tokenizer(self.target, folder)


def build_language_model(
    workshop: Workshop, num_tokens: int | None = None, **more: Any
) -> LanguageModel:
    """With the weights of `--init`, or new ones in a smaller copy of the target's shape.

    Args:
        num_tokens: rows of the embedding; None for as many as the target (or `--init`) has.
        more: keys for its config.json.
    """
    order, device = workshop.order, workshop.target.device
    config, shape = planned(order, num_tokens, **more)
    initial: TensorSource = FreshSource(device, order.settings.seed)
    begun = _begun(order)
    if begun is not None:
        initial = _Longer(CheckpointSource(begun, torch.float32, device), begun, initial)
    trained = Trainable(initial)
    longest = max(2 * order.length, shape.max_position_embeddings)
    network = Decoder(DENSE, trained, shape, longest)
    return LanguageModel(config, shape, network, trained, order.target.path)


def planned(
    order: Order, num_tokens: int | None = None, **more: Any
) -> tuple[dict[str, Any], DecoderConfig]:
    """Its config.json, and the same read; see `build_language_model`."""
    begun = _begun(order)
    if begun is None:
        config = _smaller_config(order)
    else:
        _require_no_sizes(order)
        config = dict(begun.config)
        _require_tokens(str(order.settings.options.init), config, order.shape.vocab_size)
    config |= more
    if num_tokens is not None:
        config["vocab_size"] = num_tokens
    return config, read_decoder_config(config, MASK_TOKEN_KEYS)


def _begun(order: Order) -> Checkpoint | None:
    """What it begins with."""
    init = order.settings.options.init
    if init is None:
        return None
    begun = Checkpoint(resolve_checkpoint(init))
    refuse_quantized(
        begun.config, begun.config_file, "training cannot begin with; use unquantised ones"
    )
    return begun


def _smaller_config(order: Order) -> dict[str, Any]:
    """The target's config.json with a quarter of its layers at half of its width, or what the
    options say."""
    options, shape = order.settings.options, order.shape
    heads = options.num_heads or max(1, shape.num_heads // 2)
    kv_heads = options.num_kv_heads or max(1, shape.num_kv_heads // 2)
    layers = options.num_layers or max(1, shape.num_layers // 4)
    if heads % kv_heads:
        raise UsageError(f"--num-heads ({heads}) must be a multiple of --num-kv-heads ({kv_heads})")
    config = {
        **order.target.config,
        "hidden_size": options.hidden_size or max(16, shape.hidden_size // 2),
        "intermediate_size": options.intermediate_size or max(16, shape.intermediate_size // 2),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": options.head_dim or shape.head_dim,
        "tie_word_embeddings": True,
    }
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    return config


def _require_no_sizes(order: Order) -> None:
    for name in sorted(_SIZES):
        if getattr(order.settings.options, name) is not None:
            raise UsageError(f"{flag_name(name)} is given by --init; leave one of them out")


def _require_tokens(name: str, config: dict[str, Any], wanted: int) -> None:
    found = read_decoder_config(config, MASK_TOKEN_KEYS).vocab_size
    if found < wanted:
        raise CheckpointError(
            f"{name} knows {found} tokens and the target {wanted}; begin with a model of the "
            "target's tokenizer"
        )


class _Longer:
    """A checkpoint's tensors, with new rows behind those of its embedding where more are asked for.

    A tied head is the embedding; one of its own gets new rows too.
    """

    def __init__(
        self, tensors: CheckpointSource, checkpoint: Checkpoint, fresh: TensorSource
    ) -> None:
        self._tensors, self._entries, self._fresh = tensors, checkpoint.entries, fresh

    def matrix(self, parts: Any, columns: int) -> Tensor:
        entry = self._entries.get(parts[0].name)
        if len(parts) > 1 or entry is None or entry.shape[0] >= parts[0].rows:
            return self._tensors.matrix(parts, columns)
        name, rows = parts[0].name, entry.shape[0]
        stored = self._tensors.matrix([Part(name, rows)], columns)
        added = self._fresh.matrix([Part(name, parts[0].rows - rows)], columns)
        return torch.cat((stored, added))

    def vector(self, parts: Any) -> Tensor:
        return self._tensors.vector(parts)
