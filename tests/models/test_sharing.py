"""Models that ranks share: which they cannot, and experts whose groups they cannot halve."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.columns import Columns
from slipstream.layers.parameters import Share
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.loading import LoadOptions, load_decoder
from slipstream.models.sharing import require_equal_shares
from tests.float4_checkpoints import packed_mxfp4
from tests.kernels.test_columns import Exchange
from tests.models.expert_cases import mixture
from tests.models.parity_cases import Case, shape
from tests.models.test_parity import (
    CPU,
    MAX_POSITIONS,
    load,
    make_prompts,
    runner_logits,
    write_checkpoint,
)
from tests.models.test_quantized_experts import GPT_OSS, fused_mxfp4, quantised
from tests.quantized_checkpoints import Format, awq, float8, gptq, packed_tensors, write_whole

# Three groups of 32 columns in each expert.
QWEN3 = Case("Qwen3Moe", "groups", {**shape(4, 2, 64, 32), **mixture(4, 2, 96)})
DENSE = Case("Qwen3", "groups", {**shape(4, 2, 64, 32), "intermediate_size": 96})
FORMATS: dict[str, Format] = {
    "mxfp4": packed_mxfp4(),
    "int4": packed_tensors(group=32),
    "gptq": gptq(group=32),
    "awq": awq(group=32),
}


def shared_logits(folder: Path, num_ranks: int) -> Tensor:
    """Logits of ranks that each have a share; all ranks have the whole odd vocabulary."""
    prompts = [prompt[:20] for prompt in make_prompts()]

    def logits(columns: Columns) -> Tensor:
        share = Share(columns.rank, num_ranks, columns.combined, columns.gather)
        options = LoadOptions(torch.float32, CPU, "auto", MAX_POSITIONS, share=share)
        network = load_decoder(Checkpoint(folder), options)
        return torch.cat(runner_logits(network, prompts, (7, 1, 12), share=share))

    with torch.inference_mode():
        first, *others = Exchange(num_ranks).run(logits)
    assert all(torch.equal(first, other) for other in others)
    return first


def assert_shared(folder: Path, meant: dict[str, Tensor], whole: Path) -> None:
    prompts = [prompt[:20] for prompt in make_prompts()]
    expected = torch.cat(runner_logits(load(write_whole(whole, folder, meant)), prompts, (7, 12)))
    torch.testing.assert_close(shared_logits(folder, 2), expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("plain_torch")
def test_groups_of_experts_are_filled_up(tmp_path: Path) -> None:
    """gpt-oss, whose experts are one tensor of 3 groups: two ranks have 2 groups of each."""
    folder = write_checkpoint(GPT_OSS, tmp_path / "m")
    assert_shared(folder, fused_mxfp4(folder), tmp_path / "whole")


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_dense_layers_are_filled_up(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(DENSE, tmp_path / "m")
    meant = quantised(folder, FORMATS[name], lambda it: "mlp" in it, {})
    assert_shared(folder, meant, tmp_path / "whole")


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_one_by_one(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(QWEN3, tmp_path / "m")
    meant = quantised(folder, FORMATS[name], lambda it: ".experts." in it, {})
    assert_shared(folder, meant, tmp_path / "whole")


def problem(folder: Path, num_ranks: int) -> str:
    checkpoint = Checkpoint(folder)
    with pytest.raises(UsageError) as caught:
        require_equal_shares(checkpoint, read_decoder_config(checkpoint), num_ranks, random=False)
    return str(caught.value)


def in_format(style: Format) -> Callable[[Path], object]:
    return lambda folder: quantised(folder, style, lambda it: "o_proj" in it or "mlp" in it, {})


@pytest.mark.parametrize(
    ("case", "change", "num_ranks", "words"),
    [
        (
            DENSE,
            None,
            3,
            r"heads \(4\) cannot be split over 3 ranks; .* all of the model \(1, 2, 4",
        ),
        (DENSE, in_format(float8(128)), 2, r"128 columns of .*o_proj.weight .* \(1\)"),
        (QWEN3, in_format(packed_mxfp4()), 4, r"gate_proj.weight \(96\) .* 4 ranks; .* \(1, 2\)"),
    ],
    ids=["heads", "blocks", "too few groups"],
)
def test_a_refusal_names_the_numbers_that_would_do(
    case: Case,
    change: Callable[[Path], object] | None,
    num_ranks: int,
    words: str,
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(case, tmp_path / "m")
    if change is not None:
        change(folder)
    assert re.search(words, problem(folder, num_ranks)), problem(folder, num_ranks)


def test_gpt_oss_over_four() -> None:
    """90 groups: 23, 23, 23 and 21."""
    spans = [Share(rank, 4).span(2880, "columns", unit=32) for rank in range(4)]
    assert spans == [(0, 736), (736, 1472), (1472, 2208), (2208, 2944)]
    with pytest.raises(UsageError, match="cannot be split over 64 ranks"):
        Share(0, 64).span(2880, "columns", unit=32)
