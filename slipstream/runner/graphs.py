"""CUDA graphs of the device's part of a step: captured once for each size, then replayed."""

import gc
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from slipstream.core.step_form import CapturedForm
from slipstream.kernels.devices import upload
from slipstream.kernels.registry import kernels_for
from slipstream.models.loading import ProgressBar
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.prefix_groups import PrefixGroup
from slipstream.sampling.state import SamplingState, Uses

logger = logging.getLogger("slipstream")

T = TypeVar("T")
# Called between two graphs of a captured function, with a value for the host.
Between = Callable[[Any], Any]
# Called with a DeviceBatch and, if the host has a part in the middle, a function for that part.
BatchFunction = Callable[..., T]

LEAN = (frozenset[Uses](), frozenset({Uses.SAMPLING}))
# Features that a graph has only if a request of its batch uses them.
OF_DRAFTS = frozenset({Uses.BLOCK, Uses.COUPLED})
APART = OF_DRAFTS | {Uses.GRAMMAR, Uses.ADAPTER}
# Bad words are matched on the host, so no graph has them.
FULL = frozenset(Uses) - {Uses.BAD_WORDS} - APART
# Number of steps that could have had fewer rows, or read shared blocks once, before a graph for
# that is captured: by then they have lost about as much time as capturing takes.
WANTED_BEFORE_CAPTURE = 32
# Held while a graph is captured: work of other threads on the GPU would break the capture.
CAPTURING = Lock()


def captures_graphs(device: torch.device, enforce_eager: bool) -> bool:
    """Whether steps are captured on this device."""
    if device.type != "cuda" or enforce_eager:
        return False
    return kernels_for(device).network.backend != "reference"


class HostPart(Protocol):
    """The host's part in the middle of a captured function."""

    def buffers(self, tensors: Any) -> Any:
        """The fixed tensors that the rest of the function reads."""

    def fill(self, tensors: Any) -> Any:
        """Compute on the host, from these tensors, and write the results to the buffers."""


@dataclass(frozen=True)
class _Key:
    """The key of a graph. `rows`: number of rows of the target's pass; None: width + 1 for each
    request. `shares`: attention reads the blocks that requests share once for all of them."""

    name: str
    bucket: int
    width: int
    uses: frozenset[Uses]
    guessed: bool
    rows: int | None = None
    shares: bool = False


@dataclass(eq=False)
class _Captured(Generic[T]):
    """A captured call: the tensor of numbers that it reads, and the function that replays it."""

    columns: Tensor
    replay: Callable[[Between], T]
    last_columns: list[list[int]] | None = None


class Recorder:
    """Captures calls in CUDA graphs that share one memory pool.

    Attributes:
        graphs: the graphs that still exist; see `keep_until_reset`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graphs = set[torch.cuda.CUDAGraph]()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, function: Callable[[Between], T], buffers: Between
    ) -> Callable[[Between], T]:
        """A function that repeats the call's device work and returns the same tensors again.

        Args:
            function: captured as one graph, or as two if it calls its argument in between.
            buffers: used instead of that argument during the capture.
        """
        with CAPTURING:
            return self._captured(function, buffers)

    def _captured(
        self, function: Callable[[Between], T], buffers: Between
    ) -> Callable[[Between], T]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # once before, so that kernels are compiled
            function(buffers)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graphs: list[torch.cuda.CUDAGraph] = []
        values: list[Any] = []  # what the host gets after each graph except the last
        # Collecting a dropped graph's memory in the middle of a capture would break it.
        collects = gc.isenabled()
        gc.disable()
        try:
            with ExitStack() as capture:

                def begin() -> None:
                    graphs.append(torch.cuda.CUDAGraph())
                    capture.enter_context(torch.cuda.graph(graphs[-1], pool=self._pool))

                def cut(value: Any) -> Any:
                    capture.close()
                    values.append(value)
                    begin()
                    return buffers(value)

                begin()
                result = function(cut)
        finally:
            if collects:
                gc.enable()

        def replay(between: Between) -> T:
            graphs[0].replay()
            for value, graph in zip(values, graphs[1:], strict=True):
                between(value)
                graph.replay()
            return result

        keep_until_reset(graphs, replay, self.graphs)
        return replay


def keep_until_reset(graphs: list[torch.cuda.CUDAGraph], owner: object, kept: set[Any]) -> None:
    """Keep these graphs in `kept` until `owner` is freed, and reset them then.

    `kept` has strong references, so that `owner` or its process group can reset them, whichever
    ends first. Weak references would not work: the garbage collector clears weak references to an
    unreachable cycle before it calls finalizers.
    """
    kept.update(graphs)
    finalize(owner, _reset, graphs, kept)


def _reset(graphs: list[torch.cuda.CUDAGraph], kept: set[Any]) -> None:
    for graph in graphs:
        graph.reset()
    kept.difference_update(graphs)


class GraphRunner:
    """Runs functions of a batch by replaying graphs of them.

    A batch is padded to the next bucket with requests that have no tokens and compute nothing. A
    capture runs only on padding, so it can be done at any time. All graphs share one memory pool,
    so the results of a replay are valid only until the next one.

    Args:
        form: the sizes that are captured; the smallest that is large enough is used for a batch.
        recorder: captures calls.
        of_drafts: features that all sampled requests use in steps with drafts.
        adapted: requests may have adapters.
    """

    def __init__(
        self,
        state: DeviceState,
        sampling: SamplingState,
        form: CapturedForm,
        recorder: Recorder,
        of_drafts: frozenset[Uses] = frozenset(),
        adapted: bool = False,
    ) -> None:
        self._state, self._sampling, self._form = state, sampling, form
        self._of_drafts = of_drafts
        plain = frozenset[Uses]()
        self._variants = (plain, plain | {Uses.ADAPTER}) if adapted else (plain,)
        self._graphs: dict[_Key, _Captured[Any]] = {}
        self._wanted = Counter[_Key]()
        self._generation = sampling.generation
        self._record = recorder

    @torch.inference_mode()
    def run(
        self,
        name: str,
        function: BatchFunction[T],
        packed: PackedBatch,
        host: HostPart | None = None,
        packs: bool = False,
    ) -> T:
        """`function(batch)` for the packed batch, whose requests have the first rows of the result.

        Args:
            host: the host's part in the middle of the function, if it has one.
            packs: the function runs the target over a known token and the draft of each request, so
                it may be captured with fewer rows.
        """
        key = self._key(name, packed, packs)
        if packed.shared is not None and not key.shares:
            packed = replace(packed, shared=None)
        captured: _Captured[T] | None = self._graphs.get(key)
        if captured is None:
            captured = self._capture(key, function, host)
        columns = self._padded(packed.columns(key.width), key.bucket)
        if columns != captured.last_columns:
            captured.last_columns = None  # in case the copy is interrupted
            captured.columns.copy_(upload(columns, self._state.device))
            captured.last_columns = columns
        return captured.replay(pass_on if host is None else host.fill)

    def expect(self, uses: frozenset[Uses]) -> None:
        """Allocate the tensors that graphs of these features read. Ranks that replay graphs of one
        shape call this with the features of all ranks, so that all drop the same graphs."""
        if uses - APART not in LEAN:
            self._sampling.allocate_all()

    def widened(self, uses: frozenset[Uses]) -> frozenset[Uses]:
        """`uses`, with all rare features if there is one: for every combination of them there would
        be kernels to compile and graphs to capture. Allocates the tensors that these read."""
        self.expect(uses)
        return uses if uses - APART in LEAN else FULL | uses & APART

    def capture_all(
        self, function: BatchFunction[Any], guessed: bool, progress_bar: ProgressBar
    ) -> None:
        """Capture the graphs for requests without rare features; the largest first, so that smaller
        ones fit into its memory."""
        keys = [
            _Key("step", bucket, width, self._lean(uses, width) | variant, guessed and width > 0)
            for width in reversed(self._form.widths)
            for bucket in reversed(self._form.buckets)
            for uses in reversed(LEAN)
            for variant in self._variants
        ]
        with progress_bar("capturing steps", len(keys), "graphs") as progress:
            for key in keys:
                self._capture(key, function)
                progress(1)

    def _lean(self, uses: frozenset[Uses], width: int) -> frozenset[Uses]:
        return uses | self._of_drafts if uses and width else uses

    def _key(self, name: str, packed: PackedBatch, packs: bool) -> _Key:
        num_requests = max(len(packed.slots), packed.least_requests)
        bucket, width = self._form.bucket(num_requests), self._form.width(packed.width)
        uses = self.widened(packed.uses)
        if not width:
            uses -= OF_DRAFTS
        if self._generation != self._sampling.generation:
            lean = {
                key: it for key, it in self._graphs.items() if key.uses - {Uses.ADAPTER} in LEAN
            }
            self._graphs = lean
            self._generation = self._sampling.generation
        key = _Key(name, bucket, width, uses, packed.guesses is not None and width > 0)
        if packed.shared is not None:
            key = self._sharing(key)
        num_rows = max(len(packed.slots) + packed.num_verified, packed.least_rows)
        return self._with_fewer_rows(key, num_rows) if packs else key

    def _sharing(self, key: _Key) -> _Key:
        """The key of steps that read shared blocks once, if these are captured or often wanted."""
        sharing = replace(key, shares=True)
        self._wanted[sharing] += 1
        return sharing if self._wanted[sharing] >= WANTED_BEFORE_CAPTURE else key

    def _with_fewer_rows(self, key: _Key, num_rows: int) -> _Key:
        """The key with the fewest rows that suffice and whose graph is captured or often wanted."""
        totals = self._form.totals(key.bucket, key.width)
        fitting = [replace(key, rows=rows) for rows in totals[:-1] if rows >= num_rows]
        if fitting and fitting[0] not in self._graphs:
            self._wanted[fitting[0]] += 1
            if self._wanted[fitting[0]] >= WANTED_BEFORE_CAPTURE:
                return fitting[0]
        return next((packed for packed in fitting if packed in self._graphs), key)

    def _padded(self, columns: list[list[int]], bucket: int) -> list[list[int]]:
        """The columns, extended by columns of requests without tokens."""
        missing = bucket - len(columns[0])
        slots, *rest = columns
        padding = [0] * missing
        return [
            slots + [self._state.padding_slot] * missing,
            *(numbers + padding for numbers in rest),
        ]

    @torch.inference_mode()
    def _capture(
        self, key: _Key, function: BatchFunction[T], host: HostPart | None = None
    ) -> _Captured[T]:
        nobody = PackedBatch([], [], [], [], key.width, key.uses, [] if key.guessed else None)
        if key.shares:
            nobody = replace(nobody, shared=PrefixGroup())
        columns = upload(self._padded(nobody.columns(key.width), key.bucket), self._state.device)

        def call(between: Between) -> T:
            batch = DeviceBatch.over(columns, key.width, key.uses, False, key.rows, key.shares)
            return function(batch) if host is None else function(batch, between)

        replay = self._record(call, pass_on if host is None else host.buffers)
        captured = self._graphs[key] = _Captured(columns, replay)
        return captured


def pass_on(tensors: Any) -> Any:
    """A `Between` for functions without a part of the host."""
    return tensors
