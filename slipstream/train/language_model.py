"""Draft models in training: small language models, which read nothing of the target."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.flags import flag_name
from slipstream.layers.parameters import Part
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import CheckpointSource, TensorSource
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.catalogue import DRAFTING_KEYS
from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import ChainRecipe, DraftPosition
from slipstream.train.dense import DENSE, DenseContext
from slipstream.train.files import copy_tokenizer
from slipstream.train.losses import Agreement, agreement
from slipstream.train.parameters import RandomSource
from slipstream.train.plan import RunPlan
from slipstream.train.recipe import LAYER_OPTIONS, Recipe, dense_config
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target

_SIZES = LAYER_OPTIONS | {"hidden_size", "num_layers"}
SHAPE_OPTIONS = _SIZES | {"init"}


class LanguageModelRecipe(Recipe[DecoderConfig]):
    """Trains a language model with the target's tokenizer.

    It starts from the weights of `--init`, or from random ones in a smaller shape of the target.
    """

    OPTIONS = SHAPE_OPTIONS
    LEARNING_RATE = 5e-4

    def __init__(self, plan: RunPlan, target: Target, sequences: Sequences) -> None:
        device, init = target.device, initial_checkpoint(plan)
        initial: TensorSource = RandomSource(device, plan.settings.seed)
        if init is not None:
            initial = _Enlarged(CheckpointSource(init, torch.float32, device), init, initial)
        super().__init__(plan, target, sequences, initial)
        longest = max(2 * plan.length, self.config.max_position_embeddings)
        self.network = Decoder(DENSE, self.trained, self.config, longest)

    @classmethod
    def changes(cls, plan: RunPlan) -> Mapping[str, Any]:
        """Keys of config.json that differ from the shape's."""
        return {}

    @classmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], DecoderConfig]:
        init = initial_checkpoint(plan)
        if init is None:
            config = _smaller_config(plan)
        else:
            for name in sorted(_SIZES):
                if getattr(plan.settings.options, name) is not None:
                    raise UsageError(f"{flag_name(name)} is given by --init; leave one of them out")
            config = dict(init.config)
            _require_tokens(str(plan.settings.options.init), config, plan.shape.vocab_size)
        config |= cls.changes(plan)
        return config, read_decoder_config(config, DRAFTING_KEYS)

    def next_logits(self, token_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """[B * Q, V] over the target's tokens, after rows [B, Q] at positions [Q].

        Args:
            mask: see `DenseRows`.
        """
        context = DenseContext(len(token_ids), self.config.num_layers)
        rows = context.rows(positions, mask)
        hidden, _ = self.network(token_ids.flatten(), rows, context.caches)
        # A drafter may have more rows than the target has tokens.
        return self.network.head(hidden)[:, : self.vocabulary.size]

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the model in the format of transformers, with the target's tokenizer."""
        super().export(folder, dtype)
        copy_tokenizer(self.plan.target.path, folder)

    def published(self) -> dict[str, Tensor]:
        return dict(self.trained.named())


class DraftRecipe(LanguageModelRecipe, ChainRecipe[DecoderConfig]):
    """A draft model in training, by self-distillation (Zhou et al. 2023, arXiv 2310.08461): KL
    against the target's distribution at every token, best over text that the target wrote itself
    (`--generate`)."""

    METHOD = "draft_model"
    NUM_DRAFT_TOKENS = 4

    def logits(self, batch: TrainingBatch) -> Tensor:
        """[B * S, V]."""
        positions = torch.arange(batch.shape[1], device=batch.token_ids.device)
        return self.next_logits(batch.token_ids, positions, None)

    def positions(self, batch: TrainingBatch) -> Iterable[DraftPosition]:
        """The first position; later ones are learned as the first ones of later drafts."""
        yield DraftPosition(self.logits(batch), batch.predictions, batch.weight.flatten())

    def evaluate(self, batch: TrainingBatch) -> tuple[list[Agreement], Tensor]:
        found = agreement(self.logits(batch), batch.predictions)
        weight = torch.ones_like(found.greedy)
        positions = []
        for count in range(self.num_draft_tokens):
            greedy, sampled = (batch.shifted(x, count) for x in (found.greedy, found.sampled))
            positions.append(Agreement(greedy, sampled))
            weight = weight * batch.shifted(batch.weight.flatten(), count)
        return positions, weight


def initial_checkpoint(plan: RunPlan) -> Checkpoint | None:
    """The checkpoint of `--init`."""
    init = plan.settings.options.init
    if init is None:
        return None
    checkpoint = Checkpoint(resolve_checkpoint(init))
    refuse_quantized(
        checkpoint.config,
        checkpoint.config_file,
        "training cannot begin with; use unquantised ones",
    )
    return checkpoint


def _smaller_config(plan: RunPlan) -> dict[str, Any]:
    """The target's config.json, without experts, with a quarter of its layers and half of its
    width, or as the options say."""
    options, shape = plan.settings.options, plan.shape
    heads = options.num_heads or max(1, shape.num_heads // 2)
    kv_heads = options.num_kv_heads or max(1, shape.num_kv_heads // 2)
    layers = options.num_layers or max(1, shape.num_layers // 4)
    if heads % kv_heads:
        raise UsageError(f"--num-heads ({heads}) must be a multiple of --num-kv-heads ({kv_heads})")
    config: dict[str, Any] = {
        **dense_config(plan),
        "hidden_size": options.hidden_size or max(16, shape.hidden_size // 2),
        "intermediate_size": options.intermediate_size or max(16, shape.intermediate_size // 2),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": options.head_dim or shape.head_dim,
        "tie_word_embeddings": True,
    }
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    return config


def _require_tokens(name: str, config: dict[str, Any], wanted: int) -> None:
    found = read_decoder_config(config, DRAFTING_KEYS).vocab_size
    if found < wanted:
        raise CheckpointError(
            f"{name} knows {found} tokens and the target {wanted}; begin with a model of the "
            "target's tokenizer"
        )


class _Enlarged:
    """The tensors of a checkpoint, whose embedding and lm_head get new rows where needed."""

    def __init__(
        self, tensors: CheckpointSource, checkpoint: Checkpoint, added: TensorSource
    ) -> None:
        self._tensors, self._entries, self._added = tensors, checkpoint.entries, added

    def matrix(self, parts: Any, columns: int) -> Tensor:
        entry = self._entries.get(parts[0].name)
        if len(parts) > 1 or entry is None or entry.shape[0] >= parts[0].rows:
            return self._tensors.matrix(parts, columns)
        name, rows = parts[0].name, entry.shape[0]
        stored = self._tensors.matrix([Part(name, rows)], columns)
        added = self._added.matrix([Part(name, parts[0].rows - rows)], columns)
        return torch.cat((stored, added))

    def vector(self, parts: Any) -> Tensor:
        return self._tensors.vector(parts)
