"""Forward passes of one model over the rows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.core.batch import LastCheckpoint
from slipstream.kernels.devices import upload
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.delta_net import WaitingRows, waiting_inputs, waiting_rows
from slipstream.layers.embedding import LanguageModelHead
from slipstream.layers.stack import StreamAddends
from slipstream.models.decoder import Decoder
from slipstream.runner.captured_passes import CapturedPasses, CapturedSave
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import Recorder
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.runner.spans import embed, with_axes, with_bidirectional_spans, with_offsets


@dataclass(frozen=True, eq=False)
class Forward:
    """The result of a pass.

    Attributes:
        hidden: [T, hidden_size], after the final norm, request by request; undefined in rows that
            are not read (`PassRows.num_read`).
        layout: request and position of each row.
        streams: the residual streams of `stream_layers`, each [T, hidden_size].
        embedded: [T, hidden_size], the input of the first layer if rows include images; None: the
            input is the embeddings of the tokens.
        num_rows: if ranks share experts, the number of rows of each rank, padding included; else T.
    """

    hidden: Tensor
    layout: RowLayout
    streams: Sequence[Tensor] = ()
    embedded: Tensor | None = None
    num_rows: int = 0


class ModelRunner:
    """Expands requests to flat rows, runs the network, and turns hidden states into logits.

    Args:
        head: replaces the network's own head, such as a head for some of the tokens.
        stream_layers: layers whose incoming residual stream every pass returns (`Forward.streams`).
        of_target: the model is the target, which gets the embeddings of images. A drafter gets
            their placeholder tokens, at the positions of text.
        record: captures passes over short prompts; None: they are not captured.

    Attributes:
        has_states: a layer has recurrent states, so `commit` has to be called.
    """

    def __init__(
        self,
        network: Decoder,
        cache: ModelCache,
        state: DeviceState,
        head: LanguageModelHead | None = None,
        stream_layers: Sequence[int] = (),
        of_target: bool = False,
        record: Recorder | None = None,
    ) -> None:
        self._network, self._cache, self._state = network, cache, state
        self._head = head or network.head
        self._stream_layers, self._of_target = tuple(stream_layers), of_target
        self.has_states = cache.has_states
        self._captured: CapturedPasses | None = None
        self._captured_save: CapturedSave | None = None
        if record is not None:
            self._captured = CapturedPasses(self._pass, state.num_slots, record)
            if cache.num_waiting:
                sizes = cache.num_waiting, state.num_slots - 1, state.device
                self._captured_save = CapturedSave(self._save, *sizes, record)

    def forward(self, rows: PassRows) -> Forward:
        """Run a pass over `rows`, whose token ids are in the device state; writes their caches."""
        layout = self._lay_out(rows)
        num_known = rows.lengths if rows.num_known is None else rows.num_known
        states = self._cache.state_inputs(rows.slots, rows.starts, num_known, rows.saved)
        if states is not None:
            layout = replace(layout, inputs=replace(layout.inputs, states=states))
        layout, num_rows = self._pooled(self._adapted(layout, rows))
        token_ids, embedded, added = embed(self._network, layout, rows.prompts)
        # Ranks that share experts compute each other's rows, and agree on their number.
        num_read = None if self._network.pool is not None else rows.num_read
        hidden, *streams = self._compute(layout, token_ids, embedded, added, num_read)
        return Forward(hidden, layout, streams, embedded, num_rows)

    def _compute(
        self,
        layout: RowLayout,
        token_ids: Tensor,
        embedded: Tensor | None = None,
        added: StreamAddends | None = None,
        num_read: int | None = None,
    ) -> Sequence[Tensor]:
        """Run the network, or replay its pass; see `_pass` and `Decoder`."""
        if self._captured is not None and layout.row_starts and added is None:
            given = (token_ids,) if embedded is None else (token_ids, embedded)
            found = self._captured.run(layout.inputs, *given)
            if found is not None:
                return found
        return self._pass(layout.inputs, token_ids, embedded, added, layout.read_rows(num_read))

    def _pass(
        self,
        inputs: PassInputs,
        token_ids: Tensor,
        embedded: Tensor | None = None,
        added: StreamAddends | None = None,
        read: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """Run the network; returns the hidden states, and then the streams."""
        given = token_ids, inputs, self._cache.layers, self._stream_layers
        hidden, streams = self._network(*given, embedded, added, read)
        return [hidden, *streams]

    def _pooled(self, layout: RowLayout) -> tuple[RowLayout, int]:
        """The layout with the number of rows on which ranks agree if they share experts, and
        `Forward.num_rows`. Passes that are not exact have equally many rows on all ranks."""
        pool, count = self._network.pool, len(layout.token_ids)
        if pool is None:
            return layout, count
        if layout.row_starts:
            count = pool.agree(count)
            layout = replace(layout, inputs=replace(layout.inputs, pooled_rows=count))
        return layout, count * pool.size

    def assist(self) -> int:
        """Take part, without own rows, in an exact pass of the ranks with which this one shares
        experts; returns `Forward.num_rows`."""
        pool = self._network.pool
        assert pool is not None, "there are other ranks"
        count = pool.agree(0)
        self._network.assist(count)
        return count * pool.size

    def _adapted(self, layout: RowLayout, rows: PassRows) -> RowLayout:
        """The layout with the adapter of each row, if the network has slots for adapters."""
        if not rows.adapted or self._network.adapters is None:
            return layout
        state = self._state
        slots = state.adapters if self._of_target else state.draft_adapters
        return layout.with_adapters(slots[rows.slots])

    def _lay_out(self, rows: PassRows) -> RowLayout:
        """The layout of the rows. With M-RoPE, the position of a row after an image differs from
        its index in the text."""
        layout = lay_out(self._state, rows, self._cache.has_windows)
        if rows.prompts:
            layout = with_bidirectional_spans(layout, rows.prompts)
        offsets = self._state.position_offsets
        if offsets is None or not self._of_target:
            return layout
        layout = with_offsets(layout, offsets[rows.slots])
        return with_axes(self._network, layout, rows.prompts) if rows.prompts else layout

    def keep_path(self, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        """Move the cache entries of each tree's accepted path to the slots that they would have in
        a chain.

        Args:
            slots: [R] int64; the root is the last known token.
            path: [R, W] int64, the nodes of the path, the root (0) first.
            counts: [R] int64, number of nodes after the root; 0 for requests without a tree.
        """
        roots = self._state.num_tokens[slots] - 1
        self._cache.keep_path(self._state.tables, slots, roots, path, counts)

    def begin(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Initialise the recurrent states of new requests in these slots from checkpoints; -1 for a
        request that begins without a checkpoint."""
        self._cache.begin(slots, checkpoints)

    def save_last(self, checkpoints: Sequence[LastCheckpoint]) -> None:
        """Write checkpoints of ended requests, whose last pass was the last in their slots."""
        if not checkpoints:
            return
        slots, counts = [it.slot for it in checkpoints], [it.count for it in checkpoints]
        places = self._cache.places_of([it.place for it in checkpoints])
        if self._captured_save is not None:
            for one in zip(slots, counts, places, strict=True):
                self._captured_save(*one)
            return
        numbers, device = waiting_rows(slots, counts, places), self._state.device
        self._save(waiting_inputs([upload(it, device) for it in numbers], max(counts)))

    def _save(self, waiting: WaitingRows) -> None:
        self._network.save_states(waiting, self._cache.layers)

    def commit(self, slots: Tensor, num_accepted: Tensor) -> None:
        """Include the first num_accepted[r] draft rows of the last pass in states; [R] int64."""
        self._cache.commit(slots, num_accepted)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, v] float32, the logits of the head's columns."""
        return self._head(hidden)
