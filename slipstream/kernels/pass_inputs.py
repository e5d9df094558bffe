"""What all layers of one pass share: its rows, their pages, and what they may see."""

from dataclasses import dataclass, field, replace

from torch import Tensor

MOST_TREE_TOKENS = 63  # the bits of `TreeInputs.ancestors`, without the sign


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where the rows of a pass stand in their requests.

    Attributes:
        query_start: [R + 1] int64, first row of each request; the last entry is the row count.
        positions: [T] int64, of each row.
        places: [T] int64, which token of the context that `Paging` has each row is, where that is
            an excerpt of its request; None: the one of its position.
        max_rows: upper bound on the rows of any request, as far as the host knows; None if it does
            not. A hint for launch sizes: results do not depend on it.
    """

    query_start: Tensor
    positions: Tensor
    max_rows: int | None = None
    places: Tensor | None = None

    @property
    def in_context(self) -> Tensor:
        """[T] int64, which token of the paged context each row is."""
        return self.positions if self.places is None else self.places


@dataclass(frozen=True, eq=False)
class Paging:
    """How the context of each request is paged, for layers that share block tables.

    Attributes:
        block_tables: [R, max_blocks] int32.
        context_lens: [R] int64, tokens of each request in the cache once this pass has written.
        slots: [T] int64, where each row's key and value go; -1 writes nothing.
        max_context: upper bound on `context_lens`; a hint like `RowPlaces.max_rows`.
    """

    block_tables: Tensor
    context_lens: Tensor
    slots: Tensor
    max_context: int | None = None


@dataclass(frozen=True, eq=False)
class TreeInputs:
    """Rows that are nodes of token trees: what each sees of the tokens of its tree.

    Attributes:
        starts: [R] int64, the first token of each request's tree; all before it are seen, as far
            as the window allows, which is larger than a tree is deep.
        tokens: [T] int64, which token of its request a row is: its position is that of the text
            it continues, so several rows of a request may have the same one.
        ancestors: [T] int64, bit i says whether a row sees token starts + i, of those up to itself;
            -1 sees all of them, as rows outside of trees do.
    """

    starts: Tensor
    tokens: Tensor
    ancestors: Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which tokens of its context a row sees, besides the window of a layer.

    Attributes:
        causal: false: a row also sees the tokens behind its own, up to `context_lens`, so that all
            rows of a request see each other.
        first_seen: cached tokens before this one are seen by no row: nothing has been stored there
            (but the numbers there are finite).
        tree: of passes with rows that are not a causal chain.
        last_seen: [T] int64, a row also sees the tokens behind its own up to this one, as rows of
            an image may that see all of it; None: no row does.
    """

    causal: bool = True
    first_seen: int = 0
    tree: TreeInputs | None = None
    last_seen: Tensor | None = None


CAUSAL = Visibility()


@dataclass(frozen=True, eq=False)
class StateInputs:
    """How the states of the requests of a pass move on, in layers that keep one of each.

    A state covers the tokens before a request's first row but for the last `pending` ones. Tokens
    are taken in when it is certain that they stay: known ones in their own pass, draft tokens in
    the pass behind the one that has verified them.

    Attributes:
        slots: [R] int64, the place of each request's state; padding has one of its own.
        num_known: [R] int64, leading rows of each request that stay whatever is refused.
        pending: [R] int64, accepted draft rows of the request's pass before this one.
        save_at: [R] int64: the state that covers so many tokens is kept as a checkpoint, if this
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
    """What the layers of one pass are given beside activations and caches.

    Attributes:
        paging: of layers without a window.
        window_paging: of layers with a window, where those have blocks of their own; None: alike.
        adapters: [T] int64, the slot of each row's adapter, or -1; None: no row has one.
        states: of layers that keep a state of each request; None where no layer does.
        layer_inputs: [T, layers, size] beside the stream; None where no layer takes any.
        embedded: [T, H], what a drafting head takes in place of its tokens' embeddings where images
            are among its rows; None: nothing.
        prepared: what a backend made of these inputs for its first layer, by the backend's name:
            the others need not do so again.
    """

    rows: RowPlaces
    paging: Paging
    sees: Visibility = CAUSAL
    adapters: Tensor | None = None
    window_paging: Paging | None = None
    states: StateInputs | None = None
    layer_inputs: Tensor | None = None
    embedded: Tensor | None = None
    prepared: dict[str, object] = field(default_factory=dict, init=False, repr=False)

    def seen_through(self, window: int | None) -> "PassInputs":
        """The inputs of a layer with this window: its paging is `paging`."""
        if window is None or self.window_paging is None:
            return self
        found = self.prepared.get("window")
        if not isinstance(found, PassInputs):
            found = replace(self, paging=self.window_paging, window_paging=None)
            self.prepared["window"] = found
        return found

    def read_only(self) -> "PassInputs":
        """The inputs of a layer that stores nothing, in `paging`."""
        found = self.prepared.get("read only")
        if not isinstance(found, PassInputs):
            slots = self.paging.slots
            paging = replace(self.paging, slots=slots.new_full(slots.shape, -1))
            found = replace(self, paging=paging)
            self.prepared["read only"] = found
        return found
