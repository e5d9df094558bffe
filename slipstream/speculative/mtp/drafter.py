"""`mtp`: the modules that a target was trained with to predict further than one token.

They lie in the target's own checkpoint, or in a folder of their own. One module drafts again and
again, each time on what it gave before. Several take turns: the first gives draft token 1, the
second draft token 2, and the last goes on alone. A row of a later module reads what the module
before gave for the token before; so every pass also runs the later modules over its rows, and what
they give is kept in the blocks, by slot, beside their keys and values.
"""

from dataclasses import replace

import torch
from torch import Tensor

from slipstream.runner.rows import RowLayout
from slipstream.speculative.drafter import Drafter, DrafterResources
from slipstream.speculative.heads.feature_rows import FIRST_ROW, FeatureRowsDrafter
from slipstream.speculative.heads.method import Head, HeadMethod
from slipstream.speculative.model_options import ModelKeys
from slipstream.speculative.mtp.checkpoint import MtpCheckpoint
from slipstream.speculative.mtp.config import MtpConfig, read_mtp_config
from slipstream.speculative.mtp.network import MtpHead, load_mtp


class ModulesDrafter(FeatureRowsDrafter):
    """Drafts with several modules.

    `_given[slot of a token, i]` is what module i gave for the row of that token, i counting from 0
    and without the last module, which has none behind it. The last place is for rows without a
    slot.
    """

    def __init__(self, head: Head[MtpConfig, MtpHead], resources: DrafterResources) -> None:
        super().__init__(head, resources)
        self._mtp = head.network
        shape = (
            resources.cache_sizes.num_blocks * self._state.block_size + 1,
            self._mtp.num_modules - 1,
            self._mtp.feature_size,
        )
        self._given = torch.zeros(shape, dtype=self._features.dtype, device=self._state.device)

    def _pass(self, layout: RowLayout, features: Tensor, draft: int) -> tuple[Tensor, Tensor]:
        first, last = min(draft, self._mtp.num_modules - 1), self._mtp.num_modules - 1
        slots = layout.inputs.paging.slots
        places = torch.where(slots < 0, len(self._given) - 1, slots)
        before = self._place_before(layout)
        result = features
        for index in range(first, last + 1):
            # Rows before a module's first are computed with the others, and no row sees them.
            first_seen = FIRST_ROW + index
            sees = replace(layout.inputs.sees, first_seen=first_seen)
            inputs = replace(layout.inputs, sees=sees)
            taken = features if index == first else self._given[before, index - 1]
            given = self._mtp.run(index, layout.token_ids, taken, inputs, self._cache.layers[index])
            means = (inputs.rows.positions >= first_seen).unsqueeze(1)
            given = torch.where(means, given, 0.0)
            if index < last:
                self._given[places, index] = given
            if index == first:
                result = given
        return result, result

    def _place_before(self, layout: RowLayout) -> Tensor:
        """[T] int64, the slot of the token before each row's."""
        inputs, size, request = layout.inputs, self._state.block_size, layout.request
        before = (inputs.rows.in_context - 1).clamp_min(0)
        return inputs.paging.block_tables[request, before // size].long() * size + before % size


def _build(head: Head[MtpConfig, MtpHead], resources: DrafterResources) -> Drafter:
    kind = FeatureRowsDrafter if head.network.num_modules == 1 else ModulesDrafter
    return kind(head, resources)


HEAD = HeadMethod(
    name="mtp",
    read=read_mtp_config,
    network=load_mtp,
    drafter=_build,
    checkpoint=MtpCheckpoint,
    keys=ModelKeys(vocabulary=True, window=True, in_target=True),
)
