"""The network of MTP modules by itself: rows together and one by one, and as trainers have it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.layers.parameters import Part
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.speculative.heads.loading import HeadContext
from slipstream.speculative.mtp.config import MtpCheckpoint, read_mtp_config
from slipstream.speculative.mtp.network import FIRST_ROW, MtpHead, load_mtp
from tests.drafters.engines import GREEDY, make, run
from tests.drafters.mtp_heads import write_mtp
from tests.drafters.mtp_oracle import Mtp
from tests.drafters.oracles import Target
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.pass_inputs import pass_inputs

STYLES = ["qwen", "deepseek", "mimo", "speculators"]
CPU = torch.device("cpu")
OPTIONS = LoadOptions(torch.float32, CPU, "auto", max_positions=64)
IDS = torch.randint(1, 96, (24,), generator=torch.Generator().manual_seed(4))
BLOCK, BLOCKS = 8, 4


def rows(start: int, end: int, first_seen: int) -> PassInputs:
    """Rows of tokens [start, end) of one request, whose blocks lie in order."""
    positions = torch.arange(start, end)
    return pass_inputs(
        query_start=torch.tensor([0, end - start]),
        context_lens=torch.tensor([end]),
        block_tables=torch.arange(BLOCKS, dtype=torch.int32).unsqueeze(0),
        positions=positions,
        slots=positions,
        first_seen=first_seen,
    )


def cache(head_dim: int = 16, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    pages = torch.zeros(2, BLOCKS, BLOCK, kv_heads, head_dim)
    return pages[0], pages[1]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("module", [0, 1])
def test_one_pass_over_rows_is_as_many_passes_of_one(
    style: str, module: int, tiny_target: str, tmp_path: Path
) -> None:
    """And as the oracle's."""
    checkpoint = MtpCheckpoint(write_mtp(tmp_path, tiny_target, style, modules=2))
    config = read_mtp_config(checkpoint)
    head = load_mtp(checkpoint, config, config.layers, OPTIONS)
    target = load_decoder(Checkpoint(Path(tiny_target)), OPTIONS)
    head.share(target.embedding, target.head)
    first = FIRST_ROW + module
    features = torch.randn(len(IDS) - first, 48, generator=torch.Generator().manual_seed(6))
    whole = head.run(module, IDS[first:], features, rows(first, len(IDS), first), cache())
    pages = cache()
    single = [
        head.run(
            module,
            IDS[token : token + 1],
            features[token - first : token - first + 1],
            rows(token, token + 1, first),
            pages,
        )
        for token in range(first, len(IDS))
    ]
    torch.testing.assert_close(torch.cat(single), whole, atol=1e-5, rtol=0)
    oracle = Mtp(tmp_path, Target(tiny_target), style)
    truth = oracle.module(module, IDS[first:].tolist(), features)
    torch.testing.assert_close(whole, truth, atol=1e-4, rtol=0)


class Learned:
    """A parameter source whose parameters learn, under the names of the checkpoint."""

    def __init__(self, seed: int) -> None:
        self.leaves: list[tuple[Sequence[Part], Tensor]] = []
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        total = sum(part.rows for part in parts)
        values = torch.randn(total, columns, generator=self._generator) / columns**0.5
        return DenseMatrix(self._keep(parts, values))

    table = head = matrix

    def alike(self, parts: Sequence[Part]) -> bool:
        return True

    def tied(self, table: Weight) -> Weight:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._keep(parts, torch.ones(sum(part.rows for part in parts)))

    def named(self) -> dict[str, Tensor]:
        found = {}
        for parts, leaf in self.leaves:
            pieces = leaf.detach().split([part.rows for part in parts])
            found |= {part.name: piece for part, piece in zip(parts, pieces, strict=True)}
        return found

    def _keep(self, parts: Sequence[Part], values: Tensor) -> Tensor:
        self.leaves.append((parts, values.requires_grad_()))
        return values


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("style", STYLES)
def test_the_network_learns_and_is_published_under_its_names(
    style: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients reach every parameter, the loss falls, and the engine drafts with what was
    exported."""
    folder = write_mtp(tmp_path, tiny_target, style)
    names = set(load_file(folder / "model.safetensors"))
    config = read_mtp_config(MtpCheckpoint(folder))
    learned = Learned(seed=2)
    context = HeadContext(REFERENCE, learned, config.layers.hidden_size, OPTIONS)
    head = MtpHead(context, replace(config, style=config.style.plain))
    target = load_decoder(Checkpoint(Path(tiny_target)), OPTIONS)
    head.share(target.embedding, target.head)
    hidden = Target(tiny_target)(IDS.tolist())[1]
    optimizer = torch.optim.Adam([leaf for _, leaf in learned.leaves], lr=3e-3)
    losses = []
    for _ in range(60):
        inputs = rows(FIRST_ROW, len(IDS), FIRST_ROW)
        entering, _ = head(IDS[1:], head.project(hidden[:-1], ()), inputs, [cache()])
        loss = torch.nn.functional.cross_entropy(
            head.head(entering), (hidden[1:] @ target.head.weight.floats.T).argmax(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        assert all(leaf.grad is not None and leaf.grad.any() for _, leaf in learned.leaves)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]

    published = dict(config.style.published(*item) for item in learned.named().items())
    assert set(published) == names
    stored = {name: value.contiguous() for name, value in published.items()}
    save_file(stored, folder / "model.safetensors")
    oracle = Mtp(folder, Target(tiny_target), style)
    with torch.no_grad():
        inputs = rows(FIRST_ROW, len(IDS), FIRST_ROW)
        ours, _ = head(IDS[1:], hidden[:-1], inputs, [cache()])
    truth = oracle.module(0, IDS[1:].tolist(), hidden[:-1])
    torch.testing.assert_close(ours, truth, atol=1e-4, rtol=0)
    drafted = record_drafts(monkeypatch)
    run(make(tiny_target, folder), GREEDY)
    assert len(drafted) > 5
    assert_drafts_are(drafted, oracle)
