"""Draft blocks whose tokens are chosen one after the other, from the rows of one pass."""

from typing import Any, Protocol

from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.dflash.drafter import DFlashDrafter
from slipstream.speculative.draft_sampling import Places
from slipstream.speculative.drafter import Draft, DrafterResources
from slipstream.speculative.heads.method import Head


class BlockChooser(Protocol):
    """A network of draft blocks that has a say in each place once the one before is settled."""

    def places(self, hidden: Tensor) -> Places:
        """hidden [R, K, H], the rows of the blocks that predict."""


class BlockChainDrafter(DFlashDrafter):
    """Drafts with one pass of the layers a round, and a small step for each token."""

    def __init__(self, head: Head[Any, Any], resources: DrafterResources) -> None:
        super().__init__(head, resources)
        self._chooser: BlockChooser = head.network

    def propose(self, batch: DeviceBatch) -> Draft:
        wanted = batch.num_draft_tokens
        known = self._state.num_tokens[batch.slots]
        hidden = self._hidden(batch, (known - 1).clamp_min(0), wanted)
        places = self._chooser.places(hidden)
        return self._drafting.draft_places(batch, self._resources, wanted, places)
