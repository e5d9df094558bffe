"""The inputs that all layers of a pass share: rows, block tables, and what rows may see."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

MOST_TREE_TOKENS = 63  # the bits of `TreeInputs.ancestors`, without the sign


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The request and position of each row of a pass.

    Attributes:
        query_start: [R + 1] int64, first row of each request; the last entry is the row count.
        positions: [T] int64, the position of each row, for rotary embeddings.
        places: [T] int64, the index of each row's token in the paged context, if that is an excerpt
            of the request; None: the index is the position.
        max_rows: upper bound on the rows of any request, as far as the host knows; None if it does
            not. A hint for launch sizes: results do not depend on it.
    """

    query_start: Tensor
    positions: Tensor
    max_rows: int | None = None
    places: Tensor | None = None

    @property
    def in_context(self) -> Tensor:
        """[T] int64, the index of each row's token in the paged context."""
        return self.positions if self.places is None else self.places

    @property
    def request(self) -> Tensor:
        """[T] int64, the request of each row."""
        row = torch.arange(len(self.positions), device=self.positions.device)
        return torch.searchsorted(self.query_start[1:], row, right=True)


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """A group of requests whose block tables begin with the same blocks, all of them computed. A
    backend may read these blocks once for the whole group; results do not depend on that.

    Attributes:
        tokens: [R] int64, for requests of the group the number of tokens in these blocks, else 0.
        members: [R] int64, 1 + the index of each request of the group, in order, then 0.
    """

    tokens: Tensor
    members: Tensor


@dataclass(frozen=True, eq=False)
class Paging:
    """How the context of each request is paged, for layers that share block tables.

    Attributes:
        block_tables: [R, max_blocks] int32.
        context_lens: [R] int64, tokens of each request in the cache after this pass has written.
        slots: [T] int64, where each row's key and value are stored; -1: nowhere.
        shared: requests with the same leading blocks; None: not known.
    """

    block_tables: Tensor
    context_lens: Tensor
    slots: Tensor
    shared: SharedBlocks | None = None


@dataclass(frozen=True, eq=False)
class TreeInputs:
    """Which tokens of its tree each row sees, for rows that are nodes of token trees.

    Attributes:
        starts: [R] int64, the first token of each request's tree. All earlier tokens are visible,
            within the layer's window, which is larger than the depth of a tree.
        tokens: [T] int64, the index of each row's token in its request. (Rows at the same depth
            have the same position.)
        ancestors: [T] int64, bit i is 1 if the row attends to token starts + i, among tokens up to
            its own; -1: it attends to all of them, as rows outside of trees do.
    """

    starts: Tensor
    tokens: Tensor
    ancestors: Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which tokens of its context a row sees, besides the window of a layer.

    Attributes:
        causal: if false, a row also sees the tokens after its own, up to `context_lens`, so that
            all rows of a request see each other.
        first_seen: cached tokens before this one are not visible: nothing was stored there (but
            the numbers there are finite).
        tree: for rows that are nodes of token trees; None: there are none.
        last_seen: [T] int64, a row also sees the tokens after its own up to this one, such as the
            rest of its image; None: no row does.
    """

    causal: bool = True
    first_seen: int = 0
    tree: TreeInputs | None = None
    last_seen: Tensor | None = None


CAUSAL = Visibility()


@dataclass(frozen=True, eq=False)
class StateInputs:
    """How a pass updates the recurrent states of its requests.

    A state includes a token only once it is certain that the token stays: a known token in its own
    pass, a draft token in the pass after the one that verified it. So a state covers the tokens in
    front of a request's first row, without the last `pending` ones.

    Attributes:
        slots: [R] int64, the place of each request's state; padding has one of its own.
        num_known: [R] int64, leading rows of each request that are known tokens.
        pending: [R] int64, draft rows of the request's last pass that were accepted.
        save_at: [R] int64: the state that covers this many tokens is saved as a checkpoint, if this
            pass gets there; -1: none is.
        saved: [R] int64, the place of that checkpoint.
    """

    slots: Tensor
    num_known: Tensor
    pending: Tensor
    save_at: Tensor
    saved: Tensor


@dataclass(frozen=True, eq=False)
class PassInputs:
    """The inputs of all layers of one pass, besides activations and caches.

    Attributes:
        paging: for layers without a window.
        window_paging: for layers with a window, if those have blocks of their own; None: `paging`.
        adapters: [T] int64, the slot of each row's adapter, or -1; None: no row has one.
        states: for layers with recurrent states; None: there are none.
        layer_inputs: [T, layers, size], inputs of single layers besides the stream; None: none.
        embedded: [T, H], replaces the token embeddings in a drafting head whose rows include
            images; None: there are none.
        pooled_rows: of ranks that share experts, the largest number of rows that one has; None: all
            have as many, or there are no such ranks.
        prepared: what a backend has computed from these inputs for one layer and reuses for the
            others, by the backend's name.
    """

    rows: RowPlaces
    paging: Paging
    sees: Visibility = CAUSAL
    adapters: Tensor | None = None
    window_paging: Paging | None = None
    states: StateInputs | None = None
    layer_inputs: Tensor | None = None
    embedded: Tensor | None = None
    pooled_rows: int | None = None
    prepared: dict[str, object] = field(default_factory=dict, init=False, repr=False)

    def seeing(self, sees: Visibility) -> "PassInputs":
        """These inputs with another visibility; faster than `replace`."""
        return PassInputs(
            *(self.rows, self.paging, sees, self.adapters, self.window_paging, self.states),
            *(self.layer_inputs, self.embedded, self.pooled_rows),
        )

    def of_rows(self, rows: Tensor) -> "PassInputs":
        """The inputs of a feed-forward part that computes these rows only, [n] int64."""
        adapters, layer_inputs = self.adapters, self.layer_inputs
        return replace(
            self,
            adapters=None if adapters is None else adapters[rows],
            layer_inputs=None if layer_inputs is None else layer_inputs[rows],
        )

    def within_window(self, window: int | None) -> "PassInputs":
        """The inputs of a layer with this window, whose paging is then in `paging`."""
        if window is None or self.window_paging is None:
            return self
        found = self.prepared.get("window")
        if not isinstance(found, PassInputs):
            found = replace(self, paging=self.window_paging, window_paging=None)
            self.prepared["window"] = found
        return found

    def read_only(self) -> "PassInputs":
        """The inputs of a layer that stores no keys and values: all slots of `paging` are -1."""
        found = self.prepared.get("read only")
        if not isinstance(found, PassInputs):
            slots = self.paging.slots
            paging = replace(self.paging, slots=slots.new_full(slots.shape, -1))
            found = replace(self, paging=paging)
            self.prepared["read only"] = found
        return found


def at_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """values [n, H] of `rows` [n] int64 -> [num_rows, H]; the other rows are undefined."""
    return values.new_empty((num_rows, values.shape[1])).index_copy_(0, rows, values)
