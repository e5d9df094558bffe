"""Passes over short prompts, captured for a size and replayed with padding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from slipstream import LLM, SamplingParams
from slipstream.cache.spec import CacheSizes, ModelCache
from slipstream.kernels.pass_inputs import PassInputs, SharedBlocks
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.runner import captured_passes
from slipstream.runner.captured_passes import CapturedPasses, PassSize
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import PassRows
from tests.checkpoints import write_qwen3
from tests.hybrid_checkpoints import write_hybrid
from tests.lossless.test_greedy import make_prompts
from tests.padded_steps import DirectRecorder, use_steps
from tests.pass_inputs import pass_inputs

CPU = torch.device("cpu")
BLOCK, LENGTH, SLOTS = 4, 128, 3


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """A "plain" network, one that is "adapted", and one with "states"."""

    @cache
    def load(kind: str) -> Decoder:
        path = tmp_path_factory.mktemp(kind)
        if kind == "states":
            write_hybrid(path, "qwen3_5_text")
        else:
            write_qwen3(path)
        adapters = (2, 4) if kind == "adapted" else None
        options = LoadOptions(torch.float32, CPU, "auto", LENGTH, adapters=adapters)
        network = load_decoder(Checkpoint(path), options)
        if network.adapters is not None:
            for factors in network.adapters._all:
                factors.down.normal_()
                factors.up.normal_()
        return network

    return load


@pytest.fixture
def network(networks: Callable[[str], Decoder]) -> Decoder:
    return networks("plain")


class Prompts:
    """Random prompts of three requests, which a runner computes in chunks. Two have adapters."""

    def __init__(self, network: Decoder, record: DirectRecorder | None) -> None:
        blocks = SLOTS * LENGTH // BLOCK
        layout = network.config.cache_layout(torch.float32)
        sizes = CacheSizes(blocks, BLOCK, SLOTS + 1, CPU, num_drafts=2, num_checkpoints=SLOTS)
        self.cache = ModelCache(layout, sizes)
        for pages in cached(self.cache):
            pages.zero_()
        state = DeviceState(SLOTS, LENGTH - 1, BLOCK, CPU)
        generator = torch.Generator().manual_seed(1)
        shape = (SLOTS, LENGTH)
        state.token_ids[:SLOTS] = torch.randint(1, 96, shape, generator=generator).int()
        state.block_tables[:SLOTS] = torch.randperm(blocks, generator=generator).view(SLOTS, -1)
        state.adapters[:SLOTS] = torch.tensor((1, -1, 0))
        self.runner = ModelRunner(network, self.cache, state, None, (1,), True, record)  # type: ignore[arg-type]

    def run(self, starts: Sequence[int], lengths: Sequence[int]) -> Forward:
        slots, adapted = torch.arange(len(starts)), self.runner._network.adapters is not None
        placed = slots, torch.tensor(starts), torch.tensor(lengths)
        return self.runner.forward(PassRows(*placed, saved=slots, adapted=adapted))


def cached(model: ModelCache) -> Iterator[Tensor]:
    """All tensors of a cache."""
    for layer in model.layers:
        yield from (
            [getattr(layer, it.name) for it in fields(layer)] if is_dataclass(layer) else layer
        )


CHUNKS = [
    ((0, 0, 0), (40, 3, 50)),
    ((40, 3, 50), (1, 60, 30)),
    ((41, 63, 80), (1, 1, 25)),
    ((42, 64), (30, 1)),
    ((72,), (20,)),
]


@pytest.mark.parametrize("kind", ["plain", "adapted", "states"])
def test_replayed_passes_compute_what_others_do(
    kind: str, networks: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = networks(kind)
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
    for page, other in zip(cached(replayed.cache), cached(exact.cache), strict=True):
        # Padding writes nothing, but the rows of its own slot.
        page, other = (it if len(it) != SLOTS + 1 else it[:SLOTS] for it in (page, other))
        assert (page == 0).equal(other == 0)
        assert_close(page, other, atol=1e-5, rtol=0)


def test_a_size_is_captured_when_it_is_wanted_again(network: Decoder) -> None:
    prompts = Prompts(network, DirectRecorder(CPU))
    passes = prompts.runner._captured
    assert isinstance(passes, CapturedPasses)
    for chunk, count in ((33, 0), (40, 1), (10, 1), (64, 1)):
        prompts.run((0,), (chunk,))
        assert len(passes._graphs) == count


def test_there_are_not_more_graphs_than_allowed(
    network: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_passes, "WANTED_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(captured_passes, "MOST_GRAPHS", 2)
    exact, prompts = Prompts(network, None), Prompts(network, DirectRecorder(CPU))
    for length in (33, 10, 70, 10):
        ours, theirs = prompts.run((0,), (length,)), exact.run((0,), (length,))
        assert_close(ours.hidden, theirs.hidden, atol=1e-5, rtol=0)
    passes = prompts.runner._captured
    assert passes is not None
    assert sorted(size.rows for size, _ in passes._graphs) == [32, 64]


def test_sizes() -> None:
    assert PassSize.of(33, 1) == PassSize(64, 2)
    assert PassSize.of(512, 7) == PassSize(512, 9)
    assert PassSize.of(1, 8) == PassSize(32, 9)  # one of the requests is padding
    assert PassSize.of(9, 9) == PassSize(32, 17)
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


@pytest.mark.parametrize("drafter", ["eagle3", "p-eagle", "mtp_modules", "dflash"])
def test_heads_read_prompts_in_replayed_passes(
    drafter: str, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of several prompts leave the head's keys, values and features that they should."""
    drafters: list[Any] = []
    for steps in ("exact", "padded"):
        use_steps(steps, monkeypatch)
        llm = LLM(
            tiny_target,
            speculative_config={"model": tiny_heads[drafter], "num_speculative_tokens": 3},
            skip_tokenizer_init=True,
            max_num_batched_tokens=40,
            max_num_seqs=8,
            async_scheduling=False,  # each step is given the same blocks then
            num_kv_blocks=64,
            enforce_eager=steps == "exact",  # a GPU would capture
        )
        drafters.append(llm.engine._step._drafter)
        for page in cached(drafters[-1]._cache):
            page.zero_()
        llm.generate(make_prompts(4), SamplingParams(temperature=0, max_tokens=1))
    exact, replayed = drafters
    assert exact._captured is None
    assert replayed._captured._graphs
    kept = [[*cached(it._cache), getattr(it, "_given", torch.zeros(2))] for it in drafters]
    for page, other in zip(*kept, strict=True):
        page, other = page[:-1], other[:-1]  # rows without a slot write to the last entry
        assert (page == 0).equal(other == 0)
        assert_close(page, other, atol=1e-5, rtol=0)
    assert any(page.any() for page in kept[0])


def test_blocks_that_requests_share_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_passes, "WANTED_BEFORE_CAPTURE", 1)
    seen: list[SharedBlocks | None] = []

    def call(inputs: PassInputs, values: Tensor) -> Sequence[Tensor]:
        seen.append(inputs.paging.shared)
        return [values]

    passes = CapturedPasses(call, SLOTS + 1, DirectRecorder(CPU))  # type: ignore[arg-type]
    inputs = pass_inputs(
        query_start=torch.tensor([0, 1, 2]),
        context_lens=torch.tensor([70, 80]),
        block_tables=torch.zeros((2, 30), dtype=torch.int32),
        positions=torch.tensor([69, 79]),
        slots=torch.tensor([-1, -1]),
    )
    shared = SharedBlocks(torch.tensor([64, 64]), torch.tensor([1, 2]))
    with_shared = replace(inputs, paging=replace(inputs.paging, shared=shared))
    for given, padded in ((with_shared, [[64, 64, 0], [1, 2, 0]]), (inputs, None)):
        assert passes.run(given, torch.ones(2, 3)) is not None
        last = seen[-1]
        found = None if last is None else [last.tokens.tolist(), last.members.tolist()]
        assert found == padded
