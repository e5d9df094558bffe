"""Shared by all tests."""

import os
from collections.abc import Iterator

# Set before torch starts its pool: tiny tensors gain nothing from threads, and a pool that shares
# its cores with other processes can be fifty times slower than none.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from slipstream.kernels import table
from slipstream.kernels.table import ops_for
from tests.checkpoints import write_qwen3
from tests.drafters.assistants import write_assistant
from tests.drafters.blocks import write_dflash
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp

# Triton reads this when it is first imported, which some test modules do through transformers:
# without a GPU its kernels are tested under its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
try:  # GPU machines run the tests that need nothing but what the engine needs
    from hypothesis import settings
except ImportError:
    pass
else:
    settings.register_profile("ci", derandomize=True, deadline=None)
    settings.load_profile("ci")


def pytest_report_header() -> str:
    """Which kernels are tested."""
    return f"kernels: {ops_for(torch.device('cpu')).column}"


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Networks are served by the reference column, whose weights can be looked at."""
    monkeypatch.setattr(table, "runs_cpp", lambda device: False)
    ops_for.cache_clear()
    yield
    ops_for.cache_clear()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Qwen3 of 96 tokens."""
    return str(write_qwen3(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first layer of `tiny_target`: agrees with it most of the time."""
    return str(write_qwen3(tmp_path_factory.mktemp("draft"), keep_layers=1))


@pytest.fixture(scope="session")
def tiny_heads(tiny_target: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Drafting heads for `tiny_target`, by their method."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        "assistant": str(write_assistant(folder / "assistant", tiny_target)),
        "dflash": str(write_dflash(folder / "dflash", tiny_target, block=16, draft_vocab=80)),
        "eagle": str(write_eagle1(folder / "eagle", tiny_target)),
        "eagle3": str(write_eagle3(folder / "eagle3", tiny_target, draft_vocab=80)),
        "p-eagle": str(write_p_eagle(folder / "p-eagle", tiny_target, draft_vocab=80)),
        "mtp": str(write_mtp(folder / "mtp", tiny_target)),
        "mtp_modules": str(write_mtp(folder / "modules", tiny_target, "deepseek", modules=2)),
    }
