"""Passes over short prompts, captured for a size and replayed with padding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.runner import captured_passes
from slipstream.runner.captured_passes import CapturedPasses, PassSize
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows
from tests.checkpoints import write_qwen3
from tests.padded_steps import DirectRecorder

CPU = torch.device("cpu")
BLOCK, LENGTH, SLOTS = 4, 128, 3


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = write_qwen3(tmp_path_factory.mktemp("passes"))
    return load_decoder(Checkpoint(path), LoadOptions(torch.float32, CPU, "auto", LENGTH))


class Prompts:
    """Random prompts of three requests, which a runner computes in chunks."""

    def __init__(self, network: Decoder, record: DirectRecorder | None) -> None:
        blocks = SLOTS * LENGTH // BLOCK
        layout = network.config.cache_layout(torch.float32)
        self.cache = ModelCache(layout, CacheSizes(blocks, BLOCK, SLOTS + 1, CPU))
        for pages in (pages for layer in self.cache.layers for pages in layer):
            pages.zero_()
        state = DeviceState(SLOTS, LENGTH - 1, BLOCK, CPU)
        generator = torch.Generator().manual_seed(1)
        shape = (SLOTS, LENGTH)
        state.token_ids[:SLOTS] = torch.randint(1, 96, shape, generator=generator).int()
        state.block_tables[:SLOTS] = torch.randperm(blocks, generator=generator).view(SLOTS, -1)
        self.runner = ModelRunner(network, self.cache, state, None, (1,), record=record)  # type: ignore[arg-type]

    def run(self, starts: Sequence[int], lengths: Sequence[int]) -> Forward:
        slots = torch.arange(len(starts))
        return self.runner.forward(PassRows(slots, torch.tensor(starts), torch.tensor(lengths)))


CHUNKS = [
    ((0, 0, 0), (40, 3, 50)),
    ((40, 3, 50), (1, 60, 30)),
    ((41, 63, 80), (1, 1, 25)),
    ((42, 64), (30, 1)),
    ((72,), (20,)),
]


def test_replayed_passes_compute_what_others_do(
    network: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_passes, "WANTED_BEFORE_CAPTURE", 1)
    replays: list[bool] = []

    class Counted(DirectRecorder):
        def __call__(self, function, buffers):  # type: ignore[no-untyped-def]
            replay = super().__call__(function, buffers)

            def counted(between: Any) -> Any:
                replays.append(True)
                return replay(between)

            return counted

    exact, replayed = Prompts(network, None), Prompts(network, Counted(CPU))
    for starts, lengths in CHUNKS:
        ours, theirs = replayed.run(starts, lengths), exact.run(starts, lengths)
        # Matmuls of other numbers of rows may sum in another order.
        assert_close(ours.hidden, theirs.hidden, atol=1e-5, rtol=0)
        assert_close(ours.streams[0], theirs.streams[0], atol=1e-5, rtol=0)
    assert len(replays) == len(CHUNKS)
    for ours_pages, theirs_pages in zip(replayed.cache.layers, exact.cache.layers, strict=True):
        for page, other in zip(ours_pages, theirs_pages, strict=True):
            assert (page == 0).equal(other == 0)  # padding writes nothing
            assert_close(page, other, atol=1e-5, rtol=0)


def test_a_size_is_captured_when_it_is_wanted_again(network: Decoder) -> None:
    prompts = Prompts(network, DirectRecorder(CPU))
    passes = prompts.runner._captured
    assert isinstance(passes, CapturedPasses)
    for chunk, count in ((33, 0), (40, 1), (10, 1), (64, 1)):
        prompts.run((0,), (chunk,))
        assert len(passes._graphs) == count


def test_sizes() -> None:
    assert PassSize.of(33, 1) == PassSize(64, 2)
    assert PassSize.of(512, 7) == PassSize(512, 8)
    assert PassSize.of(1, 8) == PassSize(32, 32)  # one of the requests is padding
    assert PassSize.of(1025, 1) is PassSize.of(0, 1) is None


def test_sizes_without_memory_are_launched(
    network: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_passes, "WANTED_BEFORE_CAPTURE", 1)
    tries: list[None] = []

    class Full(DirectRecorder):
        def __call__(self, function, buffers):  # type: ignore[no-untyped-def]
            tries.append(None)
            raise torch.OutOfMemoryError

    exact, full = Prompts(network, None), Prompts(network, Full(CPU))
    for _ in range(2):
        assert full.run((0,), (40,)).hidden.equal(exact.run((0,), (40,)).hidden)
    assert len(tries) == 1
