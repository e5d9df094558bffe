"""The config and tensor names of MTP modules, and whether the modules fit a target."""

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from slipstream.cache.spec import CacheLayout
from slipstream.core.errors import CheckpointError, counted
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.norm import LayerNorms
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.own_drafter import OWN_DRAFTER_KEYS, appended_layers, own_drafter_tensors
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.safetensors_file import TensorEntry
from slipstream.speculative.draft_vocabulary import choose_draft_vocabulary
from slipstream.speculative.heads.checkpoint import HeadCheckpoint, PickledEntry
from slipstream.speculative.heads.config import (
    DENSE,
    WITH_EXPERTS,
    WITH_STATES,
    head_reader,
    is_wrapped,
    read_layers,
    with_stored_parts,
    wrapped_num_tokens,
)
from slipstream.speculative.heads.kinds import EMBEDDING, HEAD, DecoderHeadConfig, HeadParts
from slipstream.speculative.model_options import ModelOptions
from slipstream.speculative.mtp import holds_language_model, is_module_config
from slipstream.speculative.options import TargetModel

_ZERO_CENTRED = ("qwen3_next", "qwen3_5")  # families whose norms all multiply by 1 + weight


@dataclass(frozen=True)
class ModuleNames:
    """The tensor names of one module, without `.weight`.

    In an `MtpStyle` they are templates: {i} is the module, {n} its layer's index in the model.
    """

    embedding_norm: str
    feature_norm: str
    projection: str
    final_norm: str
    layer: str
    embedding: str = EMBEDDING
    head: str = HEAD

    def filled(self, index: int | str, layer: int | str) -> "ModuleNames":
        """The tensor names of module `index`, whose layer has index `layer` in the model."""
        return ModuleNames(*(name.format(i=index, n=layer) for name in astuple(self)))


@dataclass(frozen=True)
class MtpStyle:
    """The conventions of a publisher's MTP modules.

    Attributes:
        name: the publisher's model family.
        feature_first: the projection reads [feature, embedding], not [embedding, feature].
        blanks_first: the first row of a text reads zeros instead of its token's embedding.
        zero_centred: norms multiply by 1 + weight.
        prefix: prefix of tensor names in files.
    """

    name: str
    templates: ModuleNames
    feature_first: bool = False
    blanks_first: bool = False
    zero_centred: bool = False
    prefix: str = ""

    @property
    def plain(self) -> "MtpStyle":
        """This style with norms that multiply by their weight, as in networks in training."""
        return replace(self, zero_centred=False)

    def published(self, name: str, values: Tensor) -> tuple[str, Tensor]:
        """Convert a tensor of a `plain` network to the name and values of the publisher's files."""
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
    """The MTP modules in a directory; other tensors of a language model are left out."""

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        everything = HeadCheckpoint(self.path).entries
        if not self.is_whole_model:
            return everything
        own = own_drafter_tensors(everything)
        return {name: entry for name, entry in everything.items() if name in own}

    @cached_property
    def is_whole_model(self) -> bool:
        """Whether the directory holds a whole language model, possibly with modules."""
        if self.has_weights:
            return holds_language_model(HeadCheckpoint(self.path).tensor_names)
        return not is_wrapped(self.config) and not is_module_config(self.config)

    @cached_property
    def quantization(self) -> StoredQuantization | None:
        """The format of quantised matrices, for modules in a quantised model; otherwise None.
        Raises CheckpointError for an unsupported format."""
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
        """The publisher's style, from the tensors; without weights, from the config."""
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


# Tensor names of kinds of decoder layers that only models known to have them may have.
_EXPERTS, _LATENT = "a mixture of experts", "latent attention (MLA)"
_QUANTISED = "quantised weights"
_WITH_LATENT = ("deepseek_v3", "glm4_moe_lite")
_OTHER_LAYERS = {
    _LATENT: (".kv_a_proj_with_mqa.", ".q_a_proj.", ".kv_b_proj."),
    _EXPERTS: (".mlp.experts.", ".mlp.gate.", ".mlp.router.", ".mlp.shared_expert"),
    "linear attention": (".linear_attn.",),
    _QUANTISED: ("weight_scale", "weight_packed", ".qweight"),
}
_OTHER_KEYS = {"kv_lora_rank": _LATENT, "n_routed_experts": _EXPERTS, "num_experts": _EXPERTS}


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderHeadConfig):
    """The config of MTP modules.

    Attributes:
        layers: their config, with one layer per module, of the same kind as the target's last.
        modules: the modules' tensor names, in the order in which they draft.
        drafted: rising token ids of the draft vocabulary; None for the whole vocabulary.
    """

    style: MtpStyle
    modules: tuple[ModuleNames, ...]
    drafted: tuple[int, ...] | None = None

    @property
    def features(self) -> str:
        count = counted(len(self.modules), "module")
        return f"{super().features} ({count} of {self.style.name} kind)"

    @property
    def norms(self) -> LayerNorms:
        """The norms of the modules' layers; the modules' other norms are of the same kind."""
        norms = self.layers.layers[0].norms
        return replace(norms, zero_centred=self.style.zero_centred)

    def with_options(self, options: ModelOptions, target: TargetModel) -> Self:
        if options.vocabulary is None:
            return self
        chosen = choose_draft_vocabulary(options.vocabulary, target.path, target.vocab_size)
        return replace(self, drafted=tuple(chosen))

    def layout(self, pages: torch.dtype, dtype: torch.dtype) -> CacheLayout:
        """The KV cache, and the outputs of all modules but the last, which the next ones read."""
        extra = (len(self.modules) - 1) * self.layers.hidden_size * dtype.itemsize
        return replace(super().layout(pages, dtype), extra_bytes_per_token=extra)


def read_mtp_config(checkpoint: MtpCheckpoint) -> MtpConfig:
    """Read the config; raises CheckpointError for unsupported layers and unknown keys."""
    style, modules, names = checkpoint.style, checkpoint.modules, checkpoint.tensor_names
    _require_known(checkpoint)
    _require_count(checkpoint)
    if checkpoint.is_whole_model:
        layers = read_decoder_config(Checkpoint(checkpoint.path, checkpoint.replaced))
    else:
        kinds = DENSE | WITH_EXPERTS | WITH_STATES
        layers = read_layers(head_reader(checkpoint, architectures=kinds), ())
    layers = with_stored_parts(layers, names, modules[0].layer)
    if len(set(layers.sliding_windows)) > 1:  # only the model's other layers have them
        layers = layers.with_fields({"window": None})
    # The first layers of a model may be dense where all others have experts; modules attend.
    attending = [it for it in layers.layers if isinstance(it.mixer, AttentionSpec)]
    layers = replace(layers, layers=(*(attending or layers.layers)[-1:],) * len(modules))
    _require_plain_queries(checkpoint, layers, modules)
    return MtpConfig(
        layers=layers,
        num_tokens=wrapped_num_tokens(checkpoint.config),
        style=style,
        modules=modules,
        parts=_parts(names, modules[0]),
        draft_vocab_size=layers.vocab_size,
    )


def _parts(names: Collection[str], first: ModuleNames) -> HeadParts:
    return HeadParts(
        embedding=f"{first.embedding}.weight" in names,
        head=f"{first.head}.weight" in names,
        fc_bias=False,
    )


def _require_known(checkpoint: MtpCheckpoint) -> None:
    """Raise CheckpointError for layers of an unsupported kind."""
    found = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    inner = found if isinstance(found, Mapping) else {}
    what = [kind for key, kind in _OTHER_KEYS.items() if inner.get(key)]
    what += [
        kind
        for kind, marks in _OTHER_LAYERS.items()
        if any(mark in name for name in checkpoint.tensor_names for mark in marks)
    ]
    model_type = str(inner.get("model_type"))
    if model_type in WITH_EXPERTS:
        what = [kind for kind in what if kind != _EXPERTS]
    if model_type in _WITH_LATENT:
        what = [kind for kind in what if kind != _LATENT]
    if checkpoint.quantization is not None:
        what = [kind for kind in what if kind != _QUANTISED]
    if what:
        raise _unsupported(checkpoint, what[0])


def _require_count(checkpoint: MtpCheckpoint) -> None:
    """Raise CheckpointError if config.json states a different number of modules than is stored."""
    count = len(checkpoint.modules)
    for key in sorted(OWN_DRAFTER_KEYS) if checkpoint.has_weights else ():
        stated = checkpoint.config.get(key)
        if type(stated) is int and stated not in (0, count):
            raise CheckpointError(
                f"{checkpoint.path} holds {counted(count, 'MTP module')}, and its config.json says "
                f"{key}={stated}; download what is missing, or correct config.json"
            )


def _require_plain_queries(
    checkpoint: MtpCheckpoint, layers: DecoderConfig, modules: tuple[ModuleNames, ...]
) -> None:
    """Raise CheckpointError if q_proj has output gates that the config does not state."""
    mixer = layers.layers[-1].mixer
    if not isinstance(mixer, AttentionSpec) or mixer.gated:
        return
    rows = mixer.query_rows
    for names in modules if checkpoint.has_weights else ():
        entry = checkpoint.entries.get(f"{names.layer}.self_attn.q_proj.weight")
        if entry is not None and entry.shape[0] == 2 * rows:
            raise _unsupported(checkpoint, "gated attention")


def _unsupported(checkpoint: MtpCheckpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"the MTP module in {checkpoint.path} has {what}, which is not supported yet: only layers "
        "of plain attention are, or of a model's latent attention, with a dense feed-forward part "
        "or the experts of a model that is supported itself; use another drafter for this target"
    )
