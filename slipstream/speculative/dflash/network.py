"""DFlash (Chen et al. 2026): drafts a block in one pass, from the target's hidden states.

    c_p = norm(fc[streams of some layers of the target at token p])        the context
    layer: keys and values of c_p at position p, for all p before the draft block
    draft block: embeddings of the last known token and of mask tokens at the next
           positions; its rows attend to the context and to each other
    logits = lm_head(norm(x)); a mask token predicts the token of its own position

Every layer reads the same context vectors c_p, without its input norm; the context has no queries
and no feed-forward part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.core.errors import CheckpointError
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.attention import Attention
from slipstream.layers.layer import SublayerInput
from slipstream.layers.linear import column_linear
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import Part
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.speculative.drafter import DrafterLimits, Needs
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import HeadReader, head_reader, is_wrapped, read_layers
from slipstream.speculative.heads.kinds import StreamHeadConfig, stream_fields
from slipstream.speculative.heads.loading import HeadContext, HeadNetwork
from slipstream.speculative.model_options import ModelOptions

T = TypeVar("T")
C = TypeVar("C", bound="DFlashConfig")
_BLOCK, _MASK = "block_size", "mask_token_id"
_LAYERS, _ENTERED = "target_layer_ids", "aux_hidden_state_layer_ids"
_USUAL_BLOCK = 8  # the default of the speculators library
# Keys of training, and of a correction head that plain checkpoints leave at its defaults.
_NOT_READ = {
    "auf": bool,
    "emb_dim": int,
    "gru_hidden_dim": int,
    "lambda_base_decay_ratio": float,
    "lambda_base_start": float,
    "max_anchors": int,
    "pure_draft_prefix_len": int,
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(StreamHeadConfig):
    """The config of a DFlash network.

    Attributes:
        mask_token: token id of the mask, the input of unknown tokens of the draft block.
        block_size: rows of a draft block, including the last known token's row.
        causal: per layer, whether attention within the draft block is causal.
        from_anchor: a row predicts the token after its own position, as in a language model.
        target_layers: number of layers of the target it was trained for; None if not stated.
        parallel: see `DrafterLimits`.
    """

    parallel: ClassVar[bool] = True

    mask_token: int
    block_size: int
    causal: tuple[bool, ...]
    from_anchor: bool
    target_layers: int | None

    @property
    def max_drafts(self) -> int:
        """Number of tokens that a draft block predicts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def features(self) -> str:
        layers = self.entered_layers
        which = f"layers {', '.join(map(str, layers))}" if layers else f"{self.num_read} layers"
        return f"the residual streams that enter {which}"

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"it gives all draft tokens from one pass, {self.max_drafts} at most, with mask token "
            f"{self.mask_token}",
        )

    @property
    def num_read(self) -> int:
        return len(self.entered_layers or self.layers.sliding_windows)

    def stream_layers(self, target_layers: int) -> tuple[int, ...]:
        if self.entered_layers is not None:
            return self.entered_layers
        count = self.num_read
        if count == 1:
            return (target_layers // 2 + 1,)
        # Evenly spaced, from the output of layer 1 to the output of the third last layer.
        step = (target_layers - 4) / (count - 1)
        return tuple(round(1 + index * step) + 1 for index in range(count))

    def problems(self, target: DecoderConfig) -> list[str]:
        problems = super().problems(target)
        if self.target_layers not in (None, target.num_layers):
            problems.append(
                f"it was trained for a target of {self.target_layers} layers, and this one has "
                f"{target.num_layers}"
            )
        layers = self.stream_layers(target.num_layers)
        if any(not 0 <= layer <= target.num_layers for layer in layers):
            problems.append(
                f"it reads the streams that enter layers {', '.join(map(str, layers))}; a target "
                f"of {target.num_layers} layers has those of 0 to {target.num_layers} (its "
                f"config.json may list others, less one, as {_LAYERS})"
            )
        return problems

    def needs(self, target: DecoderConfig) -> Needs:
        """Features are cached as keys and values, so no token is ever recomputed for them."""
        return replace(super().needs(target), features=False)

    def limits(self, options: ModelOptions, longest: int, identity: str) -> DrafterLimits:
        limits = super().limits(options, longest, identity)
        return replace(limits, max_speculative_tokens=self.max_drafts, parallel=self.parallel)


class BlockKeys:
    """The config keys of a block drafter. They may be at the top level or in `dflash_config`, which
    has precedence."""

    def __init__(self, reader: HeadReader) -> None:
        self.outer: ConfigReader = reader
        self.inner = reader.nested("dflash_config")

    def take(self, key: str, kind: type[T]) -> T | None:
        """The value of `key` at either level; None if it is missing."""
        outer, inner = (it.take_optional(key, kind) for it in (self.outer, self.inner))
        return outer if inner is None else inner

    def take_or(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key` at either level, or `default` if it is missing."""
        value = self.take(key, kind)
        return default if value is None else value

    def expect(self, key: str, value: object) -> None:
        """Raise CheckpointError if `key` has another value than `value`, at either level."""
        self.outer.expect(key, value)
        self.inner.expect(key, value)


def read_dflash_config(checkpoint: HeadCheckpoint) -> DFlashConfig:
    """Read a DFlash config: plain, with a nested `dflash_config`, or wrapped by speculators."""
    return read_block_config(checkpoint, DFlashConfig, "dflash")


def read_block_config(
    checkpoint: HeadCheckpoint,
    kind: type[C],
    projector: str,
    read_own: Callable[[BlockKeys], dict[str, Any]] = lambda keys: {},
    from_anchor: bool = False,
    free_windows: bool | None = None,
) -> C:
    """Read the keys that DFlash has in common with the methods built on it.

    Args:
        projector: the value of `projector_type`.
        read_own: reads the fields that only this kind of config has.
        from_anchor: the default of `DFlashConfig.from_anchor`.
        free_windows: whether sliding windows are not causal within a block by default.
    """
    _refuse_extra_weights(checkpoint)
    reader = head_reader(checkpoint)
    keys = BlockKeys(reader)
    for key, type_read in _NOT_READ.items():
        reader.take_optional(key, type_read)
    keys.expect("sliding_window_prefix", 0)
    keys.inner.expect("attention_sink_bias", False)
    keys.expect("projector_type", projector)
    own = read_own(keys)
    wrapped = is_wrapped(checkpoint.config)
    block, mask = keys.take(_BLOCK, int), keys.take(_MASK, int)
    stated = [flag for flag in (keys.take(key, bool) for key in _SHIFTED) if flag is not None]
    entered = _entered_layers(keys)
    causal = _causal_flag(keys, free_windows)
    draft_vocab_size = reader.take_optional("draft_vocab_size", int)
    target_hidden_size = keys.take("target_hidden_size", int)
    target_layers = reader.take_optional("num_target_layers", int)
    reader.take("bias", bool, False)  # whether fc has a bias is read from the tensors
    keys.inner.finish()
    layers = read_layers(reader, checkpoint.tensor_names)
    if block is None and not wrapped:
        raise reader.error(_BLOCK, "is missing; add how many rows its draft blocks have")
    if mask is None or not 0 <= mask < layers.vocab_size:
        raise reader.error(
            _MASK, f"must be one of the {layers.vocab_size} token ids of its vocabulary, not {mask}"
        )
    if block is not None and block < 2:
        raise reader.error(
            _BLOCK, f"is {block}, but a draft block holds a known token and one more"
        )
    config = kind(
        **own,
        **stream_fields(checkpoint, layers, draft_vocab_size, own_head=False),
        mask_token=mask,
        block_size=block or _USUAL_BLOCK,
        entered_layers=entered,
        causal=_causal_layers(causal, layers.sliding_windows),
        from_anchor=any(stated) if stated else from_anchor,
        target_hidden_size=target_hidden_size,
        target_layers=target_layers,
    )
    return replace(config, num_tokens=config.num_tokens or config.max_drafts)


_SHIFTED = ("sample_from_anchor", "shift_label")


def _refuse_extra_weights(checkpoint: HeadCheckpoint) -> None:
    """Raise CheckpointError if there is a file of weights that is not supported."""
    file = checkpoint.path / "mask_embedding.pt"
    if file.exists():
        raise CheckpointError(
            f"{file}: a mask embedding in a file of its own is not supported; write it into the "
            "row of mask_token_id of an embed_tokens.weight in the checkpoint"
        )


def _entered_layers(keys: BlockKeys) -> tuple[int, ...] | None:
    """The target layers whose inputs are read. `target_layer_ids` names layers by their outputs,
    the speculators library's key by their inputs."""
    reader = keys.outer
    outputs = keys.take(_LAYERS, list)
    entered = reader.take_optional(_ENTERED, list)
    for key, ids in ((_LAYERS, outputs), (_ENTERED, entered)):
        if ids and (not all(type(index) is int for index in ids) or len(set(ids)) < len(ids)):
            raise reader.error(key, f"must be a list of layer numbers, each once, not {ids}")
    following = [index + 1 for index in outputs or ()]
    if following and entered and following != entered:
        raise reader.error(_ENTERED, f"and {_LAYERS} (plus one) differ; remove one of them")
    return tuple(entered or following) or None


def _causal_flag(keys: BlockKeys, free_windows: bool | None) -> bool | None:
    """Whether all layers are causal; None: only layers with a sliding window are."""
    stated_free = keys.take("sliding_window_non_causal", bool)
    stated = [keys.take(key, bool) for key in ("is_causal", "causal")]
    found = next((value for value in stated if value is not None), None)
    free = free_windows if stated_free is None else stated_free
    return False if found is None and free else found


def _causal_layers(stated: bool | None, windows: Sequence[int | None]) -> tuple[bool, ...]:
    return tuple(window is not None if stated is None else stated for window in windows)


class DFlashNetwork(HeadNetwork):
    """Maps features to the context's keys and values, and draft blocks to the lm_head's input."""

    def __init__(self, context: HeadContext, config: DFlashConfig) -> None:
        super().__init__(context, config)
        layers, width = config.layers, config.layers.hidden_size
        self._ops, self._causal, source = context.ops, config.causal, context.source
        columns = config.num_read * context.target_width
        self._fc = column_linear(source, [Part("fc", width)], columns, config.parts.fc_bias)
        self._context_norm = rms_norm(source, "hidden_norm", width, layers.rms_norm_eps)
        self._layers = context.layers(layers)
        self._norm = rms_norm(source, "norm", width, layers.rms_norm_eps)

    def context(self, streams: Sequence[Tensor]) -> Tensor:
        """Project the streams of the target's layers, [T, target width] each, to c_p [T, H]."""
        sides = [(stream, None) for stream in streams]
        fused = self._ops.joined_linear(sides, self._fc.weight, self._fc.bias)
        return self._ops.norm(fused, None, self._context_norm)[0]

    def store(self, context: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]) -> None:
        """Write the keys and values of context rows [T, H] to their slots, in every layer."""
        for layer, cache in zip(self._layers, caches, strict=True):
            assert isinstance(layer.mixer, Attention), "the context is keys and values"
            layer.mixer.store(self._ops, context, inputs, cache)

    def __call__(
        self, token_ids: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> Tensor:
        """Compute draft blocks of several requests: token_ids [T] -> [T, H], after the final norm.

        `caches` must already hold the context. The draft blocks' keys and values are written to
        the slots of `inputs`, and are valid during this pass only.
        """
        stream = SublayerInput(self.embedded(token_ids))
        for layer, cache, causal in zip(self._layers, caches, self._causal, strict=True):
            own = replace(inputs, sees=replace(inputs.sees, causal=causal))
            stream, _ = layer.apply(self._ops, stream, own, cache)
        assert stream.residual is not None, "a drafter has at least one layer"
        return self._ops.add_norm(stream.addend, stream.residual, self._norm)
