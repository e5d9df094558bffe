"""CUDA graphs of device work on a batch: captured once per size, replayed ever after."""

import gc
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.core.step_form import CapturedForm
from slipstream.kernels.devices import upload
from slipstream.kernels.registry import kernels_for
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.device_state import DeviceState
from slipstream.sampling.state import SamplingState, Uses

logger = logging.getLogger("slipstream")

T = TypeVar("T")
# What the host makes of a value in the middle of a captured function.
Between = Callable[[Any], Any]
# Called with a DeviceBatch and, if the host has a part in the middle of it, what does that part.
BatchFunction = Callable[..., T]

LEAN = (frozenset[Uses](), frozenset({Uses.SAMPLING}))
# What a graph has only where a request of its batch asks for it.
OF_DRAFTS = frozenset({Uses.BLOCK, Uses.COUPLED})
APART = OF_DRAFTS | {Uses.GRAMMAR, Uses.ADAPTER}
# Words that must not be completed are looked for on the host.
FULL = frozenset(Uses) - {Uses.BAD_WORDS} - APART
# Steps that could have had fewer rows, before a graph for them is captured: until then they have
# lost about as much time as that takes.
WANTED_BEFORE_CAPTURE = 32
# Held while a graph is captured: what other threads ask of the GPU meanwhile would break it.
CAPTURING = Lock()


def captures_graphs(device: torch.device, enforce_eager: bool) -> bool:
    """Whether steps are captured on this device."""
    if device.type != "cuda" or enforce_eager:
        return False
    return kernels_for(device).network.backend != "reference"


class HostPart(Protocol):
    """The host's part in the middle of a captured function."""

    def buffers(self, given: Any) -> Any:
        """The tensors that the rest of the function reads, which stay where they are."""

    def fill(self, given: Any) -> Any:
        """Fill the buffers in with what the host makes of the tensors that it is given."""


@dataclass(frozen=True)
class _Key:
    """`rows` of the target's pass; None: width + 1 for each request of the bucket."""

    name: str
    bucket: int
    width: int
    uses: frozenset[Uses]
    guessed: bool
    rows: int | None = None


@dataclass(eq=False)
class _Captured(Generic[T]):
    """The numbers that a captured call reads, and how to run it on them."""

    columns: Tensor
    replay: Callable[[Between], T]
    last_columns: list[list[int]] | None = None


class Recorder:
    """Captures calls in CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, function: Callable[[Between], T], buffers: Between
    ) -> Callable[[Between], T]:
        """A function that repeats the call's device work and returns the same tensors again.

        Args:
            function: is captured as one graph, or as two with what it is called with in between.
            buffers: what that gives while it is captured.
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
        values: list[Any] = []  # what the host is given behind each graph but the last
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

        return replay


class GraphRunner:
    """Runs functions of a batch by replaying graphs of them.

    A batch is padded to the next bucket with requests that have no tokens, compute nothing and
    gain nothing; so capturing disturbs nobody and can be done at any time. All graphs share one
    memory pool: what a replay returns is good until the next one.

    Args:
        form: the sizes that graphs are for: a batch takes the smallest that holds it.
        recorder: captures a call.
        of_drafts: what all sampled requests use where they draft.
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
        """`function` of the packed batch; the first rows of what it returns are its requests'.

        Args:
            host: its part in the middle of the function.
            packs: it has a pass of the target, over one known token of each request and its draft.
        """
        key = self._key(name, packed, packs)
        captured: _Captured[T] | None = self._graphs.get(key)
        if captured is None:
            captured = self._capture(key, function, host)
        columns = self._padded(packed.columns(key.width), key.bucket)
        if columns != captured.last_columns:
            captured.last_columns = None  # an interrupt may come before they are there
            captured.columns.copy_(upload(columns, self._state.device))
            captured.last_columns = columns
        return captured.replay(_nothing if host is None else host.fill)

    def capture_all(
        self,
        name: str,
        function: BatchFunction[Any],
        guessed: bool,
        progress: Callable[[int], None],
    ) -> None:
        """Capture what plain requests need, the largest first, so that the rest fits into its
        memory."""
        for key in self._lean_keys(name, guessed):
            self._capture(key, function)
            progress(1)

    def num_lean(self) -> int:
        """How many graphs `capture_all` makes."""
        return len(self._lean_keys("", False))

    def _lean_keys(self, name: str, guessed: bool) -> list[_Key]:
        return [
            _Key(name, bucket, width, self._lean(uses, width) | variant, guessed and width > 0)
            for width in reversed(self._form.widths)
            for bucket in reversed(self._form.buckets)
            for uses in reversed(LEAN)
            for variant in self._variants
        ]

    def _lean(self, uses: frozenset[Uses], width: int) -> frozenset[Uses]:
        return uses | self._of_drafts if uses and width else uses

    def _key(self, name: str, packed: PackedBatch, packs: bool) -> _Key:
        bucket, width = self._form.bucket(len(packed.slots)), self._form.width(packed.width)
        uses, apart = packed.uses - APART, packed.uses & APART
        if not width:
            apart -= OF_DRAFTS
        if uses not in LEAN:
            uses = FULL
            self._sampling.allocate_all()
        uses |= apart
        if self._generation != self._sampling.generation:
            lean = {
                key: it for key, it in self._graphs.items() if key.uses - {Uses.ADAPTER} in LEAN
            }
            self._graphs = lean
            self._generation = self._sampling.generation
        key = _Key(name, bucket, width, uses, packed.guesses is not None and width > 0)
        num_rows = len(packed.slots) + packed.num_verified
        return self._with_fewer_rows(key, num_rows) if packs else key

    def _with_fewer_rows(self, key: _Key, num_rows: int) -> _Key:
        """With the smallest total that holds so many, of those captured or wanted often enough."""
        totals = self._form.totals(key.bucket, key.width)
        fitting = [replace(key, rows=rows) for rows in totals[:-1] if rows >= num_rows]
        if fitting and fitting[0] not in self._graphs:
            self._wanted[fitting[0]] += 1
            if self._wanted[fitting[0]] >= WANTED_BEFORE_CAPTURE:
                return fitting[0]
        return next((packed for packed in fitting if packed in self._graphs), key)

    def _padded(self, columns: list[list[int]], bucket: int) -> list[list[int]]:
        """Columns for requests without tokens behind those of the packed."""
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
        columns = upload(self._padded(nobody.columns(key.width), key.bucket), self._state.device)

        def call(between: Between) -> T:
            batch = DeviceBatch.over(columns, key.width, key.uses, False, key.rows)
            return function(batch) if host is None else function(batch, between)

        replay = self._record(call, _nothing if host is None else host.buffers)
        captured = self._graphs[key] = _Captured(columns, replay)
        return captured


def _nothing(given: Any) -> Any:
    return given
