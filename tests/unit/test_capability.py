"""Which device is taken, and what it must be able to do."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import UsageError
from slipstream.core.config_values import QUANTIZATIONS
from slipstream.kernels.attention import FLOAT8_PAGES
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix, ToFloat8Blocks
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.runner.capability import (
    choose_device,
    default_batched_tokens,
    default_dtype,
    kept_formats,
    quantization_note,
    require_quantization,
    resolve_cache_dtype,
    training_dtype,
)

CUDA = torch.device("cuda")


def pretend(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, cuda: str | None = "13.0"
) -> None:
    """A machine with a GPU of this capability, or with none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    device, why = choose_device("auto")
    assert device == choose_device("cuda")[0] == CUDA
    assert why == "Tesla T4, compute capability 9.0"
    assert choose_device("cpu")[0] == torch.device("cpu")


def test_training_is_in_bfloat16_on_a_gpu_alone() -> None:
    assert training_dtype(CUDA) == torch.bfloat16
    assert training_dtype(torch.device("cpu")) == torch.float32


def test_float16_stays_where_kernels_serve_it() -> None:
    assert default_dtype(CUDA, torch.float16) == (torch.float16, "")
    assert default_dtype(torch.device("cpu"), torch.float32) == (torch.float32, "")
    assert default_dtype(torch.device("cpu"), torch.float16)[0] == torch.bfloat16


def test_a_cpu_is_taken_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert choose_device("auto") == (torch.device("cpu"), "torch sees no GPU")
    with pytest.raises(UsageError, match=r"^device=cuda, but torch sees no GPU; use device=cpu$"):
        choose_device("cuda")
    pretend(monkeypatch, None, cuda=None)
    with pytest.raises(UsageError, match=r"sees no GPU: this torch .* no CUDA; use device=cpu$"):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, (7, 5))
    with pytest.raises(UsageError, match=r"capability 7\.5, .* need 8\.0 .*; use device=cpu"):
        choose_device(name)
    pretend(monkeypatch, (8, 0))
    assert choose_device(name)[0] == CUDA


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 6))
    with pytest.raises(UsageError, match=r"^quantization=fp8 needs .* 8\.9 .* has 8\.6; leave it"):
        require_quantization(CUDA, "quantization", "fp8")
    require_quantization(torch.device("cpu"), "quantization", "fp8")
    pretend(monkeypatch, (8, 9))
    require_quantization(CUDA, "quantization", "fp8")


def test_packed_matrices_need_no_conversions_of_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="it is there for Linux only")
    from slipstream.kernels.triton import grouped

    pretend(monkeypatch, (8, 0))
    for name in ("mxfp4", "nvfp4"):
        require_quantization(CUDA, "q", name)
    for rounding in (ToNvfp4(), ToFloat8Blocks()):
        made = rounding.round(torch.ones(72, 128))
        grouped.require_conversions(made)
        values: Any = SimpleNamespace(is_cuda=True, device=CUDA, shape=(72, 64))
        on_gpu = replace(made, values=values)
        monkeypatch.setattr(type(made), "shape", (72, 128))
        pretend(monkeypatch, (8, 6))
        with pytest.raises(UsageError, match=r"^matrices .* need .* 64 .* 8\.6, .*72, 128"):
            grouped.require_conversions(on_gpu)
        pretend(monkeypatch, (8, 9))
        grouped.require_conversions(on_gpu)
    for device in (CUDA, torch.device("cpu")):
        assert "the head stays as it is" in quantization_note(device, "nvfp4")


def test_what_devices_multiply_as_it_is_stored() -> None:
    on_gpu, on_cpu = kept_formats(CUDA), kept_formats(torch.device("cpu"))
    assert {Mxfp4Matrix, Nvfp4Matrix, Int4Matrix, Int8Matrix} == on_gpu & on_cpu
    assert Float8BlockMatrix in on_gpu


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic", "int4", "int4-g128-asym"])
def test_integers_are_for_all_but_rounded_activations(
    monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    pretend(monkeypatch, (8, 0))
    if quantization == "int8-dynamic":
        with pytest.raises(
            UsageError, match=r"^q=int8-dynamic is for CPUs: .*; use q=int8 or fp8, or device=cpu$"
        ):
            require_quantization(CUDA, "q", quantization)
    else:
        require_quantization(CUDA, "q", quantization)
    require_quantization(torch.device("cpu"), "q", quantization)
    note = quantization_note(torch.device("cpu"), quantization)
    assert f"integers of {quantization[3]} bits" in note


def test_every_quantization_has_a_note() -> None:
    for quantization in QUANTIZATIONS:
        note = quantization_note(torch.device("cpu"), quantization)
        assert len(note.partition("load time")[2]) > 25
        assert ("slow" in note) == (quantization == "fp8")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_cards_lack_only_what_is_hoppers(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    pytest.importorskip("triton", reason="it is there for Linux only")
    from slipstream.kernels.triton import launch, matmul

    pretend(monkeypatch, capability)
    assert choose_device("cuda")[0] == CUDA
    for quantization in ("int8", "int4", "mxfp4"):
        require_quantization(CUDA, "q", quantization)
    assert matmul.is_hopper.__wrapped__(CUDA) == (capability[0] == 9)
    assert launch.overlaps.__wrapped__(CUDA) == (capability[0] >= 9)


@pytest.mark.parametrize(
    ("kibibytes", "stages", "others", "expected"),
    [(228, 4, 0, 4), (100, 4, 0, 4), (100, 6, 0, 4), (100, 4, 40, 2), (100, 4, 90, 1)],
)
def test_loops_have_the_stages_that_fit_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch, kibibytes: int, stages: int, others: int, expected: int
) -> None:
    pytest.importorskip("triton", reason="it is there for Linux only")
    from slipstream.kernels.triton import launch

    found = SimpleNamespace(shared_memory_per_multiprocessor=kibibytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(launch, "shared_memory", launch.shared_memory.__wrapped__)
    assert launch.fitting_stages(CUDA, stages, 32 * 1024, others * 1024) == expected


def test_caches_of_e4m3_need_what_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = "fp8", torch.bfloat16, CUDA, "kv_cache_dtype"
    pretend(monkeypatch, (8, 0))
    with pytest.raises(
        UsageError, match=r"^kv_cache_dtype=fp8 needs .* 8\.9 .* has 8\.0; leave it"
    ):
        resolve_cache_dtype(*fp8)
    pretend(monkeypatch, (8, 9))
    assert resolve_cache_dtype(*fp8) == FLOAT8_PAGES


def test_a_gpu_takes_longer_steps() -> None:
    assert default_batched_tokens(CUDA)[0] > default_batched_tokens(torch.device("cpu"))[0]
