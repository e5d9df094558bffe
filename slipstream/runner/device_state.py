"""What the device knows of every running request, indexed by slot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.batch import Batch


class DeviceState:
    """Persistent tensors, one row per slot.

    Ranges over `token_ids[slot]`:

        0 ........ num_computed ........ num_tokens ........ num_tokens + drafts
        | in the target's cache | known | tentative: this step's draft tokens |

    Attributes:
        token_ids: [slots, max_model_len] int32.
        num_tokens: [slots] int64, known tokens.
        num_computed: [slots] int64, tokens in the target's cache.
        block_tables: [slots, max_blocks] int32.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.device, self.block_size = device, block_size
        self.token_ids = torch.zeros(
            (max_num_seqs, max_model_len), dtype=torch.int32, device=device
        )
        self.num_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(
            (max_num_seqs, max_blocks), dtype=torch.int32, device=device
        )
        # What `block_tables` holds, so that only changed entries are copied to the device.
        self._written: list[list[int]] = [[] for _ in range(max_num_seqs)]

    def apply(self, batch: Batch) -> None:
        """Take in the schedule: newly admitted requests and the blocks that tables gained."""
        for item in batch.requests:
            slot = item.request.slot
            if item.admitted:
                known = torch.tensor(item.request.token_ids, dtype=torch.int32)
                self.token_ids[slot, : len(known)] = known
                self.num_tokens[slot] = len(known)
                self.num_computed[slot] = item.start
            self._write_table(slot, item.block_table)

    def commit(self, slots: Tensor, num_computed: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Append committed tokens; the tentative ones beyond them are forgotten.

        Args:
            slots: [R] int64.
            num_computed: [R] int64, tokens in the target's cache after this step.
            tokens: [R, W] committed ids, the first counts[r] of each row.
            counts: [R] int64.
        """
        self.write_draft(slots, tokens, counts)
        self.num_tokens[slots] += counts
        self.num_computed[slots] = num_computed

    def propose(self, slots: Tensor, index: int, tokens: Tensor) -> None:
        """Write draft token number `index` (from 0) behind the known tokens of each slot."""
        self.token_ids[slots, self.num_tokens[slots] + index] = tokens.to(torch.int32)

    def write_draft(self, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write each request's first counts[r] of `tokens` [R, K] behind its known tokens."""
        request, offset = _within(counts, tokens.shape[1])
        position = self.num_tokens[slots][request] + offset
        self.token_ids[slots[request], position] = tokens[request, offset].to(torch.int32)

    def _write_table(self, slot: int, table: Sequence[int]) -> None:
        written = self._written[slot]
        same = 0
        while same < len(written) and same < len(table) and written[same] == table[same]:
            same += 1
        if same < len(table):
            tail = list(table[same:])
            self.block_tables[slot, same : len(table)] = torch.tensor(tail, dtype=torch.int32)
            written[same:] = tail


def _within(counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Indices (row, column) of the first counts[row] columns of each row."""
    columns = torch.arange(width, device=counts.device)
    row, column = (columns < counts.unsqueeze(1)).nonzero(as_tuple=True)
    return row, column
