"""What the device knows of every running request, indexed by slot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.runner.transfer import upload

# A step that was launched before the host knew that a request had ended may still add a token.
SURPLUS_TOKENS = 1


class DeviceState:
    """Persistent tensors, one row per slot, and one more for the padding of captured batches.

    Ranges over `token_ids[slot]`:

        0 ........ num_computed ........ num_tokens ........ num_tokens + drafts
        | in the target's cache | known | tentative: this step's draft tokens |

    Attributes:
        token_ids: [slots + 1, max_model_len + 1] int32.
        num_tokens: [slots + 1] int64, known tokens.
        num_computed: [slots + 1] int64, tokens in the target's cache.
        block_tables: [slots + 1, max_blocks] int32.
        padding_slot: the last one: it has no tokens and gains none.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.device, self.block_size, self.max_model_len = device, block_size, max_model_len
        self.padding_slot = max_num_seqs
        self.num_slots = max_num_seqs + 1
        max_blocks = -(-max_model_len // block_size)
        shape = (self.num_slots, max_model_len + SURPLUS_TOKENS)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(
            (self.num_slots, max_blocks), dtype=torch.int32, device=device
        )
        # What `block_tables` holds, so that only changed entries are copied to the device.
        self._written: list[list[int]] = [[] for _ in range(self.num_slots)]

    def apply(self, batch: Batch) -> None:
        """Take in the schedule: newly admitted requests and the blocks that tables gained."""
        cells: list[int] = []
        blocks: list[int] = []
        for item in batch.requests:
            slot = item.request.slot
            if item.admitted:
                known = torch.tensor(item.request.token_ids, dtype=torch.int32)
                self.token_ids[slot, : len(known)] = known
                self.num_tokens[slot] = len(known)
                self.num_computed[slot] = item.start
            first = self._changed_from(slot, item.block_table)
            gained = item.block_table[first:]
            start = slot * self.block_tables.shape[1] + first
            cells.extend(range(start, start + len(gained)))
            blocks.extend(gained)
        if cells:
            changes = upload([cells, blocks], self.device)
            self.block_tables.view(-1).index_copy_(0, changes[0], changes[1].to(torch.int32))

    def commit(self, slots: Tensor, num_computed: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Append committed tokens; the tentative ones beyond them are forgotten.

        Args:
            slots: [R] int64.
            num_computed: [R] int64, tokens in the target's cache after this step.
            tokens: [R, W] committed ids, the first counts[r] of each row.
            counts: [R] int64.
        """
        self.write_draft(slots, tokens, counts)
        self.num_tokens.index_add_(0, slots, counts)
        self.num_computed.index_copy_(0, slots, num_computed)

    def propose(self, slots: Tensor, index: int, tokens: Tensor) -> None:
        """Write draft token number `index` (from 0) behind the known tokens of each slot."""
        self._write(slots, self.num_tokens[slots] + index, tokens)

    def write_draft(self, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write each request's first counts[r] of `tokens` [R, K] behind its known tokens.

        What stands behind those is tentative, so it may be written too: no tokens are lost.
        """
        column = torch.arange(tokens.shape[1], device=tokens.device)
        place = torch.minimum(column, (counts - 1).clamp_min(0).unsqueeze(1))
        position = self.num_tokens[slots].unsqueeze(1) + place
        self._write(slots.unsqueeze(1), position, tokens.gather(1, place))

    def _write(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write ids at positions; those beyond the last one land on it, where nobody reads."""
        last = self.token_ids.shape[1] - 1
        self.token_ids[slots, positions.clamp_max(last)] = tokens.to(torch.int32)

    def _changed_from(self, slot: int, table: Sequence[int]) -> int:
        """The first entry that differs from what the device has, which is taken to be written."""
        written = self._written[slot]
        same = 0
        while same < len(written) and same < len(table) and written[same] == table[same]:
            same += 1
        if same < len(table):
            written[same:] = table[same:]
        return same
