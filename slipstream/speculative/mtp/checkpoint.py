"""Checkpoints of MTP modules: a language model's own, with the modules in it, or a folder of them
alone; and what each publisher calls their tensors."""

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.models.modules_beside import (
    OWN_DRAFTER_KEYS,
    appended_layers,
    own_drafter_tensors,
)
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.safetensors_file import TensorEntry
from slipstream.speculative.heads.checkpoint import HeadCheckpoint, PickledEntry
from slipstream.speculative.heads.config import is_wrapped
from slipstream.speculative.heads.kinds import EMBEDDING, HEAD
from slipstream.speculative.mtp import holds_language_model, is_module_config

_ZERO_CENTRED = ("qwen3_next", "qwen3_5")  # families whose every norm multiplies by 1 + weight


@dataclass(frozen=True)
class ModuleNames:
    """What the tensors of one module are called, without `.weight`.

    In a style they are templates: {i} is the module, {n} its layer's number in the model.
    """

    embedding_norm: str
    feature_norm: str
    projection: str
    final_norm: str
    layer: str
    embedding: str = EMBEDDING
    head: str = HEAD

    def filled(self, index: int | str, layer: int | str) -> "ModuleNames":
        """The names of one module."""
        return ModuleNames(*(name.format(i=index, n=layer) for name in astuple(self)))


@dataclass(frozen=True)
class MtpStyle:
    """How a publisher's module puts token and feature together.

    Attributes:
        name: whose it is.
        feature_first: the projection reads [feature, embedding] and not [embedding, feature].
        blanks_first: the first row of a text is shown zeros in place of its token's embedding.
        zero_centred: norms multiply by 1 + weight.
        prefix: of names in files, before the canonical ones.
    """

    name: str
    templates: ModuleNames
    feature_first: bool = False
    blanks_first: bool = False
    zero_centred: bool = False
    prefix: str = ""

    @property
    def plain(self) -> "MtpStyle":
        """This style with norms that multiply by their weight, as networks in training have."""
        return replace(self, zero_centred=False)

    def published(self, name: str, values: Tensor) -> tuple[str, Tensor]:
        """A tensor of a `plain` network as this publisher's files have it."""
        is_centred = self.zero_centred and values.dim() == 1 and name.endswith(".weight")
        return f"{self.prefix}{name}", values - 1 if is_centred else values


_PLAIN_NAMES = ModuleNames(
    "mtp_layers.{i}.token_layernorm",
    "mtp_layers.{i}.hidden_layernorm",
    "mtp_layers.{i}.input_proj",
    "mtp_layers.{i}.final_layernorm",
    "mtp_layers.{i}",
)
MIMO = MtpStyle("MiMo", _PLAIN_NAMES, feature_first=True, blanks_first=True, prefix="model.")
SPECULATORS = MtpStyle("speculators", _PLAIN_NAMES)
SPECULATORS_ZERO_CENTRED = MtpStyle("speculators", _PLAIN_NAMES, zero_centred=True)
QWEN = MtpStyle(
    "Qwen3-Next",
    ModuleNames(
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.fc",
        "mtp.norm",
        "mtp.layers.{i}",
    ),
    zero_centred=True,
)
DEEPSEEK = MtpStyle(
    "DeepSeek-V3",
    ModuleNames(
        "model.layers.{n}.enorm",
        "model.layers.{n}.hnorm",
        "model.layers.{n}.eh_proj",
        "model.layers.{n}.shared_head.norm",
        "model.layers.{n}",
        "model.layers.{n}.embed_tokens",
        "model.layers.{n}.shared_head.head",
    ),
    blanks_first=True,
)


class MtpCheckpoint(HeadCheckpoint):
    """The modules' part of a directory: what else a whole language model has is left out."""

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors by canonical names (`heads/checkpoint.py`)."""
        everything = HeadCheckpoint(self.path).entries
        if not self.is_whole_model:
            return everything
        own = own_drafter_tensors(everything)
        return {name: entry for name, entry in everything.items() if name in own}

    @cached_property
    def is_whole_model(self) -> bool:
        """Whether it is a language model that may have modules beside it."""
        if self.has_weights:
            return holds_language_model(HeadCheckpoint(self.path).tensor_names)
        return not is_wrapped(self.config) and not is_module_config(self.config)

    @cached_property
    def quantization(self) -> StoredQuantization | None:
        """How matrices of modules within a quantised model are stored, where they are no floats;
        None for all others. CheckpointError for a format that is not supported."""
        if not self.is_whole_model or not self.has_weights:
            return None
        if any(isinstance(entry, PickledEntry) for entry in self.entries.values()):
            return None
        return read_quantization(self.config, self.config_file)

    @property
    def may_be_head(self) -> bool:
        return self.is_whole_model and bool(self.tensor_names)

    @cached_property
    def style(self) -> MtpStyle:
        """Read off the tensors; without weights, off what the config says of its model."""
        if is_wrapped(self.config):
            inner = self.config.get("transformer_layer_config")
            kind = str(inner.get("model_type")) if isinstance(inner, Mapping) else ""
            return SPECULATORS_ZERO_CENTRED if kind.startswith(_ZERO_CENTRED) else SPECULATORS
        if self.has_weights:
            return _style_of_tensors(self.tensor_names) or self._nothing_here()
        kind = str(self.config.get("model_type"))
        if kind.startswith("mimo"):
            return MIMO
        return QWEN if kind.startswith("qwen") else DEEPSEEK

    @cached_property
    def modules(self) -> tuple[ModuleNames, ...]:
        style = self.style
        layers = appended_layers(self.tensor_names) if style is DEEPSEEK else ()
        if not layers:
            first = self.config.get("num_hidden_layers", 0) if style is DEEPSEEK else 0
            layers = tuple(range(first, first + self._count()))
        return tuple(style.templates.filled(index, layer) for index, layer in enumerate(layers))

    def _count(self) -> int:
        prefix = self.style.templates.filled("", "").layer
        if self.has_weights:
            found = {
                name.removeprefix(prefix).split(".")[0]
                for name in self.tensor_names
                if name.startswith(prefix)
            }
            return max(1, len(found))
        counts = [self.config.get(key) for key in sorted(OWN_DRAFTER_KEYS)]
        stated = [count for count in counts if type(count) is int and count > 0]
        if not stated and self.is_whole_model:
            self._nothing_here()
        return stated[0] if stated else 1

    def _nothing_here(self) -> MtpStyle:
        raise CheckpointError(
            f"{self.path} holds no MTP modules (tensors mtp.*, model.mtp_layers.* or a layer with "
            "eh_proj); give a folder that has them as model, or use another drafter"
        )


def _style_of_tensors(names: Collection[str]) -> MtpStyle | None:
    if appended_layers(names):
        return DEEPSEEK
    if any(name.startswith("mtp_layers.") for name in names):
        return MIMO
    return QWEN if any(name.startswith("mtp.") for name in names) else None
