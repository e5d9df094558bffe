"""What MTP modules are made of, and whether they fit a target."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.core.errors import CheckpointError, counted
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.norm import LayerNorms
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.modules_beside import OWN_DRAFTER_KEYS
from slipstream.speculative.draft_vocabulary import choose_draft_vocabulary
from slipstream.speculative.heads.config import (
    DENSE,
    WITH_EXPERTS,
    WITH_STATES,
    head_reader,
    read_layers,
    with_stored_parts,
    wrapped_num_tokens,
)
from slipstream.speculative.heads.kinds import DecoderHeadConfig, HeadParts
from slipstream.speculative.model_options import ModelOptions
from slipstream.speculative.mtp.checkpoint import ModuleNames, MtpCheckpoint, MtpStyle
from slipstream.speculative.options import TargetModel

# Parts of a decoder layer that give away one of a kind that cannot run yet.
# but for models that are known to have them
_EXPERTS, _LATENT = "a mixture of experts", "latent attention (MLA)"
_QUANTISED = "quantised weights"
_WITH_LATENT = ("deepseek_v3", "glm4_moe_lite")
_OTHER_LAYERS = {
    _LATENT: (".kv_a_proj_with_mqa.", ".q_a_proj.", ".kv_b_proj."),
    _EXPERTS: (".mlp.experts.", ".mlp.gate.", ".mlp.router.", ".mlp.shared_expert"),
    "linear attention": (".linear_attn.",),
    _QUANTISED: ("weight_scale", "weight_packed", ".qweight"),
}
_OTHER_KEYS = {
    "kv_lora_rank": _LATENT,
    "n_routed_experts": _EXPERTS,
    "num_experts": _EXPERTS,
}


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderHeadConfig):
    """Everything that the modules are built from.

    Attributes:
        layers: their sizes, with one layer for each module, of the kind of the target's last.
        modules: the names of their tensors, in the order in which they draft.
        drafted: the only tokens that are drafted, rising; None: all.
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
        """Those of the modules' layers, like which the others are."""
        norms = self.layers.layers[0].norms
        return replace(norms, zero_centred=self.style.zero_centred)

    def with_options(self, options: ModelOptions, target: TargetModel) -> Self:
        if options.vocabulary is None:
            return self
        chosen = choose_draft_vocabulary(options.vocabulary, target.path, target.vocab_size)
        return replace(self, drafted=tuple(chosen))

    def layout(self, dtype: torch.dtype) -> CacheLayout:
        """With the outputs of all modules but the last, which the next module reads."""
        extra = (len(self.modules) - 1) * self.layers.hidden_size * dtype.itemsize
        return replace(super().layout(dtype), extra_bytes_per_token=extra)


def read_mtp_config(checkpoint: MtpCheckpoint) -> MtpConfig:
    """Raises CheckpointError for layers of a kind that cannot run, and for unknown keys."""
    style, modules, names = checkpoint.style, checkpoint.modules, checkpoint.tensor_names
    _require_known(checkpoint)
    _require_count(checkpoint)
    if checkpoint.is_whole_model:
        layers = read_decoder_config(Checkpoint(checkpoint.path, checkpoint.replaced))
    else:
        kinds = DENSE | WITH_EXPERTS | WITH_STATES
        layers = read_layers(head_reader(checkpoint, architectures=kinds), ())
    layers = with_stored_parts(layers, names, modules[0].layer)
    if len(set(layers.sliding_windows)) > 1:  # windows of some layers are not theirs
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
    """Raise CheckpointError for a layer of a kind that cannot run."""
    found = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    inner = found if isinstance(found, Mapping) else {}
    what = [kind for key, kind in _OTHER_KEYS.items() if inner.get(key)]
    what += [
        kind
        for kind, marks in _OTHER_LAYERS.items()
        if any(mark in name for name in checkpoint.tensor_names for mark in marks)
    ]
    if inner.get("model_type") in WITH_EXPERTS:
        what = [kind for kind in what if kind != _EXPERTS]
    if inner.get("model_type") in _WITH_LATENT:
        what = [kind for kind in what if kind != _LATENT]
    if checkpoint.quantization is not None:
        what = [kind for kind in what if kind != _QUANTISED]
    if what:
        raise _unsupported(checkpoint, what[0])


def _require_count(checkpoint: MtpCheckpoint) -> None:
    """Raise CheckpointError for a config.json that states another number of modules than there
    are."""
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
    """Raise CheckpointError for q_proj that gives a gate beside every query, where the target's
    does not."""
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
