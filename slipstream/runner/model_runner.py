"""One pass of one model over rows of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.decoder import Decoder
from slipstream.runner.device_state import DeviceState
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.runner.spans import embed, with_axes, with_offsets, with_sight


@dataclass(frozen=True, eq=False)
class Forward:
    """The result of a pass.

    Attributes:
        hidden: [T, hidden_size], after the final norm, request by request.
        layout: where the rows stood.
        streams: the residual streams that were asked for, each [T, hidden_size].
        embedded: [T, hidden_size], what entered the first layer where images are among the rows;
            None: the embeddings of the tokens.
    """

    hidden: Tensor
    layout: RowLayout
    streams: Sequence[Tensor] = ()
    embedded: Tensor | None = None


class ModelRunner:
    """Expands requests to flat rows, runs the network, and turns hidden states into logits.

    Args:
        head: in place of the network's own, one over some of its tokens.
        stream_layers: layers whose incoming residual stream every pass keeps (`Forward.streams`).
        of_target: it sees images; else a text with placeholders at the positions of a text.

    Attributes:
        has_states: a layer keeps a state of each request, which is told what was accepted.
    """

    def __init__(
        self,
        network: Decoder,
        cache: ModelCache,
        state: DeviceState,
        head: LanguageModelHead | None = None,
        stream_layers: Sequence[int] = (),
        of_target: bool = False,
    ) -> None:
        self._network, self._cache, self._state = network, cache, state
        self._head = head or network.head
        self._stream_layers, self._of_target = tuple(stream_layers), of_target
        self.has_states = cache.has_states

    def forward(self, rows: PassRows) -> Forward:
        """Compute `rows`, whose ids stand in the device state, and write their keys and values."""
        layout = self._lay_out(rows)
        num_known = rows.lengths if rows.num_known is None else rows.num_known
        states = self._cache.state_inputs(rows.slots, rows.starts, num_known, rows.saved)
        if states is not None:
            layout = replace(layout, inputs=replace(layout.inputs, states=states))
        layout = self._adapted(layout, rows)
        token_ids, embedded, added = embed(self._network, layout, rows.prompts)
        given = token_ids, layout.inputs, self._cache.layers, self._stream_layers
        hidden, streams = self._network(*given, embedded, added)
        return Forward(hidden, layout, streams, embedded)

    def _adapted(self, layout: RowLayout, rows: PassRows) -> RowLayout:
        """The rows with their adapters, where the network has slots for some."""
        if not rows.adapted or self._network.adapters is None:
            return layout
        state = self._state
        slots = state.adapters if self._of_target else state.draft_adapters
        adapters = layout.of_requests(slots[rows.slots])
        return replace(layout, inputs=replace(layout.inputs, adapters=adapters))

    def _lay_out(self, rows: PassRows) -> RowLayout:
        """The rows at their positions, which are not their places behind images where positions
        have several axes."""
        layout = lay_out(self._state, rows, self._cache.has_windows)
        if rows.prompts:
            layout = with_sight(layout, rows.prompts)
        offsets = self._state.position_offsets
        if offsets is None or not self._of_target:
            return layout
        layout = with_offsets(layout, offsets[rows.slots])
        return with_axes(self._network, layout, rows.prompts) if rows.prompts else layout

    def keep_path(self, slots: Tensor, path: Tensor, counts: Tensor) -> None:
        """Move what is cached of the accepted path of each tree that the last pass has read to
        where a chain would have it.

        Args:
            slots: [R] int64; the root is the last known token.
            path: [R, W] int64, the nodes of the path, the root (0) first.
            counts: [R] int64, how many follow the root; 0 also where there is no tree.
        """
        roots = self._state.num_tokens[slots] - 1
        self._cache.keep_path(self._state.tables, slots, roots, path, counts)

    def begin(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Requests take these slots, each with the states of a checkpoint; -1: without computed
        tokens, or where blocks are all that there is of them."""
        self._cache.begin(slots, checkpoints)

    def commit(self, slots: Tensor, num_accepted: Tensor) -> None:
        """Keep the first num_accepted[r] draft rows of each request in the last pass; [R] int64."""
        self._cache.commit(slots, num_accepted)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, v] float32, of the columns that the head has."""
        return self._head(hidden)
