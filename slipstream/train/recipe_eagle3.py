"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), by training-time test.

The loss is the paper's, cross-entropy against the target's distribution over the draft vocabulary,
less what does not depend on the head (so that it is KL). Exported with the names and keys of
SafeAILab's and SpecForge's heads.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.eagle3.config import (
    Eagle3Config,
    eagle3_problems,
    read_eagle3_config,
)
from slipstream.speculative.eagle3.network import Eagle3Head
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.train.batches import Batch
from slipstream.train.dense import DENSE
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.recipe import Lesson, Order, Workshop
from slipstream.train.unroll import learn_chain, test_chain, unroll
from slipstream.train.vocabulary import choose_tokens, membership, offsets, require_draft_vocabulary

OPTIONS = frozenset(
    {
        "draft_vocab_size",
        "share_head",
        "aux_layers",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "norm_before_residual",
        "norm_output",
        "place_decay",
    }
)
LEARNING_RATE = 1e-3
METHOD: dict[str, Any] = {"method": "eagle3"}

PLACES, _DECAY = 5, 0.8
_DRAFT_VOCAB_SIZE = 32_000


class PlannedHead(HeadCheckpoint):
    """A head that has a config and no files yet."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(Path("drafter in training"))
        self._planned = config

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._planned


class Eagle3Recipe:
    """A head in training; see `Recipe`."""

    def __init__(self, workshop: Workshop) -> None:
        order, settings, target = workshop.order, workshop.settings, workshop.target
        self._places = workshop.order.places
        self._decay = settings.place_decay or _DECAY
        self._argmax_weight = settings.argmax_weight
        vocab_size, shares = target.config.vocab_size, bool(settings.options.share_head)
        size, eos = draft_vocab_size(order), order.target.eos_token_ids
        chosen = choose_tokens(workshop.sequences, size, vocab_size, eos)
        self._token_ids = None if chosen is None else chosen.to(target.device)
        self.columns = Columns(self._token_ids, vocab_size)
        self.config, planned = _plan(order)
        self.stream_layers = planned.stream_layers(target.config.num_layers)
        self.num_layers = planned.layers.num_layers
        self.trained = Trainable(FreshSource(target.device, settings.seed))
        longest = max(order.length, target.config.max_position_embeddings)
        load = LoadOptions(torch.float32, target.device, "auto", longest)
        width = target.config.hidden_size
        self.network = Eagle3Head(DENSE, self.trained, planned, width, load)
        self.network.share(target.network.embedding, target.network.head)
        self._begin(workshop, shares)

    def _begin(self, workshop: Workshop, shares: bool) -> None:
        """With the target's own head and norm, and a feature that is the last of the streams:
        what the target made of the token before is the best guess at hand."""
        network = workshop.target.network
        fusion = dict(self.trained.named())["fc.weight"]
        width = len(fusion)
        fusion[:, -width:] += torch.eye(width, device=fusion.device)
        self.trained.put("norm.weight", network.norm.weight)
        if not shares:
            weight = network.head.weight
            assert isinstance(weight, Tensor)
            rows = weight if self._token_ids is None else weight[self._token_ids]
            self.trained.put("lm_head.weight", rows)

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        del generator  # nothing is left to chance
        places = unroll(self.network, self.num_layers, batch, self._places)
        return learn_chain(places, self._decay, self._argmax_weight)

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        return test_chain(unroll(self.network, self.num_layers, batch, self._places))

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = {published_name(name, self.num_layers): t for name, t in self.trained.named()}
        if self._token_ids is not None:
            tensors["d2t"] = offsets(self._token_ids)
            tensors["t2d"] = membership(self._token_ids, self.config["vocab_size"])
        write_checkpoint(folder, self.config, tensors, dtype)


def check(order: Order) -> None:
    """Sizes and layers that do not fit the target."""
    _plan(order)


def build(workshop: Workshop) -> Eagle3Recipe:
    """A new head for the target."""
    return Eagle3Recipe(workshop)


def _plan(order: Order) -> tuple[dict[str, Any], Eagle3Config]:
    """The config.json of a head, and the same read."""
    require_draft_vocabulary(order)
    config = head_config(order)
    head = read_eagle3_config(PlannedHead(config))
    head = replace(head, parts=replace(head.parts, head=not order.settings.options.share_head))
    require_fit(head, order.shape)
    return config, head


def draft_vocab_size(order: Order) -> int | None:
    """Tokens that it drafts; None over a shared head, which has them all."""
    options = order.settings.options
    if options.share_head:
        return None
    return options.draft_vocab_size or min(_DRAFT_VOCAB_SIZE, order.shape.vocab_size)


def head_config(order: Order) -> dict[str, Any]:
    """The config.json of a head: a layer like the target's where nothing else is asked for."""
    options, shape = order.settings.options, order.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": options.intermediate_size or shape.intermediate_size,
        "num_hidden_layers": options.num_layers or 1,
        "num_attention_heads": options.num_heads or shape.num_heads,
        "num_key_value_heads": options.num_kv_heads or shape.num_kv_heads,
        "head_dim": options.head_dim or shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": draft_vocab_size(order) or shape.vocab_size,
        "tie_word_embeddings": False,
        "bias": False,
        "eagle_aux_hidden_state_layer_ids": list(
            options.aux_layers or usual_layers(shape.num_layers)
        ),
        "norm_before_residual": bool(options.norm_before_residual),
        "norm_output": bool(options.norm_output),
    }


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose incoming streams are read: (2, n / 2, n - 3), or of a target with too few for
    that, three that are spread out up to what leaves the last."""
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    spread = {max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}
    return tuple(sorted(spread))


def published_name(name: str, num_layers: int) -> str:
    """Of a tensor: heads of one layer call it `midlayer`."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if num_layers == 1 else name


def require_fit(head: Eagle3Config, target: DecoderConfig) -> None:
    """Raise UsageError for a head that cannot draft for the target."""
    problems = eagle3_problems(head, target)
    # A head in training gets its draft vocabulary with its weights.
    if problems:
        raise UsageError(f"such a head cannot draft for this target: {'; '.join(problems)}")
