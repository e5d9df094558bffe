"""What every kind of drafter brings to training, and which kinds there are."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.train.batches import Batch
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parameters import Trainable
from slipstream.train.sequences import Sequences
from slipstream.train.settings import TrainSettings
from slipstream.train.target import Target

# A new kind is one file and one line here.
RECIPES = {
    "dflash": "slipstream.train.recipe_dflash",
    "draft": "slipstream.train.recipe_draft",
    "eagle3": "slipstream.train.recipe_eagle3",
    "medusa": "slipstream.train.recipe_medusa",
    "mtp": "slipstream.train.recipe_mtp",
    "p-eagle": "slipstream.train.recipe_p_eagle",
    "pard": "slipstream.train.recipe_pard",
}


@dataclass(frozen=True, eq=False)
class Lesson:
    """What one batch taught.

    Attributes:
        loss: scalar, to be differentiated.
        matches: [K] float32, of each place of a draft: the share of rows whose first choice is the
            target's.
    """

    loss: Tensor
    matches: Tensor


class Recipe(Protocol):
    """A drafter in training.

    Attributes:
        trained: its parameters.
        columns: its draft vocabulary.
        stream_layers: of the target, which it reads; see `Decoder`.
    """

    @property
    def trained(self) -> Trainable: ...

    @property
    def columns(self) -> Columns: ...

    @property
    def stream_layers(self) -> tuple[int, ...]: ...

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        """One pass over a batch. All chance comes from the generator, which lives on the host."""

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        """The places of the drafts that begin behind every token, and the drafts' weights [N]."""

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        """Write what the engine, and others, load: config.json and weights."""


@dataclass(frozen=True, eq=False)
class Order:
    """What is asked for, known before data are made and the target is loaded.

    Attributes:
        target: its directory.
        shape: its config.
        length: tokens of a sequence.
        places: of a draft.
        rate: the highest learning rate.
        dtype: of products.
    """

    settings: TrainSettings
    target: Checkpoint
    shape: DecoderConfig
    length: int
    places: int
    rate: float
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Workshop:
    """What a recipe is made from.

    Attributes:
        sequences: to be trained on.
    """

    order: Order
    target: Target
    sequences: Sequences

    @property
    def settings(self) -> TrainSettings:
        return self.order.settings


class RecipeModule(Protocol):
    """The module of a kind.

    Attributes:
        OPTIONS: what it heeds of the fields of `DrafterOptions` and of `LOSS_OPTIONS`.
        PLACES: of a draft, where nothing else is asked for.
        LEARNING_RATE: its own.
        METHOD: how the engine is told to load it: keys of `speculative_config` beside `model`.
    """

    OPTIONS: frozenset[str]
    PLACES: int
    LEARNING_RATE: float
    METHOD: dict[str, Any]

    def check(self, order: Order) -> None:
        """Raise UsageError for an order that no drafter of this kind can meet."""

    def build(self, workshop: Workshop) -> Recipe: ...


def recipe_module(kind: str) -> RecipeModule:
    """Raises UsageError for a kind that there is none of."""
    name = RECIPES.get(kind.replace("_", "-"))
    if name is None:
        raise UsageError(f"there is no recipe for {kind!r}; there are {', '.join(RECIPES)}")
    return cast(RecipeModule, import_module(name))
