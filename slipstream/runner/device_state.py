"""The state of every running request on the device, indexed by slot."""

from collections.abc import Sequence
from functools import cached_property

import torch

from slipstream.core.adapters import NO_ADAPTER
from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.request import Request
from slipstream.core.spans import position_offset
from slipstream.kernels.devices import send, upload
from slipstream.kernels.preparation import RequestTables
from slipstream.kernels.registry import kernels_for

# A step that was launched before the host knew that a request had ended may still add a token.
SURPLUS_TOKENS = 1


class DeviceState:
    """Persistent tensors with a row for each slot, and one more for the padding of captured steps.

    Ranges over `token_ids[slot]`:

        0 ........ num_computed ........ num_tokens ........ num_tokens + drafts
        | in the target's cache | known | tentative: this step's draft tokens |

    Attributes:
        token_ids: [slots + 1, max_model_len + 1] int32.
        num_tokens: [slots + 1] int64, known tokens.
        num_computed: [slots + 1] int64, tokens in the target's cache.
        most_drafted: [slots + 1] int64, maximum number of tokens of a request, draft tokens
            included: one less than max_tokens and max_model_len allow, as one more token follows.
        block_tables: [slots + 1, max_blocks] int32; twice as wide with a second table for layers
            with a window, see `RequestTables.window_column`.
        adapters: [slots + 1] int64, the slot of each request's adapter, or -1.
        draft_adapters: [slots + 1] int64, the slot of the adapter's factors for the drafter, or -1.
        padding_slot: the last slot, which never has tokens.
        position_offsets: [slots + 1] int64, added to the index of tokens after a request's images
            to get their position (M-RoPE); None: positions are indices.
        ops: batch preparation ops.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        windowed: bool = False,
        several_axes: bool = False,
    ) -> None:
        self.device, self.block_size, self.max_model_len = device, block_size, max_model_len
        self.ops = kernels_for(device).preparation
        self.padding_slot = max_num_seqs
        self.num_slots = max_num_seqs + 1
        self.most_drafted = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self.adapters = torch.full_like(self.most_drafted, NO_ADAPTER)
        self.draft_adapters = torch.full_like(self.most_drafted, NO_ADAPTER)
        max_blocks = -(-max_model_len // block_size)
        shape = (self.num_slots, max_model_len + SURPLUS_TOKENS)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self.position_offsets: torch.Tensor | None = None
        if several_axes:
            self.position_offsets = torch.zeros_like(self.num_tokens)
        self._columns = (0, max_blocks) if windowed else (0,)  # where tables begin
        shape = (self.num_slots, max_blocks * len(self._columns))
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget the block tables on the device; no slot is in use."""
        # A copy of `block_tables`, so that only changed entries are copied to the device.
        count = self.num_slots * len(self._columns)
        self._written: list[list[int]] = [[] for _ in range(count)]

    def apply(self, batch: Batch) -> None:
        """Copy newly admitted requests and new entries of block tables to the device."""
        self._admit([item for item in batch.requests if item.admitted])
        cells: list[int] = []
        blocks: list[int] = []
        for item in batch.requests:
            slot = item.request.slot
            tables = (item.block_table, item.window_table)
            for number, (column, table) in enumerate(zip(self._columns, tables, strict=False)):
                first = self._changed_from(slot * len(self._columns) + number, table)
                gained = table[first:]
                start = slot * self.block_tables.shape[1] + column + first
                cells.extend(range(start, start + len(gained)))
                blocks.extend(gained)
        if cells:
            changes = upload([cells, blocks], self.device)
            self.block_tables.view(-1).index_copy_(0, changes[0], changes[1].to(torch.int32))

    def _admit(self, items: Sequence[ScheduledRequest]) -> None:
        """Write the requests to their slots, in as few copies as possible, since an idle GPU waits
        for them."""
        if not items:
            return
        known = [item.request.token_ids for item in items]
        token_ids = torch.tensor([token for ids in known for token in ids], dtype=torch.int32)
        of_requests = send(token_ids, self.device).split_with_sizes([len(ids) for ids in known])
        for item, own in zip(items, of_requests, strict=True):
            self.token_ids[item.request.slot, : len(own)] = own
        columns = {
            "num_tokens": [len(ids) for ids in known],
            "num_computed": [item.start for item in items],
            "most_drafted": [self._most_drafted(item.request) for item in items],
            "adapters": [item.adapter for item in items],
            "draft_adapters": [
                item.adapter if item.request.adapts_drafts else NO_ADAPTER for item in items
            ],
        }
        if self.position_offsets is not None:
            columns["position_offsets"] = [position_offset(it.request.spans) for it in items]
        sent = upload([[item.request.slot for item in items], *columns.values()], self.device)
        for name, column in zip(columns, sent[1:], strict=True):
            getattr(self, name).index_copy_(0, sent[0], column)

    def _most_drafted(self, request: Request) -> int:
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len) - 1

    @cached_property
    def tables(self) -> RequestTables:
        """These tensors, as arguments of kernels."""
        return RequestTables(
            self.token_ids,
            self.num_tokens,
            self.num_computed,
            self.block_tables,
            self.block_size,
            self._columns[-1],
        )

    def _changed_from(self, number: int, table: Sequence[int]) -> int:
        """The first entry of `table` that the device does not have yet; records the rest."""
        written = self._written[number]
        same = num_equal(written, table)
        if same < len(table):
            written[same:] = table[same:]
        return same


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix of two sequences of the same type."""
    if one[: len(other)] == other:
        return len(other)
    same, run = 0, 64
    while same + run <= len(other) and one[same : same + run] == other[same : same + run]:
        same += run
    while same < len(one) and same < len(other) and one[same] == other[same]:
        same += 1
    return same
