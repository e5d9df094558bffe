"""MTP modules (DeepSeek-AI 2024, arXiv 2412.19437) for a target that came without.

One module drafts all places, each from what it gave for the place before, and learns so (FastMTP:
K recursive passes, whose losses count by 0.6^k). Embedding and lm_head are the target's. Exported
in the style of the speculators library, which other engines read for dense targets.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slipstream.models.loading import LoadOptions
from slipstream.speculative.mtp.checkpoint import MtpCheckpoint
from slipstream.speculative.mtp.config import MtpConfig, read_mtp_config
from slipstream.speculative.mtp.network import MtpHead
from slipstream.train.batches import Batch
from slipstream.train.dense import DENSE
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.recipe import Lesson, Order, Workshop
from slipstream.train.unroll import learn_chain, test_chain, unroll

OPTIONS = frozenset({"num_heads", "num_kv_heads", "head_dim", "intermediate_size", "place_decay"})
LEARNING_RATE = 1e-3
METHOD: dict[str, Any] = {"method": "mtp"}

PLACES, _DECAY = 3, 0.6
# Keys of config.json that name the target's shape differently from flag to flag.
_SIZES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}


class PlannedModule(MtpCheckpoint):
    """A module that has a config and no files yet."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(Path("drafter in training"))
        self._planned = config

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._planned


class MtpRecipe:
    """A module in training; see `Recipe`."""

    stream_layers: tuple[int, ...] = ()

    def __init__(self, workshop: Workshop) -> None:
        settings, target = workshop.settings, workshop.target
        self._places = workshop.order.places
        self._decay = settings.place_decay or _DECAY
        self._argmax_weight = settings.argmax_weight
        self.columns = Columns(None, target.config.vocab_size)
        self.config, planned = _plan(workshop.order)
        self._style = planned.style
        self.trained = Trainable(FreshSource(target.device, settings.seed))
        longest = max(workshop.order.length, target.config.max_position_embeddings)
        load = LoadOptions(torch.float32, target.device, "auto", longest)
        plain = replace(planned, style=planned.style.plain)
        self.network = MtpHead(DENSE, self.trained, plain, load)
        self.network.share(target.network.embedding, target.network.head)
        names = planned.modules[0]
        self.trained.put(f"{names.final_norm}.weight", target.network.norm.weight)
        # At first the module repeats what the target made of the token before.
        projection = dict(self.trained.named())[f"{names.projection}.weight"]
        width = len(projection)
        first = 0 if planned.style.feature_first else width
        projection[:, first : first + width] += torch.eye(width, device=target.device)

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        del generator  # nothing is left to chance
        places = unroll(self.network, 1, batch, self._places)
        return learn_chain(places, self._decay, self._argmax_weight)

    def test(self, batch: Batch) -> tuple[list[Agreement], torch.Tensor]:
        return test_chain(unroll(self.network, 1, batch, self._places))

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = dict(self._style.published(*named) for named in self.trained.named())
        write_checkpoint(folder, self.config, tensors, dtype)


def check(order: Order) -> None:
    """Sizes that make no layer."""
    _plan(order)


def build(workshop: Workshop) -> MtpRecipe:
    """A new module for the target."""
    return MtpRecipe(workshop)


def _plan(order: Order) -> tuple[dict[str, Any], MtpConfig]:
    """The config.json of a module, and the same read."""
    config = _module_config(order, order.places)
    return config, read_mtp_config(PlannedModule(config))


def _module_config(order: Order, places: int) -> dict[str, Any]:
    """A config.json of the speculators library; the layer is one of the target's own kind."""
    options = order.settings.options
    shape = dict(order.target.config)
    for key, name in _SIZES.items():
        if getattr(options, name) is not None:
            shape[key] = getattr(options, name)
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.6.0",
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": places,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": order.settings.target,
                "architectures": shape.get("architectures", []),
            },
        },
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": shape,
    }
