"""The decoder network: embedding, layers, final norm and LM head."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.delta_net import DeltaNet, WaitingRows
from slipstream.layers.embedding import Embedding, LogitCurve, own_head, tied_head
from slipstream.layers.expert_pool import ExpertPool
from slipstream.layers.layer import BuildContext, build_layers
from slipstream.layers.layer_inputs import LayerInputs
from slipstream.layers.parameters import WHOLE, ParameterSource, Share
from slipstream.layers.rope import RopeTables
from slipstream.layers.stack import Stack, StreamAddends
from slipstream.models.decoder_config import DecoderConfig


class Decoder:
    """A decoder: computes hidden states (after the final norm) from token ids; `head` has logits.

    Args:
        max_positions: number of rows of the rotary embedding tables.
        share: this rank's share of the network; `source` must have the same.
        adapters: receives slots for LoRA adapters of the layers; None: no adapters.
        num_composed: maximum of rows of a pass with M-RoPE positions; see `RopeTables`.
        pool: see `BuildContext`.
    """

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        config: DecoderConfig,
        max_positions: int,
        share: Share = WHOLE,
        adapters: AdapterSlots | None = None,
        num_composed: int = 0,
        pool: ExpertPool | None = None,
    ) -> None:
        self.config, self.adapters, self.pool = config, adapters, pool
        self._last_id: int | None = None  # larger ids are read as this one
        width = config.hidden_size
        self.embedding = Embedding(source, "model.embed_tokens", config.vocab_size, width, share)
        self.ropes = ropes = RopeTables(
            max_positions, self.embedding.device, num_composed=num_composed
        )
        context = BuildContext(source, width, ropes, share, adapters, pool)
        self.layers = build_layers(config.layers, context)
        self._layer_inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            sizes = config.vocab_size, config.rms_norm_eps
            self._layer_inputs = LayerInputs(config.layer_inputs, context, *sizes)
        self._ops = ops
        norms = replace(config.layers[0].norms, eps=config.rms_norm_eps)
        self.norm = norms.load(source, "model.norm", width)
        self._stack = Stack(
            ops,
            self.layers,
            self.norm,
            num_apart=config.num_added_layers,
            windows=config.sliding_windows if config.windowed_sight else (),
        )
        curve = LogitCurve(config.logit_scale, config.logit_softcap)
        self.head = (
            tied_head(ops, source, self.embedding, curve)
            if config.tie_word_embeddings
            else own_head(ops, source, "lm_head", self.embedding, curve)
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden_size], the scaled embeddings that enter the first layer."""
        x, scale = self.embedding(self._known(token_ids)), self.config.embedding_scale
        if scale is not None and self.config.embedding_scale_rounded:
            scale = torch.tensor(scale, dtype=x.dtype).item()
        return x if scale is None else x * scale

    def read_larger_ids(self) -> None:
        """Let ids that have no row, which are another model's padding, be read as the last one."""
        self._last_id = self.config.vocab_size - 1

    def _known(self, token_ids: Tensor) -> Tensor:
        return token_ids if self._last_id is None else token_ids.clamp(max=self._last_id)

    def assist(self, num_rows: int) -> None:
        """Compute shares of experts in a pass of `num_rows` rows of other ranks, with no rows of
        its own."""
        assert self.pool is not None, "there are other ranks"
        self.pool.assist(self._ops, num_rows)

    def save_states(self, waiting: WaitingRows, caches: Sequence[LayerCache]) -> None:
        """Write checkpoints of recurrent states that include rows which wait; one cache for each
        layer with a mixer."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        for mixer, cache in zip(mixers, caches, strict=True):
            if isinstance(mixer, DeltaNet):
                mixer.save(self._ops, waiting, cache)

    def renumber(self, token_ids: Tensor) -> None:
        """Give token i the embedding of token_ids[i], [n] int64."""
        self.embedding.renumber(token_ids)
        if self._layer_inputs is not None:
            self._layer_inputs.table.renumber(token_ids)

    def __call__(
        self,
        token_ids: Tensor,
        inputs: PassInputs,
        caches: Sequence[LayerCache],
        stream_layers: Sequence[int] = (),
        embedded: Tensor | None = None,
        added: StreamAddends | None = None,
        read: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one forward pass.

        Args:
            token_ids: [T].
            caches: one for each layer with a mixer.
            stream_layers: layers (from 0) whose incoming residual stream is returned, too; the
                number of layers means the stream that enters the final norm.
            embedded: [T, hidden_size], used instead of the embeddings of the tokens.
            added: image features, added to the stream after the first `config.num_added_layers`
                layers, or None.
            read: [n] int64 in ascending order, the rows whose output is read; None: all. The last
                feed-forward part leaves the others out, unless its output is returned as a stream.

        Returns:
            [T, hidden_size] after the final norm, undefined in rows that are not read; and the
            streams in the order asked for, each [T, hidden_size].
        """
        x = self.embed(token_ids) if embedded is None else embedded
        if self._layer_inputs is not None:
            inputs = replace(
                inputs, layer_inputs=self._layer_inputs(self._ops, self._known(token_ids), x)
            )
        hidden, streams = self._stack([x], inputs, caches, stream_layers, added, read)
        scale = self.config.stream_scale
        return hidden, streams if scale is None else [stream * scale for stream in streams]
