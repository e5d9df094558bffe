"""What a checkpoint is, from its headers and configs; no weights are read."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import CheckpointError

if TYPE_CHECKING:
    from slipstream.models.checkpoint import Checkpoint
    from slipstream.models.decoder_config import DecoderConfig
    from slipstream.speculative.heads.options import HeadFacts

BLOCK_SIZE = 16
DRAFT_MODEL = "draft_model"  # what any language model can be
_SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint with its config read.

    Attributes:
        num_parameters: of the network, a tied head counted once; stored ones where there are files,
            and of a quantised checkpoint those of the matrices.
        num_bytes: as stored; None without weights.
        config: None of heads without layers of a language model.
        kind: of drafter that it can be, as `method` names it.
        head: of a drafting head, which is no language model of its own.
        own_drafter: what a language model has beside it to draft with, in words.
        quantization: how its matrices are stored in fewer bits, in words.
    """

    checkpoint: "Checkpoint"
    config: "DecoderConfig | None"
    num_parameters: int | None
    num_bytes: int | None
    has_chat_template: bool
    kind: str
    head: "HeadFacts | None" = None
    own_drafter: str | None = None
    quantization: str | None = None

    @property
    def _architecture(self) -> str | None:
        names = self.checkpoint.config.get("architectures")
        if self.config is not None and (self.head is None or not names):
            return self.config.architecture
        return str(names[0]) if names else None

    @property
    def _trained_tokens(self) -> int | None:
        """Of a drafter that gives all draft tokens from one pass: how many it has learned to."""
        from slipstream.speculative.parallel.mask_token import drafts_in_parallel, read_mask_token

        if self.head is not None:
            return self.head.trained_tokens
        if not drafts_in_parallel(self.checkpoint.config):
            return None
        return read_mask_token(self.checkpoint).trained_tokens

    def document(self) -> dict[str, Any]:
        """For --json, and the source of what is shown; None for what there is not."""
        from slipstream.speculative.heads.config import wrapped_target

        head = self.head
        return {
            "path": str(self.checkpoint.path),
            "architecture": self._architecture,
            "kind": "language_model" if self.kind == DRAFT_MODEL else self.kind,
            "features": head.features if head else None,
            "num_speculative_tokens": head.num_tokens if head else None,
            "trained_tokens": self._trained_tokens,
            "target": wrapped_target(self.checkpoint.config),
            "own_drafter": self.own_drafter,
            "num_parameters": self.num_parameters,
            "num_bytes": self.num_bytes,
            "quantization": self.quantization,
            **self._sizes(),
            "eos_token_ids": list(self.checkpoint.eos_token_ids),
            "has_chat_template": self.has_chat_template,
            **self._cache_sizes(),
            "kernels": kernel_column(),
        }

    def _sizes(self) -> dict[str, Any]:
        dtype = self.checkpoint.weights_dtype if self.config is None else self.config.dtype
        named = dict.fromkeys(_SIZES) if self.config is None else vars(self.config)
        known = self.head.sizes if self.head is not None and self.config is None else {}
        sizes = {name: known.get(name, named[name]) for name in _SIZES}
        return {"dtype": None if dtype is None else str(dtype).removeprefix("torch."), **sizes}

    def _cache_sizes(self) -> dict[str, int]:
        from slipstream.cache.kv_cache import KVLayout

        shape, per_token = self.config, 0
        keeps_none = self.head is not None and not self.head.keeps_blocks
        if shape is not None and not keeps_none:
            layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype)
            per_token = layout.bytes_per_token
        return {"kv_bytes_per_token": per_token, "kv_bytes_per_block": per_token * BLOCK_SIZE}


def read_facts(name: str) -> CheckpointFacts:
    """Raises CheckpointError for what is no checkpoint, or of an architecture that is not known.

    Of a language model a config alone can be looked at; a drafting head is nothing without weights.
    """
    from slipstream.models.catalogue import read_decoder_config
    from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
    from slipstream.models.quantized.catalogue import read_quantization
    from slipstream.speculative.catalogue import describe_head, describe_own_head
    from slipstream.speculative.heads.checkpoint import HeadCheckpoint
    from slipstream.speculative.parallel.mask_token import MASK_TOKEN_KEYS
    from slipstream.speculative.recognition import recognise

    path = resolve_checkpoint(name, pickled=True)
    of_head = HeadCheckpoint(path)
    kind = recognise(of_head.config, of_head.tensor_names)
    head = describe_head(kind, of_head)
    if head is not None and not of_head.has_weights:
        raise CheckpointError(
            f"{path} is a drafter of the kind {kind} by its config.json, and has no weights; "
            "download them, or train to the end the run that is to write them"
        )
    checkpoint = Checkpoint(path) if head is None else of_head
    config = read_decoder_config(checkpoint, MASK_TOKEN_KEYS) if head is None else head.layers
    stored = None if head else read_quantization(checkpoint.config, checkpoint.config_file)
    entries = checkpoint.entries.values() if checkpoint.has_weights else ()
    count = sum(prod(entry.shape) for entry in entries) or None
    if stored is not None and config is not None and count is not None:
        count = config.num_matrix_parameters
    return CheckpointFacts(
        checkpoint,
        config,
        count,
        sum(entry.nbytes for entry in entries) or None,
        _has_chat_template(checkpoint),
        kind,
        head,
        describe_own_head(of_head) if head is None else None,
        None if stored is None else stored.description,
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
