"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts behind tokens it does not know.

A row whose token is not known yet takes a mask token in place of the token, and in place of what
the target's streams would be a learned vector, `mask_hidden`, of their width: it goes through the
same norms and the same fc. Everything else is EAGLE-3, mostly of several layers and with an
embedding of its own. Trainers publish `mask_hidden` as [1, 1, N].
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.table import Ops
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.loading import LoadOptions
from slipstream.speculative.eagle3.config import (
    Eagle3Config,
    eagle3_problems,
    read_eagle3_config,
)
from slipstream.speculative.eagle3.network import Eagle3Head
from slipstream.speculative.heads.checkpoint import MASK_HIDDEN, HeadCheckpoint
from slipstream.speculative.heads.loading import DRAFT_IDS, load_head


@dataclass(frozen=True)
class PEagleConfig:
    """Everything that the head is built from.

    Attributes:
        has_weights: whether the numbers are there, or only their description.
        mask_columns: of the stored mask_hidden; None where there is none.
    """

    head: Eagle3Config
    has_weights: bool
    mask_columns: int | None

    def feature_columns(self, target_width: int) -> int:
        """Numbers of the target that a row reads."""
        return (self.head.num_aux if self.head.use_aux_hidden_state else 1) * target_width


def read_p_eagle_config(
    checkpoint: HeadCheckpoint, read_elsewhere: Collection[str] = ()
) -> PEagleConfig:
    """As for EAGLE-3; `read_elsewhere` are keys that somebody else heeds."""
    head = read_eagle3_config(checkpoint, read_elsewhere)
    entry = checkpoint.entries.get(MASK_HIDDEN) if checkpoint.has_weights else None
    return PEagleConfig(head, checkpoint.has_weights, None if entry is None else entry.shape[0])


def p_eagle_problems(config: PEagleConfig, target: DecoderConfig) -> list[str]:
    """Why the head cannot draft for this target."""
    problems = eagle3_problems(config.head, target)
    expected = config.head.fc_columns or config.feature_columns(target.hidden_size)
    if config.has_weights and config.mask_columns is None:
        problems.append(
            f"it has no tensor {MASK_HIDDEN}, which stands for the features of tokens that are not "
            "known yet; export it again with that tensor"
        )
    elif config.mask_columns not in (None, expected):
        problems.append(
            f"its {MASK_HIDDEN} has {config.mask_columns} numbers where a token's features have "
            f"{expected}; it was trained for another target, or its config.json does not list all "
            "layers that it reads"
        )
    return problems


def load_p_eagle(
    checkpoint: HeadCheckpoint, config: PEagleConfig, target_width: int, options: LoadOptions
) -> "PEagleHead":
    """The network with its weights."""

    def build(ops: Ops, source: ParameterSource) -> PEagleHead:
        return PEagleHead(ops, source, config, target_width, options)

    return load_head(checkpoint, options, build, ignored=(DRAFT_IDS,))


class PEagleHead(Eagle3Head):
    """(tokens, features) to what enters the lm_head, masks among them."""

    def __init__(
        self,
        ops: Ops,
        source: ParameterSource,
        config: PEagleConfig,
        target_width: int,
        options: LoadOptions,
    ) -> None:
        super().__init__(ops, source, config.head, target_width, options)
        self._target_width = target_width
        columns = config.feature_columns(target_width)
        self._mask_hidden = source.vector([Part(MASK_HIDDEN, columns)])

    def mask_feature(self) -> Tensor:
        """[1, H], the feature of every row whose token is a mask."""
        streams = torch.split(self._mask_hidden.unsqueeze(0), self._target_width, -1)
        return self.project(streams[0], streams)
