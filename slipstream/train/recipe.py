"""What every kind of drafter defines for training, and which kinds there are."""

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
from slipstream.train.batches import Batch
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement
from slipstream.train.parameters import RandomSource, Trainable
from slipstream.train.plan import RunPlan
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target
from slipstream.train.vocabulary import DraftVocabulary, most_frequent

# A new kind is one file and one line here.
RECIPES = {
    "dflash": "recipe_dflash.DFlashRecipe",
    "draft": "recipe_draft.DraftRecipe",
    "eagle3": "recipe_eagle3.Eagle3Recipe",
    "medusa": "recipe_medusa.MedusaRecipe",
    "mtp": "recipe_mtp.MtpRecipe",
    "p-eagle": "recipe_p_eagle.PEagleRecipe",
    "pard": "recipe_pard.PardRecipe",
}

LAYER_OPTIONS = frozenset({"num_heads", "num_kv_heads", "head_dim", "intermediate_size"})

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=HeadCheckpoint)
Config = TypeVar("Config")


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """The loss of one batch.

    Attributes:
        loss: scalar, to be differentiated.
        accuracy: [K] float32, for each draft position the share of rows whose top token is the
            target's.
    """

    loss: Tensor
    accuracy: Tensor


class Recipe(ABC, Generic[Config]):
    """A drafter in training.

    Args:
        sequences: to be trained on.
        initial: the tensors to start from; None: random ones.

    Attributes:
        OPTIONS: the fields of `DrafterOptions` and `LOSS_OPTIONS` that the kind reads.
        METHOD: its name in `speculative_config`.
        NUM_DRAFT_TOKENS, LEARNING_RATE, DECAY: defaults of the settings.
        config_json: the content of its config.json.
        config: what is read from that.
        trained: its parameters.
        vocabulary: what it drafts.
        stream_layers: layers of the target whose streams it reads; see `Decoder`.
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
        self.load = LoadOptions(torch.float32, target.device, "auto", plan.max_positions)

    @classmethod
    @abstractmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], Config]:
        """config.json, and what the network is built from.

        Raises UsageError for settings that no drafter of this kind can have.
        """

    @classmethod
    def draft_vocab_size(cls, plan: RunPlan) -> int | None:
        """The number of tokens that it drafts; None for all."""
        return plan.settings.options.draft_vocab_size

    @abstractmethod
    def training_loss(self, batch: Batch, generator: torch.Generator) -> BatchLoss:
        """One pass over a batch. All randomness comes from the generator, on the host."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        """The positions of drafts that start after every token, and the drafts' weights [N]."""

    def published(self) -> dict[str, Tensor]:
        """The tensors of the export by their published names."""
        named = {name.removeprefix("model."): tensor for name, tensor in self.trained.named()}
        return named | self.vocabulary.published()

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and weights as the engine, and others, load them."""
        adapter = self.plan.settings.lora
        made_for = {} if adapter is None else {TARGET_ADAPTER: str(adapter)}
        write_checkpoint(folder, {**self.config_json, **made_for}, self.published(), dtype)


def recipe_class(kind: str) -> type[Recipe[Any]]:
    """Raises UsageError for an unknown kind."""
    name = RECIPES.get(kind.replace("_", "-"))
    if name is None:
        raise UsageError(f"there is no recipe for {kind!r}; there are {', '.join(RECIPES)}")
    module, _, recipe = name.partition(".")
    return cast(type[Recipe[Any]], getattr(import_module(f"slipstream.train.{module}"), recipe))


def planned_checkpoint(kind: type[AnyCheckpoint], config: dict[str, Any]) -> AnyCheckpoint:
    """A checkpoint with a config and no files yet."""
    checkpoint = kind(Path("drafter in training"))
    vars(checkpoint)["config"] = config  # where the cached property keeps its value
    return checkpoint


def dense_config(plan: RunPlan) -> dict[str, Any]:
    """config.json of a target with experts as if all its layers were dense ones of Qwen3's kind,
    which other engines read as well; of a dense target its own, without what is quantised."""
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
    """Keys of config.json for a head whose layers by default have the shape of the target's."""
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
