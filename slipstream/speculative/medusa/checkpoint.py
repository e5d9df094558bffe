"""Reads checkpoints of Medusa heads, in three formats.

These are FasterDecoding's (`medusa_lm_head.pt` or `.safetensors`), its second version without
lm_heads, and the one converted for vLLM. The canonical names are those of the last:

    {head}.{j}.linear.weight, .bias      blocks.{head}.layers.{j}.weight, .bias
    {head}.{layers}.weight               lm_heads.{head}.weight
                                         lm_head.weight, one for all heads
                                         token_map, the ids of a reduced vocabulary

If the original trainer is asked for several layers per head, it applies one layer repeatedly; a
checkpoint without copies then stores only the first layer. Sizes are read from the tensors, since
configs of old heads have wrong ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.kinds import HeadConfig
from slipstream.speculative.heads.last_hidden import FEATURES
from slipstream.speculative.medusa import BLOCK, HEAD, PREFIX, canonical_name, own_head

SHARED_HEAD: Final = "lm_head"
TOKEN_MAP: Final = "token_map"
DEFAULT_NUM_HEADS: Final = 4

# Keys that trainers copy from the target's config, or that only tree decoding and other servers
# use; sizes are read from the tensors.
_HARMLESS = HARMLESS_KEYS | set(
    """
    attention_bias base_model_name_or_path head_dim hidden_act hidden_size intermediate_size
    layer_types max_paths max_position_embeddings max_seq_len max_window_layers medusa_choices
    medusa_fc_bias mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    original_lm_head rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    tie_word_embeddings topk use_sliding_window version vocab_size
    """.split()
)


@dataclass(frozen=True)
class MedusaShape:
    """The structure of Medusa heads.

    Attributes:
        num_layers: layers of each head.
        shares_layer: per head, whether only its first layer is stored, which is then repeated.
        bias: whether the layers have biases.
        heads: each head has its "own" lm_head, all share "one", or they use the "target"'s.
        num_rows: rows of a stored lm_head.
        num_legal_tokens: size of the draft vocabulary, Vq.
        vocabulary: [Vq] int64, rising token ids of the draft vocabulary; None: 0 to Vq - 1.
        head_rows: [Vq] int64, their rows of an lm_head; None: all rows in order.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    shares_layer: tuple[bool, ...]
    bias: bool
    heads: Literal["own", "one", "target"]
    num_rows: int
    num_legal_tokens: int
    vocabulary: Tensor | None = None
    head_rows: Tensor | None = None

    def layer_name(self, head: int, layer: int) -> str:
        return f"blocks.{head}.layers.{0 if self.shares_layer[head] else layer}"


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """The config without the heads' shape, which depends on the target's vocabulary."""

    checkpoint: "MedusaCheckpoint"

    features = FEATURES

    @property
    def sizes(self) -> Mapping[str, int | None]:
        heads = self.checkpoint
        if not heads.has_weights:
            return {}
        first = heads.entries.get("blocks.0.layers.0.weight")
        width = None if first is None else first.shape[-1]
        return {"hidden_size": width, "vocab_size": heads.num_rows()}

    def problems(self, target: DecoderConfig) -> list[str]:
        try:
            if self.checkpoint.has_weights:
                read_shape(self.checkpoint, target.hidden_size, target.vocab_size)
        except CheckpointError as error:
            return [str(error)]
        return []


def read_medusa_config(checkpoint: "MedusaCheckpoint") -> MedusaConfig:
    """Read the config; raises CheckpointError if the checkpoint has no Medusa heads."""
    return MedusaConfig(layers=None, num_tokens=checkpoint.num_heads(), checkpoint=checkpoint)


@dataclass(frozen=True)
class _Counts:
    """Sizes stated in the config; None if absent."""

    heads: int | None
    layers: int | None
    truncated_vocab_size: int | None


class MedusaCheckpoint(HeadCheckpoint):
    """A checkpoint of Medusa heads, under canonical tensor names."""

    def canonical(self, name: str) -> str:
        return canonical_name(name)

    @property
    def layers_before_head(self) -> int:
        """Layers before the lm_head, counted from the original tensor names; 0 if it has others."""
        heads = [HEAD.match(PREFIX.sub("", name)) for name in self.stored]
        return max((int(head[2]) for head in heads if head), default=0)

    def num_heads(self) -> int:
        """The number of stored heads; without weights, the config's number."""
        if not self.has_weights:
            return _read_counts(self).heads or DEFAULT_NUM_HEADS
        return len(_blocks(self))

    def num_rows(self) -> int | None:
        """Rows of a stored lm_head; None if the target's is used."""
        name = _stored_head(self)
        return None if name is None else self.entries[name].shape[0]


def dummy_shape(checkpoint: "MedusaCheckpoint", hidden_size: int, vocab_size: int) -> MedusaShape:
    """Derive the shape from the config, for random weights."""
    counts = _read_counts(checkpoint)
    heads = checkpoint.num_heads()
    layers = counts.layers or 1
    return MedusaShape(
        heads, layers, hidden_size, (False,) * heads, True, "own", vocab_size, vocab_size
    )


def read_shape(checkpoint: MedusaCheckpoint, hidden_size: int, vocab_size: int) -> MedusaShape:
    """Derive the shape from the tensors and the config.

    Args:
        hidden_size, vocab_size: sizes of the target.

    Raises:
        CheckpointError: the tensors are no Medusa heads, or do not fit this target.
    """
    counts, blocks = _read_counts(checkpoint), _blocks(checkpoint)
    heads = len(blocks)
    if counts.heads is not None and counts.heads > heads:
        raise CheckpointError(
            f"{checkpoint.path} holds {heads} Medusa heads, but its config.json states "
            f"{counts.heads}; download it again, or correct the config"
        )
    _require_width(checkpoint, hidden_size)
    most = max(checkpoint.layers_before_head, counts.layers or 1)
    layers = _num_layers(checkpoint, most, blocks)
    shape = MedusaShape(
        num_heads=heads,
        num_layers=layers,
        hidden_size=hidden_size,
        shares_layer=tuple(blocks[head] == {0} for head in range(heads)),
        bias="blocks.0.layers.0.bias" in checkpoint.entries,
        heads=_whose_heads(checkpoint),
        num_rows=vocab_size,
        num_legal_tokens=vocab_size,
    )
    return _with_vocabulary(shape, checkpoint, counts, vocab_size)


def _blocks(checkpoint: MedusaCheckpoint) -> dict[int, set[int]]:
    """The layer indices of each head; CheckpointError unless heads are numbered from 0."""
    blocks: dict[int, set[int]] = {}
    for name in checkpoint.entries:
        if found := BLOCK.match(name):
            blocks.setdefault(int(found[1]), set()).add(int(found[2]))
    if not blocks or set(blocks) != set(range(len(blocks))):
        raise CheckpointError(
            f"{checkpoint.path} holds no Medusa heads numbered from 0 on (0.0.linear.weight or "
            "blocks.0.layers.0.weight); it is a checkpoint of another kind, or incomplete"
        )
    return blocks


def _read_counts(checkpoint: Checkpoint) -> _Counts:
    if not checkpoint.config_file.is_file():
        return _Counts(None, None, None)
    refuse_quantized(checkpoint.config, checkpoint.config_file)
    reader = ConfigReader(checkpoint.config, checkpoint.config_file, harmless=_HARMLESS)
    heads = _first_count(reader, "medusa_num_heads", "num_medusa_heads", "num_heads")
    layers = _first_count(reader, "medusa_num_layers", "num_medusa_layers", "num_layers")
    if layers is None and checkpoint.config.get("model_type") == "medusa":
        layers = _first_count(reader, "num_hidden_layers")
    truncated = reader.take_optional("truncated_vocab_size", int)
    reader.finish()
    return _Counts(heads, layers, truncated)


def _first_count(reader: ConfigReader, *keys: str) -> int | None:
    found = None
    for key in keys:
        value = reader.take_optional(key, int)
        if value is not None and value < 1:
            raise reader.error(key, f"must be above 0, not {value}")
        found = value if found is None else found
    return found


def _require_width(checkpoint: MedusaCheckpoint, hidden_size: int) -> None:
    entry = checkpoint.entries.get("blocks.0.layers.0.weight")
    if entry is None:
        raise CheckpointError(f"{checkpoint.path} has a bias of layer 0 of head 0, but no weight")
    if entry.shape != (hidden_size, hidden_size):
        raise CheckpointError(
            f"the Medusa heads in {checkpoint.path} read hidden states of {entry.shape[-1]} "
            f"numbers and the target's have {hidden_size}; they were trained for another target"
        )


def _num_layers(checkpoint: Checkpoint, least: int, blocks: Mapping[int, set[int]]) -> int:
    """Layers per head: the stored number, or if config or names state a larger one and a single
    layer is stored, that number."""
    layers = max(least, *(max(own) + 1 for own in blocks.values()))
    for head, own in blocks.items():
        if own not in ({0}, set(range(layers))):
            raise CheckpointError(
                f"head {head} in {checkpoint.path} has the layers "
                f"{', '.join(map(str, sorted(own)))} of {layers}; download it again, or correct "
                "the number of layers in its config.json"
            )
    return layers


def _whose_heads(checkpoint: MedusaCheckpoint) -> Literal["own", "one", "target"]:
    if f"{own_head(0)}.weight" in checkpoint.entries:
        return "own"
    return "one" if f"{SHARED_HEAD}.weight" in checkpoint.entries else "target"


def _stored_head(checkpoint: MedusaCheckpoint) -> str | None:
    """The name of the first stored lm_head; None if there is none."""
    stored = {"own": own_head(0), "one": SHARED_HEAD, "target": None}[_whose_heads(checkpoint)]
    return None if stored is None else f"{stored}.weight"


def _with_vocabulary(
    shape: MedusaShape, checkpoint: MedusaCheckpoint, counts: _Counts, vocab_size: int
) -> MedusaShape:
    """Add the draft vocabulary and the corresponding rows of an lm_head to the shape."""
    rows = checkpoint.num_rows() or vocab_size
    shape = replace(shape, num_rows=rows)
    if TOKEN_MAP in checkpoint.entries:
        return _with_token_map(shape, checkpoint, vocab_size)
    if rows == vocab_size or (rows == counts.truncated_vocab_size and rows < vocab_size):
        return replace(shape, num_legal_tokens=rows)
    raise CheckpointError(
        f"the Medusa heads in {checkpoint.path} guess among {rows} tokens and the target has "
        f"{vocab_size}; they were trained for another target"
    )


def _with_token_map(
    shape: MedusaShape, checkpoint: MedusaCheckpoint, vocab_size: int
) -> MedusaShape:
    """Apply `token_map` [n] of token ids; an lm_head has rows for these or for all tokens."""
    ids, order = checkpoint.integers(TOKEN_MAP).sort()
    in_range = len(ids) > 0 and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    if not in_range or bool((ids.diff() == 0).any()):
        raise CheckpointError(
            f"tensor {TOKEN_MAP} in {checkpoint.path} must hold different token ids below the "
            f"target's {vocab_size}; the heads were trained for another target"
        )
    if shape.num_rows not in (len(ids), vocab_size):
        raise CheckpointError(
            f"the lm_heads in {checkpoint.path} have {shape.num_rows} rows, but {TOKEN_MAP} names "
            f"{len(ids)} tokens of the target's {vocab_size}; they must have as many as either"
        )
    rows: Tensor | None = ids if shape.num_rows == vocab_size else order
    if rows is not None and torch.equal(rows, torch.arange(shape.num_rows)):
        rows = None
    return replace(shape, num_legal_tokens=len(ids), vocabulary=ids, head_rows=rows)
