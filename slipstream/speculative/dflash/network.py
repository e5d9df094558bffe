"""DFlash (Chen et al. 2026): a draft block from one pass, over features of the target.

    c_p = norm(fc[streams of some layers of the target at token p])        the context
    layer: keys and values of c_p at position p, for all p before the draft block
    draft block: embeddings of the last known token and of mask tokens, at the
           positions that follow; its rows see the context and each other
    logits = lm_head(norm(x)), of a mask for its own position

The context enters every layer as it is: it has no queries, no feed-forward part and no norm of the
layer.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Addend, Ops
from slipstream.layers.attention import Attention
from slipstream.layers.layer import BuildContext, build_layers
from slipstream.layers.linear import column_linear
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.layers.rope import RopeTables
from slipstream.models.loading import LoadOptions
from slipstream.speculative.dflash.config import DFlashConfig
from slipstream.speculative.heads.loading import HeadNetwork


class DFlashNetwork(HeadNetwork):
    """Features to keys and values of a context, and draft blocks to what enters the head."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        config: DFlashConfig,
        target_width: int,
        options: LoadOptions,
    ) -> None:
        super().__init__(ops, source, config)
        layers, width = config.layers, config.layers.hidden_size
        self._ops, self._causal = ops, config.causal
        self._fc = column_linear(
            source, [Part("fc", width)], config.num_read * target_width, config.parts.fc_bias
        )
        self._context_norm = rms_norm(source, "hidden_norm", width, layers.rms_norm_eps)
        ropes = RopeTables(options.max_positions, options.device)
        self._layers = build_layers(layers.layers, BuildContext(source, width, ropes))
        self._norm = rms_norm(source, "norm", width, layers.rms_norm_eps)

    def context(self, streams: Sequence[Tensor]) -> Tensor:
        """[T, target width] each -> [T, H]."""
        sides = [(stream, None) for stream in streams]
        fused = self._ops.joined_linear(sides, self._fc.weight, self._fc.bias)
        return self._ops.norm(fused, None, self._context_norm)[0]

    def store(self, context: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]) -> None:
        """Keys and values of context rows [T, H] go to their slots, in every layer."""
        for layer, cache in zip(self._layers, caches, strict=True):
            assert isinstance(layer.mixer, Attention), "the context is keys and values"
            layer.mixer.store(self._ops, context, inputs, cache)

    def __call__(
        self, token_ids: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> Tensor:
        """token_ids [T], draft blocks of several requests -> [T, H], behind the final norm.

        The context stands in `caches` already. The draft blocks' keys and values go to the slots
        of `inputs`, where they mean something until this pass ends.
        """
        addend: Addend = self.embedded(token_ids)
        residual: Tensor | None = None
        for layer, cache, causal in zip(self._layers, caches, self._causal, strict=True):
            own = replace(inputs, sees=replace(inputs.sees, causal=causal))
            addend, residual, _ = layer.apply(self._ops, addend, residual, own, cache)
        assert residual is not None, "a drafter has at least one layer"
        return self._ops.add_norm(addend, residual, self._norm)
