"""The target as a teacher: its hidden states, streams and distributions over whole sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.reference.dense import logits as exact_logits
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import CheckpointSource
from slipstream.models.precision import in_precision
from slipstream.train.dense import DENSE, dense_rows, no_caches

# Rows whose logits over the whole vocabulary are in memory at once.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Seen:
    """What a drafter may see of the target's pass over sequences [B, S].

    Attributes:
        hidden: [B, S, H], behind the final norm.
        streams: residual streams that were asked for, each [B, S, H].
    """

    hidden: Tensor
    streams: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Wanted:
    """What the target says behind every row.

    Attributes:
        best: [N] int64, its first choice among all tokens.
        logits: [N, Vd] in the target's dtype, of the draft vocabulary.
        log_total: [N] float32, the log of the sum of exp over all tokens' logits.
    """

    best: Tensor
    logits: Tensor
    log_total: Tensor

    def rows(self, index: Tensor) -> "Wanted":
        """Some of the rows."""
        return Wanted(self.best[index], self.logits[index], self.log_total[index])


class Target:
    """A language model with its weights, which do not change.

    Attributes:
        path: its directory.
        config: its shape.
        network: over the dense column of ops.
    """

    def __init__(
        self, path: Path, config: DecoderConfig, network: Decoder, dtype: torch.dtype
    ) -> None:
        self.path, self.config, self.network, self.dtype = path, config, network, dtype

    @property
    def device(self) -> torch.device:
        return self.network.embedding.device

    @torch.no_grad()
    def read(self, token_ids: Tensor, stream_layers: Sequence[int]) -> Seen:
        """One pass over sequences [B, S]; see `Decoder` for `stream_layers`."""
        batch, length = token_ids.shape
        rows = dense_rows(batch, torch.arange(length, device=token_ids.device))
        caches = no_caches(self.config.num_layers)
        hidden, streams = self.network(token_ids.reshape(-1), rows, caches, stream_layers)
        shape = (batch, length, -1)
        return Seen(hidden.view(shape), tuple(stream.view(shape) for stream in streams))

    @torch.no_grad()
    def says(self, hidden: Tensor, vocabulary: Tensor | None) -> Wanted:
        """What it says behind hidden states [N, H], over a draft vocabulary [Vd] or all tokens."""
        best, kept, totals = [], [], []
        weight = self.network.head.weight
        for rows in torch.split(hidden, _ROWS_AT_ONCE):
            with torch.autocast(self.device.type, enabled=False):
                logits = exact_logits(rows, weight)
            best.append(logits.argmax(-1))
            chosen = logits if vocabulary is None else logits[:, vocabulary]
            kept.append(chosen.to(self.dtype))
            totals.append(logits.logsumexp(-1))
        return Wanted(torch.cat(best), torch.cat(kept), torch.cat(totals))


def load_target(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
) -> Target:
    """The network with its weights, for sequences of at most `longest` tokens and a draft."""
    source = CheckpointSource(checkpoint, dtype, device)
    network = Decoder(DENSE, in_precision(source, None, DENSE), config, longest)
    source.finish(ignored=("lm_head.weight",) if config.tie_word_embeddings else ())
    return Target(checkpoint.path, config, network, dtype)
