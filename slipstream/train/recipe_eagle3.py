"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), by training-time test.

The loss is the paper's cross-entropy against the target's distribution over the draft vocabulary,
minus the target's entropy, which makes it KL. Exports have the names and keys of SafeAILab's and
SpecForge's heads.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.decoder_config import DecoderConfig
from slipstream.speculative.eagle3.network import Eagle3Config, Eagle3Head, read_eagle3_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import ChainRecipe, DraftPosition, unroll
from slipstream.train.parameters import Trainable
from slipstream.train.plan import RunPlan
from slipstream.train.recipe import LAYER_OPTIONS, layer_config, planned_checkpoint
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target
from slipstream.train.vocabulary import DraftVocabulary

_DRAFT_VOCAB_SIZE = 32_000


class Eagle3Recipe(ChainRecipe[Eagle3Config]):
    """A head in training; see `Recipe`."""

    OPTIONS = LAYER_OPTIONS | {
        "draft_vocab_size",
        "share_head",
        "aux_layers",
        "num_layers",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "place_decay",
    }
    METHOD = "eagle3"
    NUM_DRAFT_TOKENS, DECAY = 5, 0.8

    def __init__(self, plan: RunPlan, target: Target, sequences: Sequences) -> None:
        super().__init__(plan, target, sequences)
        self.stream_layers = self.config.stream_layers(target.config.num_layers)
        self.num_layers = self.config.layers.num_layers
        self.network = Eagle3Head(self.context, self.config)
        self.network.share(target.network.embedding, target.network.head)
        initialise_head(self.trained, target, self.vocabulary)

    @classmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], Eagle3Config]:
        config = head_config(plan)
        head = read_eagle3_config(planned_checkpoint(HeadCheckpoint, config))
        head = replace(head, parts=replace(head.parts, head=not plan.settings.options.share_head))
        require_fit(head, plan.shape)
        return config, head

    @classmethod
    def draft_vocab_size(cls, plan: RunPlan) -> int | None:
        options = plan.settings.options
        if options.share_head:
            return None
        return options.draft_vocab_size or min(_DRAFT_VOCAB_SIZE, plan.shape.vocab_size)

    def positions(self, batch: TrainingBatch) -> Iterator[DraftPosition]:
        return unroll(self.network, self.num_layers, batch, self.num_draft_tokens)

    def published(self) -> dict[str, Tensor]:
        """Published heads with one layer call it `midlayer`."""
        tensors = super().published()
        if self.num_layers > 1:
            return tensors
        return {name.replace("layers.0.", "midlayer.", 1): t for name, t in tensors.items()}


def head_config(plan: RunPlan) -> dict[str, Any]:
    options, shape = plan.settings.options, plan.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_config(plan),
        "target_hidden_size": shape.hidden_size,
        "num_hidden_layers": options.num_layers or 1,
        "draft_vocab_size": Eagle3Recipe.draft_vocab_size(plan) or shape.vocab_size,
        "bias": False,
        "eagle_aux_hidden_state_layer_ids": list(
            options.aux_layers or usual_layers(shape.num_layers)
        ),
        "norm_before_fc": bool(options.norm_before_fc),
        "norm_before_residual": bool(options.norm_before_residual),
        "norm_output": bool(options.norm_output),
    }


def initialise_head(trained: Trainable, target: Target, vocabulary: DraftVocabulary) -> None:
    """Start from the target's lm_head, norm and embedding, where the head has its own.

    The feature starts as the last of the streams, which predicts the next token best.
    """
    network, named = target.network, dict(trained.named())
    rows, columns = named["fc.weight"].shape
    trained.add_identity("fc.weight", columns - rows)
    trained.put("norm.weight", network.norm.weight)
    if "lm_head.weight" in named:
        trained.put("lm_head.weight", vocabulary.rows(network.head.weight))
    if "embed_tokens.weight" in named:
        weight = network.embedding.weight
        table = weight.dequantised() if weight.floats is None else weight.floats
        trained.put("embed_tokens.weight", table)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose incoming streams are read by default: 2, n / 2 and n - 3.

    If the target has too few for that, three that are spread up to the output of the last layer.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    spread = {max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}
    return tuple(sorted(spread))


def require_fit(head: Eagle3Config, target: DecoderConfig) -> None:
    """Raise UsageError for a head that cannot draft for the target."""
    if problems := head.problems(target):
        raise UsageError(f"such a head cannot draft for this target: {'; '.join(problems)}")
