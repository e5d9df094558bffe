"""The decoder network of the Llama family: one body, switches in its config."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.stack_parts import StackParts
from slipstream.kernels.table import Ops
from slipstream.layers.attention import Attention, AttentionShape
from slipstream.layers.embedding import Embedding, own_head, tied_head
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import ParameterSource
from slipstream.layers.rope import rope_table
from slipstream.layers.stack import LayerCache, Stack, layer_parts
from slipstream.models.decoder_config import DecoderConfig


def attention_shape(config: DecoderConfig, index: int) -> AttentionShape:
    """Of the layer `index`."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        output_bias=config.o_bias,
        qk_norm=config.qk_norm,
        norm_eps=config.rms_norm_eps,
        window=config.sliding_windows[index],
    )


class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream.

    Attributes:
        parts: what it computes with.
    """

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        config: DecoderConfig,
        index: int,
        cos_sin: Tensor,
        name: str | None = None,
    ) -> None:
        name = name or f"model.layers.{index}"
        width, eps = config.hidden_size, config.rms_norm_eps
        shape = attention_shape(config, index)
        before = rms_norm(source, f"{name}.input_layernorm", width, eps)
        self.attention = Attention(ops, source, f"{name}.self_attn", width, width, shape, cos_sin)
        norm = rms_norm(source, f"{name}.post_attention_layernorm", width, eps)
        self.mlp = GatedMLP(source, f"{name}.mlp", norm, config.intermediate_size, config.mlp_bias)
        self.parts = layer_parts(before, self.attention, self.mlp)


class Decoder:
    """Token ids to hidden states (after the final norm), and hidden states to logits."""

    def __init__(
        self, ops: Ops, source: ParameterSource, config: DecoderConfig, max_positions: int
    ) -> None:
        self.config = config
        width = config.hidden_size
        self.embedding = Embedding(source, "model.embed_tokens", config.vocab_size, width)
        cos_sin = rope_table(config.head_dim, config.rope, max_positions, self.embedding.device)
        self.layers = [
            DecoderLayer(ops, source, config, index, cos_sin) for index in range(config.num_layers)
        ]
        self.norm = rms_norm(source, "model.norm", width, config.rms_norm_eps)
        self._stack = Stack(ops, StackParts([layer.parts for layer in self.layers], self.norm))
        self.head = (
            tied_head(ops, source, self.embedding)
            if config.tie_word_embeddings
            else own_head(ops, source, "lm_head", self.embedding)
        )

    def __call__(
        self,
        token_ids: Tensor,
        inputs: PassInputs,
        caches: Sequence[LayerCache],
        stream_layers: Sequence[int] = (),
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One pass.

        Args:
            token_ids: [T].
            caches: one (keys, values) per layer.
            stream_layers: layers (from 0) whose incoming residual stream is wanted as well; the
                number of layers stands for the stream that the final norm takes.
            embedded: [T, hidden_size], what enters the first layer in place of the embeddings.

        Returns:
            [T, hidden_size] after the final norm, and the streams in the order asked for, each
            [T, hidden_size].
        """
        x = self.embedding(token_ids) if embedded is None else embedded
        return self._stack([x], inputs, caches, stream_layers)
