"""A checkpoint's properties, from its configs and tensor headers; no weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch

    from slipstream.models.checkpoint import Checkpoint
    from slipstream.models.decoder_config import DecoderConfig
    from slipstream.models.gguf.container import TypeBytes
    from slipstream.models.quantized.module import StoredQuantization
    from slipstream.speculative.heads.kinds import HeadConfig

BLOCK_SIZE = 16
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


# Rows of a pass: one, a verification of the default number of draft tokens, and a batch.
_ROWS = (1, 5, 32)


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint and the properties that its files declare.

    Attributes:
        num_parameters: of the stored tensors, a tied head counted once; of a quantised checkpoint
            those of the weight matrices. None without weights.
        num_bytes: size of the stored tensors; None without weights.
        config: None for drafting heads without transformer layers.
        kind: the drafting method that it can serve, as `method` spells it.
        head: for a drafting head, its facts; None for a language model.
        own_drafter: the drafter that a language model's checkpoint includes, in words.
        quantization: the format of quantised weight matrices, in words.
        types: the tensor types of a GGUF file and how they are loaded; empty for other checkpoints.
    """

    checkpoint: "Checkpoint"
    config: "DecoderConfig | None"
    num_parameters: int | None
    num_bytes: int | None
    has_chat_template: bool
    kind: str
    head: "HeadConfig | None" = None
    own_drafter: str | None = None
    quantization: str | None = None
    types: "Sequence[TypeBytes]" = ()

    @property
    def is_language_model(self) -> bool:
        from slipstream.speculative.catalogue import LANGUAGE_MODEL

        return self.kind == LANGUAGE_MODEL

    @property
    def problem(self) -> str | None:
        """The error with which loading would refuse the tensors of a language model, by their
        headers; None: they fit its config, or there are none."""
        from slipstream.models.tensor_check import require_tensors

        if self.config is None or self.head is not None:
            return None
        if not self.checkpoint.has_weights:
            return self.checkpoint.unread_weights
        try:
            require_tensors(self.checkpoint, self.config)
        except CheckpointError as error:
            return str(error)
        return None

    def _experts(self) -> dict[str, Any] | None:
        """The experts and, for passes of some rows, how many of a layer are read (expected if every
        row chose independently) and the bytes of all matrices (None if the stored format does not
        tell them from shapes alone); None where no layer has experts."""
        config = self.config
        if config is None or config.experts is None:
            return None
        from slipstream.models.precision import expected_experts
        from slipstream.models.quantized.catalogue import read_quantization

        routing, stored = config.experts.routing, None
        if self.head is None:
            stored = read_quantization(self.checkpoint.config, self.checkpoint.config_file)
        return {
            "num_experts": routing.num_experts,
            "num_experts_per_token": routing.num_chosen,
            "expert_size": config.experts.intermediate_size,
            "shared_expert_size": config.experts.shared_size,
            "num_active_parameters": config.num_active_parameters,
            "touched": [
                {
                    "rows": rows,
                    "experts": round(expected_experts(routing, rows), 1),
                    "num_bytes": _pass_bytes(config, rows, stored),
                }
                for rows in _ROWS
            ],
        }

    @property
    def _architecture(self) -> str | None:
        from slipstream.models.config_reader import architecture_names

        names = architecture_names(self.checkpoint.config)
        if self.config is not None and (self.head is None or not names):
            return self.config.architecture
        return names[0] if names else None

    @property
    def _trained_tokens(self) -> int | None:
        """The number of draft tokens that a parallel drafter was trained for."""
        from slipstream.speculative.catalogue import parallel_method
        from slipstream.speculative.parallel.rows import read_mask_token

        if self.head is not None:
            return self.head.trained_tokens
        if parallel_method(self.kind) is None:
            return None
        return read_mask_token(self.checkpoint).trained_tokens

    def document(self) -> dict[str, Any]:
        """The document of --json; None for what is absent."""
        from slipstream.models.config_reader import TARGET_ADAPTER
        from slipstream.speculative.heads.config import wrapped_target

        head = self.head
        return {
            "path": str(self.checkpoint.path),
            "architecture": self._architecture,
            "kind": "language_model" if self.is_language_model else self.kind,
            "features": head.features if head else None,
            "num_speculative_tokens": head.num_tokens if head else None,
            "trained_tokens": self._trained_tokens,
            "target": wrapped_target(self.checkpoint.config),
            "target_adapter": self.checkpoint.config.get(TARGET_ADAPTER),
            "own_drafter": self.own_drafter,
            "num_parameters": self.num_parameters,
            "num_bytes": self.num_bytes,
            "quantization": self.quantization,
            "types": [asdict(each) for each in self.types],
            **self._sizes(),
            "experts": self._experts(),
            "eos_token_ids": list(self.checkpoint.eos_token_ids),
            "has_chat_template": self.has_chat_template,
            **self._cache_sizes(),
            "kernels": kernel_backend(),
            "problem": self.problem,
        }

    def _sizes(self) -> dict[str, Any]:
        dtype = self.checkpoint.weights_dtype if self.config is None else self.config.dtype
        known: Mapping[str, int | None] = {}
        if self.config is not None:
            known = _latent_sizes(self.config)
        elif self.head is not None:
            known = self.head.sizes
        sizes = {
            name: known[name] if name in known else getattr(self.config, name, None)
            for name in (*_SIZES, "latent_size")
        }
        note = None if self.config is None else _dtype_note(self.config.dtype)
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        return {"dtype": name, "dtype_note": note, **sizes}

    def _cache_sizes(self) -> dict[str, int | None]:
        """Cache sizes in bytes: per token and block in all layers, the part of a token that is kept
        only for the last `window` tokens, and the recurrent state of a request."""
        shape, per_token, windowed, window = self.config, 0, 0, None
        state = per_draft = 0
        keeps_none = self.head is not None and not self.head.keeps_blocks
        if shape is not None and not keeps_none:
            layout = shape.cache_layout(shape.dtype)
            window = layout.window(shape.max_position_embeddings)
            per_token = layout.bytes_per_token
            windowed = layout.windowed_bytes_per_token if window else 0
            state, per_draft = (
                layout.bytes_per_request,
                layout.state_bytes(1) - layout.state_bytes(0),
            )
        return {
            "kv_bytes_per_token": per_token,
            "kv_bytes_per_block": per_token * BLOCK_SIZE,
            "kv_bytes_in_windows": windowed,
            "window": window,
            "state_bytes_per_request": state,
            "state_bytes_per_draft_token": per_draft,
        }


def _latent_sizes(config: "DecoderConfig") -> dict[str, int | None]:
    """Sizes of heads with latent attention, which caches one row per token."""
    latent = config.latent_attention
    if latent is None:
        return {}
    return {
        "num_heads": latent.num_heads,
        "num_kv_heads": None,
        "head_dim": latent.plain_dim + latent.rotary_dim,
        "latent_size": latent.latent_rows,
    }


def _pass_bytes(
    config: "DecoderConfig", rows: int, stored: "StoredQuantization | None"
) -> int | None:
    from slipstream.models.precision import pass_bytes

    try:
        return int(pass_bytes(config, rows, config.dtype, stored=stored))
    except UsageError:  # numbers cannot be rounded to the stored format
        return None


def read_facts(name: str) -> CheckpointFacts:
    """Read a checkpoint. A language model may lack weights, a drafting head may not.

    Raises:
        CheckpointError: not a checkpoint, an unknown architecture, or a head without weights.
    """
    from slipstream.models.catalogue import read_decoder_config
    from slipstream.models.chat_template import has_chat_template
    from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
    from slipstream.models.quantized.catalogue import read_quantization
    from slipstream.models.tokenizer import has_tokenizer
    from slipstream.speculative.catalogue import DRAFTING_KEYS, recognise
    from slipstream.speculative.heads.checkpoint import HeadCheckpoint
    from slipstream.speculative.loading import describe_head, describe_own_head

    path = resolve_checkpoint(name, pickled=True)
    of_head = HeadCheckpoint(path)
    kind = recognise(of_head.config, of_head.tensor_names)
    head = describe_head(kind, of_head)
    if head is not None and not of_head.has_weights:
        raise CheckpointError(
            f"{path} is a drafter of the kind {kind} by its config.json, but has no weights; "
            "download them, or finish the training run that writes them"
        )
    checkpoint = Checkpoint(path) if head is None else of_head
    config = read_decoder_config(checkpoint, DRAFTING_KEYS) if head is None else head.layers
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
        has_tokenizer(checkpoint.path) and has_chat_template(checkpoint.path),
        kind,
        head,
        describe_own_head(of_head) if head is None else None,
        None if stored is None else stored.description,
        _types(checkpoint, config),
    )


def _types(checkpoint: "Checkpoint", config: "DecoderConfig | None") -> "Sequence[TypeBytes]":
    from slipstream.models.gguf.container import types_by_bytes
    from slipstream.models.gguf.files import is_gguf
    from slipstream.runner.capability import default_dtype, kept_formats

    if config is None or not is_gguf(checkpoint.path):
        return ()
    device = _device()
    dtype, _ = default_dtype(device, config.dtype)
    return types_by_bytes(checkpoint.container, dtype, kept_formats(device))


def _dtype_note(stored: "torch.dtype") -> str | None:
    """The dtype in which this machine computes by default, and why; None: it is `stored`."""
    from slipstream.runner.capability import default_dtype

    dtype, why = default_dtype(_device(), stored)
    return f"{str(dtype).removeprefix('torch.')} by default: {why}" if why else None


def kernel_backend() -> str:
    from slipstream.kernels.registry import kernels_for

    return kernels_for(_device()).network.backend


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
