"""`gemma4_assistant`: a small network that reads the target's cache and has none of its own.

It begins with the target's hidden state of the last computed token and the token behind it; then
it goes on with its own. All its rows stand at the position of that token and see what the target
has computed, not each other. So it keeps nothing in the blocks, and a refused draft costs nothing.
"""

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs, RowPlaces
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.drafter import DrafterResources
from slipstream.speculative.gemma4_assistant.config import AssistantConfig, read_assistant_config
from slipstream.speculative.gemma4_assistant.network import AssistantNetwork, load_assistant
from slipstream.speculative.heads.last_hidden import LastHiddenDrafter
from slipstream.speculative.heads.method import Head, HeadMethod

State = tuple[Tensor, PassInputs]  # hidden states [R, target width], and where the rows stand


class AssistantDrafter(LastHiddenDrafter):
    """A chain of single rows over the target's cache."""

    def __init__(
        self, head: Head[AssistantConfig, AssistantNetwork], resources: DrafterResources
    ) -> None:
        super().__init__(head, resources)
        self._assistant, self._caches = head.network, resources.target_cache.layers

    def _start(self, hidden: Tensor, batch: DeviceBatch, newest: Tensor) -> State:
        return hidden, self._rows(batch.slots, newest)

    def _next(self, index: int, state: State, last: Tensor) -> tuple[Tensor, State]:
        hidden, inputs = state
        normed, hidden = self._assistant(last, hidden, inputs, self._caches)
        return self._assistant.logits(normed), (hidden, inputs)

    def _rows(self, slots: Tensor, newest: Tensor) -> PassInputs:
        """One row for each request at the position of its newest token, which is not computed."""
        tables = self._state.tables
        return tables.inputs(
            RowPlaces(torch.arange(len(slots) + 1, device=slots.device), newest, max_rows=1),
            tables.block_tables[slots],
            torch.minimum(newest, self._state.num_computed[slots]),
            slots.new_full((tables.num_tables * len(slots),), -1),
        )


HEAD = HeadMethod(
    name="gemma4_assistant",
    read=read_assistant_config,
    network=load_assistant,
    drafter=AssistantDrafter,
)
