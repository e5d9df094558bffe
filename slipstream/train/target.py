"""The target during training: computes hidden states and predictions of whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.weight import Weight
from slipstream.layers.attention import AttentionSpec
from slipstream.models.adapters import adapter_rank
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import KEPT_ON_CPU, LoadOptions, load_decoder
from slipstream.runner.adapters import AdapterLoader
from slipstream.train.compiled import fused
from slipstream.train.dense import DENSE, THE_ADAPTER, DenseContext
from slipstream.train.vocabulary import DraftVocabulary

SMALL_TARGET = 200_000_000
"""Parameters up to which features are computed with every batch rather than kept."""
# Maximum number of rows whose full logits are in memory at a time.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class TargetStates:
    """The target's hidden states of sequences [B, S], which are inputs of drafters.

    Attributes:
        hidden: [B, S, H], after the final norm.
        streams: the requested residual streams, each [B, S, H].
    """

    hidden: Tensor
    streams: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class TargetDistribution:
    """The target's prediction of the next token after each of N rows, in the draft vocabulary.

    Attributes:
        top: [N] int64, column of the argmax over all tokens; -1 if it is not in the vocabulary.
        logits: [N, Vd] in the target's dtype.
        logsumexp: [N] float32, over the logits of all tokens.
    """

    top: Tensor
    logits: Tensor
    logsumexp: Tensor

    def rows(self, index: Tensor) -> "TargetDistribution":
        return TargetDistribution(self.top[index], self.logits[index], self.logsumexp[index])


@fused
def _summary(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The column of the maximum, and the logsumexp, each [N]."""
    return logits.argmax(-1), logits.logsumexp(-1)


@dataclass(eq=False)
class Target:
    """The target, whose weights are frozen.

    Attributes:
        path: directory of its checkpoint.
        network: the decoder, built with the ops of `dense.py`.
        adapter: directory of the LoRA adapter that is applied to all rows, or None.
    """

    path: Path
    config: DecoderConfig
    network: Decoder
    dtype: torch.dtype
    adapter: Path | None = None

    @property
    def device(self) -> torch.device:
        return self.network.embedding.device

    @torch.no_grad()
    def states(self, token_ids: Tensor, stream_layers: Sequence[int]) -> TargetStates:
        """Run the target on sequences [B, S]; see `Decoder` for `stream_layers`."""
        batch, length = token_ids.shape
        context = DenseContext(batch, self.config.num_layers, adapted=self.adapter is not None)
        rows, ids = context.rows(torch.arange(length, device=token_ids.device)), token_ids.flatten()
        with torch.autocast(self.device.type, enabled=False):
            hidden, streams = self.network(ids, rows, context.caches, stream_layers)
        shape = (batch, length, -1)
        return TargetStates(hidden.view(shape), tuple(stream.view(shape) for stream in streams))

    @torch.no_grad()
    def distribution(self, hidden: Tensor, vocabulary: DraftVocabulary) -> TargetDistribution:
        """Compute the predictions from hidden states [N, H]."""
        top, kept, totals = [], [], []
        head, token_ids = self.network.head, vocabulary.token_ids
        for rows in torch.split(hidden, _ROWS_AT_ONCE):
            with torch.autocast(self.device.type, enabled=False):
                logits = head(rows)
            largest, total = _summary(logits)
            top.append(largest)
            totals.append(total)
            chosen = logits if token_ids is None else logits[:, token_ids]
            kept.append(chosen.to(self.dtype))
        return TargetDistribution(
            vocabulary.columns(torch.cat(top)), torch.cat(kept), torch.cat(totals)
        )


def load_target(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    adapter: Path | None = None,
) -> Target:
    """Load the target, which may be quantised.

    Small targets are dequantised, because they run on every batch.

    Args:
        adapter: directory of a LoRA adapter that is applied to all rows, unmerged as in serving.

    Raises:
        CheckpointError: target or adapter are invalid, or do not fit each other.
    """
    small = config.num_matrix_parameters <= SMALL_TARGET
    kept = frozenset[type[Weight]]() if small else KEPT_ON_CPU
    slots = None if adapter is None else (1, adapter_rank(adapter))
    options = LoadOptions(dtype, device, "auto", max_positions, kept=kept, adapters=slots)
    network = load_decoder(checkpoint, options, config, DENSE)
    if adapter is not None:
        assert network.adapters is not None, "it was asked for slots"
        loader = AdapterLoader(network.adapters)
        loader.write(THE_ADAPTER, loader.read(str(adapter)))
    return Target(checkpoint.path, config, network, dtype, adapter)


def require_trainable(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Raise UsageError for targets with unsupported layers (only attention with its own KV cache
    is), or with RoPE that depends on the maximum length of requests."""
    mixers = [layer.mixer for layer in config.layers if layer.mixer is not None]
    if not all(isinstance(mixer, AttentionSpec) for mixer in mixers):
        raise UsageError(
            f"{checkpoint.path} has layers other than attention over keys and values, beside which "
            "drafters cannot be trained so far; take another target"
        )
    if any(mixer.kv_source is not None for mixer in mixers if isinstance(mixer, AttentionSpec)):
        raise UsageError(
            f"{checkpoint.path} has layers that read the cache of another, for which drafters "
            "cannot be trained so far; take another target"
        )
    if config.rope.depends_on_length:
        raise UsageError(
            f"{checkpoint.path} has rope of the kind {config.rope.kind}, which depends on the most "
            "tokens of a request, so a drafter would learn other features than it gets; take a "
            "target with another kind"
        )
