"""Processes that hold one model after another: starting them takes longer than most tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.core.config import EngineConfig
from slipstream.engine import build
from slipstream.engine.ranks import processes
from slipstream.engine.ranks.leader import Leader, start_ranks
from slipstream.engine.ranks.processes import Followers
from slipstream.engine.ranks.ranks import Ranks

CHECK_EVERY = 5  # steps
Opener = Callable[..., LLM]


class Pool:
    """Followers by the number of ranks and the module that they run, restarted if a test has lost
    them."""

    def __init__(self) -> None:
        self._followers: dict[tuple[int, str], Followers] = {}
        self._live: Leader | None = None

    def lead(self, config: EngineConfig, device: torch.device) -> Ranks:
        """Takes the place of `start_ranks`: one engine at a time."""
        self.leave()
        size = config.num_ranks
        key = size, processes.FOLLOWER
        found = self._followers.get(key)
        if found is None or found.loss or not all(it.alive for it in found.processes):
            if found is not None:
                found.close()
            found = self._followers[key] = Followers(size, device)
        self._live = Leader(config, found, lambda: None)
        return self._live

    def followers(self, size: int) -> Followers:
        """Those that an engine of so many ranks has."""
        return self._followers[size, processes.FOLLOWER]

    def leave(self) -> None:
        """Let the followers go from the engine that they have."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def close(self) -> None:
        """End them."""
        for followers in self._followers.values():
            followers.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranked(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens an engine of two ranks that compare what they hold, in place of the last one."""

    def start(config: EngineConfig, device: torch.device) -> Ranks:
        return (start_ranks if config.num_ranks == 1 else pool.lead)(config, device)

    monkeypatch.setattr(build, "start_ranks", start)

    def open_llm(model: str, drafter: dict[str, Any] | None = None, **options: Any) -> LLM:
        usual: dict[str, Any] = {
            "tensor_parallel_size": 2,
            "rank_check_interval": CHECK_EVERY,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_num_seqs": 6,
            "block_size": 8,
            "max_model_len": 128,
            "num_kv_blocks": 400,
        }
        return LLM(model, speculative_config=drafter, **{**usual, **options})

    yield open_llm
    pool.leave()
