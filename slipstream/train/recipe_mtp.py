"""MTP modules (DeepSeek-AI 2024, arXiv 2412.19437) for a target that was published without one.

One module drafts all positions, each from its output for the position before, and is trained so
(FastMTP: K recursive passes, whose losses count 0.6^k). Embedding and lm_head are the target's.
Exports have the form of the speculators library, which other engines read for dense targets.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.speculative.mtp.config import MtpCheckpoint, MtpConfig, read_mtp_config
from slipstream.speculative.mtp.network import MtpHead
from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import ChainRecipe, DraftPosition, unroll
from slipstream.train.plan import RunPlan
from slipstream.train.recipe import dense_config, planned_checkpoint
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target

# Keys of config.json and the options that set them.
_SIZES = {
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}


class MtpRecipe(ChainRecipe[MtpConfig]):
    """A module in training; see `Recipe`."""

    OPTIONS = frozenset({*_SIZES.values(), "place_decay"})
    METHOD = "mtp"
    NUM_DRAFT_TOKENS, DECAY = 3, 0.6

    def __init__(self, plan: RunPlan, target: Target, sequences: Sequences) -> None:
        super().__init__(plan, target, sequences)
        style, names = self.config.style, self.config.modules[0]
        plain = replace(self.config, style=style.plain)
        self.network = MtpHead(self.context, plain)
        self.network.share(target.network.embedding, target.network.head)
        self.trained.put(f"{names.final_norm}.weight", target.network.norm.weight)
        # The module starts by repeating the target's hidden state of the token before.
        start = 0 if style.feature_first else target.config.hidden_size
        self.trained.add_identity(f"{names.projection}.weight", start)

    @classmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], MtpConfig]:
        config = _module_config(plan)
        try:
            return config, read_mtp_config(planned_checkpoint(MtpCheckpoint, config))
        except CheckpointError as error:
            raise UsageError(
                f"no MTP module can be made like the layers of {plan.target.path} ({error}); train "
                "a drafter of another kind for it, such as eagle3"
            ) from error

    def positions(self, batch: TrainingBatch) -> Iterator[DraftPosition]:
        return unroll(self.network, 1, batch, self.num_draft_tokens)

    def published(self) -> dict[str, Tensor]:
        return dict(self.config.style.published(*named) for named in self.trained.named())


def _module_config(plan: RunPlan) -> dict[str, Any]:
    """config.json in the form of the speculators library, with a layer of the target's kind, or a
    dense one in place of experts."""
    options = plan.settings.options
    shape = dense_config(plan)
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
                    "speculative_tokens": plan.num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": plan.settings.target,
                "architectures": plan.target.config.get("architectures", []),
            },
        },
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": shape,
    }
