"""MLPSpeculator (Wertheimer et al. 2024, arXiv 2404.19124), used by IBM's accelerators.

A small recurrent network. Its state starts as h, the target's hidden state after the final norm,
and is updated with one token per step, starting with the last known token.

    s = a proj_i(s) + b emb_i(token)       a = 0.5 ** (0.5 / n),  b = sqrt((1 - a^2) inner / 2)
    s = gelu(w rms_norm(s) + c)
    logits_i = head_i(s)

Step i predicts the token i + 2 positions after that of h. Tied checkpoints share emb, head and norm
among all steps, and proj among all steps but the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt

from torch import Tensor
from torch.nn import functional as F

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.ops import Ops
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.kinds import HeadConfig, vocabulary_problem
from slipstream.speculative.heads.last_hidden import (
    FEATURES,
    LastHiddenDrafter,
    LastHiddenNetwork,
)
from slipstream.speculative.heads.loading import HeadContext, load_head
from slipstream.speculative.heads.method import HeadMethod

EPS = 1e-6  # epsilon of all norms, which configs do not state

# Keys of candidate trees; only chains are drafted here.
_HARMLESS = HARMLESS_KEYS | {"n_candidates", "num_lookahead_tokens", "top_k_tokens_per_head"}
_PREFIX = "speculator."


class MLPSpeculatorCheckpoint(HeadCheckpoint):
    """A checkpoint whose tensor names are read without their common prefix."""

    def canonical(self, name: str) -> str:
        return name.removeprefix(_PREFIX)


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorConfig(HeadConfig):
    """The config of an MLPSpeculator.

    Attributes:
        emb_dim: the target's hidden size.
        inner_dim: size of the state.
        num_tokens: number of steps, each of which drafts a token.
        tie_weights: whether steps share their weights.
        scale_input: h is normalised and divided by sqrt(2) before the first step.
    """

    vocab_size: int
    emb_dim: int
    inner_dim: int
    num_tokens: int
    tie_weights: bool
    scale_input: bool

    features = FEATURES

    @property
    def sizes(self) -> Mapping[str, int | None]:
        return {"hidden_size": self.emb_dim, "vocab_size": self.vocab_size}

    def problems(self, target: DecoderConfig) -> list[str]:
        problems = []
        if self.emb_dim != target.hidden_size:
            problems.append(
                f"it reads hidden states of {self.emb_dim} numbers (emb_dim) and the target's have "
                f"{target.hidden_size}; it was trained for another target"
            )
        problem = vocabulary_problem(self.vocab_size, target)
        return [*problems, problem] if problem else problems

    def place(self, index: int, kind: str) -> int:
        """The index in the name of the tensor of this kind for step `index`."""
        if not self.tie_weights:
            return index
        return min(index, 1) if kind == "proj" else 0


def read_mlp_speculator_config(checkpoint: Checkpoint) -> MLPSpeculatorConfig:
    """Read the config; raises CheckpointError for unknown keys and unsupported values."""
    reader = ConfigReader(checkpoint.config, checkpoint.config_file, harmless=_HARMLESS)
    refuse_quantized(checkpoint.config, checkpoint.config_file)
    sizes = {key: reader.take(key, int) for key in ("vocab_size", "emb_dim", "n_predict")}
    inner_dim = reader.take("inner_dim", int, 0) or sizes["emb_dim"]
    for key, value in (*sizes.items(), ("inner_dim", inner_dim)):
        if value < 1:
            raise reader.error(key, f"must be above 0, not {value}")
    config = MLPSpeculatorConfig(
        layers=None,
        vocab_size=sizes["vocab_size"],
        emb_dim=sizes["emb_dim"],
        inner_dim=inner_dim,
        num_tokens=sizes["n_predict"],
        tie_weights=reader.take("tie_weights", bool, False),
        scale_input=reader.take("scale_input", bool, False),
    )
    reader.finish()
    return config


def load_mlp_speculator(
    checkpoint: MLPSpeculatorCheckpoint,
    config: MLPSpeculatorConfig,
    target: DecoderConfig,
    options: LoadOptions,
) -> "MLPSpeculator":
    copies = [] if options.load_format == "dummy" else _copies(config, checkpoint)
    return load_head(checkpoint, target, options, partial(MLPSpeculator, config=config), copies)


def _copies(config: MLPSpeculatorConfig, checkpoint: MLPSpeculatorCheckpoint) -> list[str]:
    """The redundant tensors of a tied checkpoint; CheckpointError if they are not equal copies."""
    found: list[str] = []
    for index in range(1, config.num_tokens if config.tie_weights else 1):
        for kind in (
            "emb.{}.weight",
            "head.{}.weight",
            "proj.{}.weight",
            "ln.{}.weight",
            "ln.{}.bias",
        ):
            place = config.place(index, kind.split(".")[0])
            name, first = kind.format(index), kind.format(place)
            if place == index or not {name, first} <= checkpoint.entries.keys():
                continue
            if not checkpoint.holds_copy(name, first):
                raise CheckpointError(
                    f"{checkpoint.path} has tied weights by its config.json, but {name} and "
                    f"{first} differ; set tie_weights to false"
                )
            found.append(name)
    return found


class MLPSpeculator(LastHiddenNetwork):
    """Computes the logits of several tokens in turn, from one hidden state and the last token."""

    def __init__(self, context: HeadContext, config: MLPSpeculatorConfig) -> None:
        self._ops, self._config, self._dtype = context.ops, config, context.options.dtype
        self.num_legal_tokens = config.vocab_size
        self._state_weight = 0.5 ** (0.5 / config.num_tokens)
        self._token_weight = sqrt((1 - self._state_weight**2) * config.inner_dim / 2)
        self._steps = _read_steps(context.ops, context.source, config)

    def start(self, hidden: Tensor, count: int) -> Tensor:
        if not self._config.scale_input:
            return hidden.to(self._dtype)
        scaled = F.rms_norm(hidden.float(), (self._config.emb_dim,), eps=EPS) / sqrt(2)
        return scaled.to(self._dtype)

    def logits(self, index: int, state: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        step = self._steps[index]
        mixed = self._ops.logits(state, step.projection) * self._state_weight
        mixed = mixed + step.embedding(last_tokens).float() * self._token_weight
        normed = F.rms_norm(mixed, (self._config.inner_dim,), step.scale, EPS) + step.shift
        state = F.gelu(normed).to(self._dtype)
        return step.head(state), state


@dataclass(frozen=True, eq=False)
class _Step:
    """A step: projection [inner, emb_dim or inner]; the norm's scale and shift [inner] float32."""

    projection: Weight
    embedding: Embedding
    head: LanguageModelHead
    scale: Tensor
    shift: Tensor


def _read_steps(ops: Ops, source: ParameterSource, config: MLPSpeculatorConfig) -> list[_Step]:
    """Read the weights of each step; tied tensors are read only once."""
    inner, vocab_size, steps = config.inner_dim, config.vocab_size, range(config.num_tokens)

    def places(kind: str) -> list[int]:
        return sorted({config.place(index, kind) for index in steps})

    projections = {
        at: source.matrix([Part(f"proj.{at}.weight", inner)], inner if at else config.emb_dim)
        for at in places("proj")
    }
    embeddings = {at: Embedding(source, f"emb.{at}", vocab_size, inner) for at in places("emb")}
    heads = {
        at: LanguageModelHead(ops, source.head([Part(f"head.{at}.weight", vocab_size)], inner))
        for at in places("head")
    }
    norms = {
        at: [source.vector([Part(f"ln.{at}.{it}", inner)]).float() for it in ("weight", "bias")]
        for at in places("ln")
    }
    return [
        _Step(
            projections[config.place(index, "proj")],
            embeddings[config.place(index, "emb")],
            heads[config.place(index, "head")],
            *norms[config.place(index, "ln")],
        )
        for index in steps
    ]


HEAD = HeadMethod(
    name="mlp_speculator",
    read=read_mlp_speculator_config,
    network=load_mlp_speculator,
    drafter=LastHiddenDrafter,
    checkpoint=MLPSpeculatorCheckpoint,
)
