"""The decoder network: an embedding, layers of any kinds, a norm and a head."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Ops
from slipstream.layers.embedding import Embedding, own_head, tied_head
from slipstream.layers.layer import BuildContext, build_layers
from slipstream.layers.norm import rms_norm
from slipstream.layers.parameters import WHOLE, ParameterSource, Share
from slipstream.layers.rope import RopeTables
from slipstream.layers.stack import Stack
from slipstream.models.decoder_config import DecoderConfig


class Decoder:
    """Token ids to hidden states (after the final norm), and hidden states to logits.

    Args:
        share: of the network, which `source` knows as well.
    """

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        config: DecoderConfig,
        max_positions: int,
        share: Share = WHOLE,
    ) -> None:
        self.config = config
        width = config.hidden_size
        self.embedding = Embedding(source, "model.embed_tokens", config.vocab_size, width, share)
        ropes = RopeTables(max_positions, self.embedding.device)
        self.layers = build_layers(config.layers, BuildContext(source, width, ropes, share))
        self.norm = rms_norm(source, "model.norm", width, config.rms_norm_eps)
        self._stack = Stack(ops, self.layers, self.norm)
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
            caches: one for each layer with a mixer.
            stream_layers: layers (from 0) whose incoming residual stream is wanted as well; the
                number of layers stands for the stream that the final norm takes.
            embedded: [T, hidden_size], what enters the first layer in place of the embeddings.

        Returns:
            [T, hidden_size] after the final norm, and the streams in the order asked for, each
            [T, hidden_size].
        """
        x = self.embedding(token_ids) if embedded is None else embedded
        return self._stack([x], inputs, caches, stream_layers)
