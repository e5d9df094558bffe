"""The network of DFlash by itself: what it writes where, and that it can be trained."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.layers.parameters import Part
from slipstream.models.loading import LoadOptions
from slipstream.speculative.dflash.network import DFlashNetwork, read_dflash_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import HeadContext
from tests.drafters.blocks import MASK, write_dflash
from tests.drafters.trainable import Trainable
from tests.kernels.batches import Requests, attention_inputs, num_blocks, only
from tests.pass_inputs import changed

BLOCK_SIZE, LENGTHS, BLOCK = 8, (13, 4, 20), 5


def build(folder: Path) -> tuple[DFlashNetwork, Trainable]:
    source = Trainable(load_file(folder / "model.safetensors"))
    config = read_dflash_config(HeadCheckpoint(folder))
    options = LoadOptions(
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format="auto",
        max_positions=64,
        seed=0,
    )
    network = DFlashNetwork(HeadContext(REFERENCE, source, 48, options), config)
    table = source.table([Part("embed_tokens.weight", 96)], 48)
    embedding = Embedding(source, "embed_tokens", 96, 48)
    network.share(embedding, LanguageModelHead(REFERENCE, table))
    return network, source


def layout() -> tuple[PassInputs, PassInputs, list[tuple[Tensor, Tensor]]]:
    """Inputs for the rows of the contexts, for those of the blocks, and a cache for both."""
    whole = Requests(list(LENGTHS), [BLOCK] * 3)
    blocks = attention_inputs(whole, BLOCK_SIZE)
    positions = [torch.arange(length) for length in LENGTHS]
    slots = [
        blocks.paging.block_tables[index, place // BLOCK_SIZE].long() * BLOCK_SIZE
        + place % BLOCK_SIZE
        for index, place in enumerate(positions)
    ]
    context = changed(blocks, positions=torch.cat(positions), slots=torch.cat(slots))
    shape = (num_blocks(whole, BLOCK_SIZE), BLOCK_SIZE, 2, 12)
    return context, blocks, [(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]


def random_streams() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(sum(LENGTHS), 48, generator=generator) for _ in range(2)]


TOKENS = torch.tensor([[anchor, *[MASK] * (BLOCK - 1)] for anchor in (5, 70, 33)]).flatten()


def test_one_pass_equals_passes_of_parts(tiny_target: str, tmp_path: Path) -> None:
    """A context written in pieces, and blocks one by one, give what they give together."""
    network, _ = build(write_dflash(tmp_path, tiny_target, own_embedding=True))
    streams = random_streams()
    with torch.inference_mode():
        context, blocks, caches = layout()
        network.store(network.context(streams), context, caches)
        together = network(TOKENS, blocks, caches)
        _, _, again = layout()
        for rows in (slice(0, 7), slice(7, 8), slice(8, 30), slice(30, 37)):
            part = changed(
                context, positions=context.rows.positions[rows], slots=context.paging.slots[rows]
            )
            network.store(network.context([stream[rows] for stream in streams]), part, again)
        for request in range(3):
            alone, rows = only(blocks, request)
            out = network(TOKENS[rows], alone, again)
            torch.testing.assert_close(out, together[rows], atol=1e-5, rtol=0)


def test_a_block_leaves_the_context_as_it_is(tiny_target: str, tmp_path: Path) -> None:
    network, _ = build(write_dflash(tmp_path, tiny_target, own_embedding=True))
    with torch.inference_mode():
        context, blocks, caches = layout()
        network.store(network.context(random_streams()), context, caches)
        before = [pages.flatten(0, 1)[context.paging.slots].clone() for pages in caches[1]]
        first = network(TOKENS, blocks, caches)
        for pages, expected in zip(caches[1], before, strict=True):
            assert torch.equal(pages.flatten(0, 1)[context.paging.slots], expected)
        assert torch.equal(network(TOKENS, blocks, caches), first)


def test_every_parameter_gets_a_gradient(tiny_target: str, tmp_path: Path) -> None:
    network, source = build(write_dflash(tmp_path, tiny_target, own_embedding=True))
    context, blocks, caches = layout()
    network.store(network.context(random_streams()), context, caches)
    logits = network.head(network(TOKENS, blocks, caches))
    torch.nn.functional.cross_entropy(logits, TOKENS.flip(0)).backward()
    assert source.parameters.keys() == source.stored.keys()
    for name, parameter in source.parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
