"""What a checkpoint is, from its headers and configs; no weights are read."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.models.checkpoint import Checkpoint
    from slipstream.models.decoder_config import DecoderConfig
    from slipstream.speculative.head_options import HeadFacts

BLOCK_SIZE = 16
DRAFT_MODEL = "draft_model"  # what any language model can be


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint with its config read.

    Attributes:
        num_parameters: of the network, a tied head counted once; stored ones where there are files.
        num_bytes: as stored; None without weights.
        kind: of drafter that it can be, as `method` names it.
        head: of a drafting head, which is no language model of its own.
    """

    checkpoint: "Checkpoint"
    config: "DecoderConfig"
    num_parameters: int | None
    num_bytes: int | None
    has_chat_template: bool
    kind: str
    head: "HeadFacts | None" = None

    @property
    def kv_bytes_per_token(self) -> int:
        from slipstream.cache.kv_cache import KVLayout

        if self.head is not None and not self.head.keeps_blocks:
            return 0
        shape = self.config
        layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype)
        return layout.bytes_per_token

    @property
    def _architecture(self) -> str:
        names = self.checkpoint.config.get("architectures")
        if self.head is None or not names:
            return self.config.architecture
        return str(names[0])

    def document(self) -> dict[str, Any]:
        """For --json, and the source of what is shown."""
        shape = self.config
        return {
            "path": str(self.checkpoint.path),
            "architecture": self._architecture,
            "kind": "language_model" if self.kind == DRAFT_MODEL else self.kind,
            "features": self.head.features if self.head else None,
            "num_parameters": self.num_parameters,
            "num_bytes": self.num_bytes,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_position_embeddings,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "eos_token_ids": list(self.checkpoint.eos_token_ids),
            "has_chat_template": self.has_chat_template,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_block": self.kv_bytes_per_token * BLOCK_SIZE,
            "kernels": kernel_column(),
        }


def read_facts(name: str) -> CheckpointFacts:
    """Raises CheckpointError for what is no checkpoint, or of an architecture that is not known."""
    from slipstream.models.catalogue import read_decoder_config
    from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
    from slipstream.models.drafters.head_checkpoint import HeadCheckpoint
    from slipstream.speculative.catalogue import describe_head
    from slipstream.speculative.mask_token import MASK_TOKEN_KEYS
    from slipstream.speculative.recognition import recognise

    path = resolve_checkpoint(name, pickled=True)
    of_head = HeadCheckpoint(path)
    kind = recognise(of_head.config, of_head.tensor_names)
    head = describe_head(kind, of_head)
    checkpoint = Checkpoint(path) if head is None else of_head
    config = read_decoder_config(checkpoint, MASK_TOKEN_KEYS) if head is None else head.layers
    entries = checkpoint.entries.values() if checkpoint.has_weights else ()
    return CheckpointFacts(
        checkpoint,
        config,
        sum(prod(entry.shape) for entry in entries) or None,
        sum(entry.nbytes for entry in entries) or None,
        _has_chat_template(checkpoint),
        kind,
        head,
    )


def kernel_column() -> str:
    """The kernels that this machine would use."""
    import torch

    from slipstream.kernels.table import ops_for

    return ops_for(torch.device("cuda" if torch.cuda.is_available() else "cpu")).column


def _has_chat_template(checkpoint: "Checkpoint") -> bool:
    from slipstream.models.chat_template import ChatTemplate
    from slipstream.models.tokenizer import Tokenizer

    if not (checkpoint.path / "tokenizer.json").is_file():
        return False
    return ChatTemplate(Tokenizer(checkpoint.path)).exists
