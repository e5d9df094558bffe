"""The interface of training recipes, one for each kind of drafter, and their list."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.layers.experts import ExpertsSpec
from slipstream.models.config_reader import TARGET_ADAPTER
from slipstream.models.loading import LoadOptions
from slipstream.models.parameter_sources import TensorSource
from slipstream.models.quantized.catalogue import QUANTIZATION_KEYS
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import HeadContext
from slipstream.train.batches import TrainingBatch
from slipstream.train.dense import DENSE
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement
from slipstream.train.parameters import RandomSource, Trainable
from slipstream.train.plan import RunPlan
from slipstream.train.sequences import Sequences
from slipstream.train.settings import RECIPES
from slipstream.train.target import Target
from slipstream.train.vocabulary import DraftVocabulary, most_frequent

LAYER_OPTIONS = frozenset({"num_heads", "num_kv_heads", "head_dim", "intermediate_size"})

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=HeadCheckpoint)
Config = TypeVar("Config")


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """The loss of one batch.

    Attributes:
        loss: scalar with gradient.
        accuracy: [K] float32, for each draft position the fraction of rows whose argmax equals the
            target's.
    """

    loss: Tensor
    accuracy: Tensor


class Recipe(ABC, Generic[Config]):
    """A drafter in training.

    Args:
        sequences: the training data.
        initial: initial weights; None: random.

    Attributes:
        OPTIONS: the fields of `DrafterOptions` and `LOSS_OPTIONS` that this kind uses.
        METHOD: the method's name in `speculative_config`.
        NUM_DRAFT_TOKENS, LEARNING_RATE, DECAY: defaults of the settings.
        config_json: content of the drafter's config.json.
        config: the parsed config.
        trained: the drafter's parameters.
        vocabulary: the draft vocabulary.
        stream_layers: layers of the target whose residual streams are inputs; see `Decoder`.
    """

    OPTIONS: ClassVar[frozenset[str]]
    METHOD: ClassVar[str]
    NUM_DRAFT_TOKENS: ClassVar[int]
    LEARNING_RATE: ClassVar[float] = 1e-3
    DECAY: ClassVar[float] = 1.0

    def __init__(
        self,
        plan: RunPlan,
        target: Target,
        sequences: Sequences,
        initial: TensorSource | None = None,
    ) -> None:
        settings, vocab_size = plan.settings, plan.shape.vocab_size
        self.plan = plan
        self.config_json, self.config = self.configure(plan)
        self.trained = Trainable(initial or RandomSource(target.device, settings.seed))
        kept = plan.target.eos_token_ids
        chosen = most_frequent(sequences, self.draft_vocab_size(plan), vocab_size, kept)
        self.vocabulary = DraftVocabulary(chosen, vocab_size, target.device)
        self.stream_layers: tuple[int, ...] = ()
        self.num_draft_tokens = plan.num_draft_tokens
        self.decay = settings.place_decay or self.DECAY
        self.argmax_weight = settings.argmax_weight
        load = LoadOptions(torch.float32, target.device, "auto", plan.max_positions)
        self.context = HeadContext(DENSE, self.trained, plan.shape.hidden_size, load)

    @classmethod
    @abstractmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], Config]:
        """Make config.json and the parsed config.

        Raises:
            UsageError: invalid settings for this kind.
        """

    @classmethod
    def draft_vocab_size(cls, plan: RunPlan) -> int | None:
        """Size of the draft vocabulary; None for the target's."""
        return plan.settings.options.draft_vocab_size

    @abstractmethod
    def training_loss(self, batch: TrainingBatch, generator: torch.Generator) -> BatchLoss:
        """The loss of a batch. All random numbers are drawn from `generator`, on the host."""

    @abstractmethod
    def evaluate(self, batch: TrainingBatch) -> tuple[list[Agreement], Tensor]:
        """Draft after every token, without training.

        Returns:
            The agreement with the target at each draft position, and the weights of the drafts [N].
        """

    def published(self) -> dict[str, Tensor]:
        """The tensors to export, by their published names."""
        named = {name.removeprefix("model."): tensor for name, tensor in self.trained.named()}
        return named | self.vocabulary.published()

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and weights in the published layout of this kind."""
        adapter = self.plan.settings.lora
        made_for = {} if adapter is None else {TARGET_ADAPTER: str(adapter)}
        write_checkpoint(folder, {**self.config_json, **made_for}, self.published(), dtype)


def recipe_class(kind: str) -> type[Recipe[Any]]:
    """The recipe of a kind of drafter; UsageError for an unknown one."""
    found = RECIPES.get(kind.replace("_", "-"))
    if found is None:
        raise UsageError(f"there is no recipe for {kind!r}; there are {', '.join(RECIPES)}")
    module, _, recipe = found[0].partition(".")
    return cast(type[Recipe[Any]], getattr(import_module(f"slipstream.train.{module}"), recipe))


def planned_checkpoint(kind: type[AnyCheckpoint], config: dict[str, Any]) -> AnyCheckpoint:
    """A checkpoint with this config but without files."""
    checkpoint = kind(Path("drafter in training"))
    vars(checkpoint)["config"] = config  # where the cached property keeps its value
    return checkpoint


def dense_config(plan: RunPlan) -> dict[str, Any]:
    """config.json for a dense draft model: the target's own without quantization, or for a target
    with experts a Qwen3 of its sizes, which other engines can load, too."""
    if not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in plan.shape.layers):
        config = plan.target.config
        return {key: config[key] for key in config if key not in QUANTIZATION_KEYS}
    shape = plan.shape
    return {
        **layer_config(plan),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "eos_token_id": list(plan.target.eos_token_ids),
    }


def layer_config(plan: RunPlan) -> dict[str, Any]:
    """Keys of config.json for a drafter's layers; sizes default to the target's."""
    options, shape = plan.settings.options, plan.shape
    return {
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": options.intermediate_size or shape.intermediate_size,
        "num_attention_heads": options.num_heads or shape.num_heads,
        "num_key_value_heads": options.num_kv_heads or shape.num_kv_heads,
        "head_dim": options.head_dim or shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }
