"""A language model that is shown the target's features beside its token ids.

The projected feature of every computed token stands in a page of its own beside the drafter's keys
and values, in the slot of that token: so whatever the drafter reads later, behind a prefix hit or
after a rest, its features are there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.models.decoder import Decoder
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows, lay_out
from slipstream.speculative.drafter import DrafterResources
from slipstream.speculative.pard.projection import TargetProjection


@dataclass(frozen=True, eq=False)
class FeaturePages:
    """[num_blocks * block_size + 1, width]: features by slot; the last takes what has no slot."""

    pages: Tensor
    project: TargetProjection

    @staticmethod
    def empty(project: TargetProjection, width: int, resources: DrafterResources) -> "FeaturePages":
        """For the engine's blocks."""
        state = resources.state
        shape = (resources.cache_sizes.num_blocks * state.block_size + 1, width)
        return FeaturePages(torch.zeros(shape, dtype=project.dtype, device=state.device), project)

    def write(self, forward: Forward) -> None:
        """Take in the features of a pass of the target; those of tokens that are refused will be
        written anew before they are read, as their keys and values are."""
        slots = forward.layout.inputs.paging.slots
        places = torch.where(slots < 0, len(self.pages) - 1, slots)
        self.pages.index_copy_(0, places, self.project(forward.hidden, forward.streams))

    def read(self, state: DeviceState, slots: Tensor, positions: Tensor) -> Tensor:
        """[T, width], what rows with these request slots [T] and positions [T] are shown: the
        feature of the token before, or the last that there is; zeros for the first token."""
        before = torch.minimum(positions, state.num_computed[slots]) - 1
        place = before.clamp_min(0)
        blocks = state.block_tables[slots, place // state.block_size].long()
        features = self.pages[blocks * state.block_size + place % state.block_size]
        return features.masked_fill((before < 0).unsqueeze(1), 0.0)


class FeatureFedRunner(ModelRunner):
    """Passes of a decoder whose embeddings get the features added."""

    def __init__(
        self, network: Decoder, cache: ModelCache, state: DeviceState, features: FeaturePages
    ) -> None:
        super().__init__(network, cache, state)
        self._decoder, self._features = network, features

    def forward(self, rows: PassRows) -> Forward:
        layout = lay_out(self._state, rows)
        slots = rows.slots[layout.request]
        embedded = self._decoder.embedding(layout.token_ids)
        embedded = embedded + self._features.read(self._state, slots, layout.inputs.rows.positions)
        hidden, _ = self._decoder(
            layout.token_ids, layout.inputs, self._cache.layers, embedded=embedded
        )
        return Forward(hidden, layout)
