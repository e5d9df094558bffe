"""The reader of safetensors files, with the safetensors package as the oracle."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.core.errors import CheckpointError
from slipstream.models import safetensors_file
from slipstream.models.safetensors_file import TensorEntry, read_entries, read_into

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STORABLE = (
    *FLOATS,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "rows": torch.randn(5, 3),
        "half": torch.randn(2, 4).half(),
        "brain": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "ids": torch.tensor([5, -3, 9]),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def described(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(entry: TensorEntry, dtype: torch.dtype | None = None, raw: bool = False) -> torch.Tensor:
    destination = torch.empty(entry.shape, dtype=dtype or entry.dtype)
    read_into(entry, destination, raw=raw)
    return destination


def test_every_tensor_is_what_the_package_reads(file: Path) -> None:
    entries = read_entries(file)
    with safe_open(file, "pt") as oracle:
        assert set(entries) == set(oracle.keys())
        for name, entry in entries.items():
            expected = oracle.get_tensor(name)
            assert (entry.name, entry.dtype, entry.shape) == (
                name,
                expected.dtype,
                tuple(expected.shape),
            )
            assert entry.nbytes == expected.nbytes
            assert torch.equal(read(entry, raw=True), expected)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_every_dtype_can_be_read_raw(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = torch.tensor([0, 1, 2, 3]).to(dtype)
    save_file({"x": expected}, tmp_path / "x.safetensors")
    entry = read_entries(tmp_path / "x.safetensors")["x"]
    assert entry.dtype == dtype
    bits = read(entry, raw=True).view(torch.uint8)
    assert torch.equal(bits, expected.view(torch.uint8))


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("wanted", FLOATS, ids=str)
def test_weights_are_converted(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "_SLICE_BYTES", 16)  # many slices, a short last one
    expected = torch.randn(9, 5).to(stored)
    save_file({"before": torch.ones(3), "x": expected}, tmp_path / "x.safetensors")
    entry = read_entries(tmp_path / "x.safetensors")["x"]
    assert torch.equal(read(entry, wanted), expected.to(wanted))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tensor_fills_its_slice_of_a_larger_parameter(file: Path, dtype: torch.dtype) -> None:
    fused = torch.full((9, 3), 7.0, dtype=dtype)
    entry = read_entries(file)["rows"]
    read_into(entry, fused[2:7])
    assert torch.equal(fused[2:7], read(entry).to(dtype))
    assert torch.all(torch.cat((fused[:2], fused[7:])) == 7)


def test_parameters_that_want_gradients_can_be_filled(file: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, 3))
    read_into(read_entries(file)["rows"], parameter)
    assert parameter.abs().sum() > 0


def test_a_scattered_destination_is_a_programming_error(file: Path) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        read_into(read_entries(file)["rows"], torch.empty(3, 5).T)


def test_a_wrong_shape_names_both(file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor rows .* shape \[5, 3\], but \[3, 5\]"):
        read_into(read_entries(file)["rows"], torch.empty(3, 5))


def test_integers_are_no_weights(file: Path) -> None:
    entry = read_entries(file)["ids"]
    with pytest.raises(CheckpointError, match=r"tensor ids .* int64; weights must be"):
        read(entry, torch.float32)
    with pytest.raises(CheckpointError, match="stored as int64, but int32 is expected"):
        read(entry, torch.int32, raw=True)


def test_every_truncation_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated") as caught:
            read_entries(file)
        assert str(file) in str(caught.value)


def test_a_file_cut_after_its_header_was_read(file: Path) -> None:
    entry = max(read_entries(file).values(), key=lambda entry: entry.offset)
    file.write_bytes(file.read_bytes()[: entry.offset + 1])
    with pytest.raises(CheckpointError, match=f"ended inside tensor {entry.name}"):
        read(entry, raw=True)


def test_bytes_behind_the_last_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"123")
    with pytest.raises(CheckpointError, match="has 3 bytes after tensor"):
        read_entries(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot open .*none\.safetensors"):
        read_entries(tmp_path / "none.safetensors")


def test_a_header_without_tensors(tmp_path: Path) -> None:
    assert read_entries(write(tmp_path / "x", b"{}      ")) == {}
    assert read_entries(write(tmp_path / "x", {"__metadata__": {"a": "b"}})) == {}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": {}, "a": {}}', "'a' is named twice"),
        ({"a": 3}, "tensor a .* not described by a JSON object"),
        ({"a": described([1], [0, 4], "F4")}, "dtype 'F4', which is not supported"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "dtype None"),
        ({"a": described([-1], [0, 4])}, "shape of tensor a .* list of sizes"),
        ({"a": described([True], [0, 4])}, "shape of tensor a .* list of sizes"),
        ({"a": described([1.0], [0, 4])}, "shape of tensor a .* list of sizes"),
        ({"a": described([1], [0])}, r"data_offsets \[0\]"),
        ({"a": described([1], [4, 0])}, r"data_offsets \[4, 0\]"),
        ({"a": described([1], [0, "4"])}, "data_offsets of tensor a .* list of sizes"),
        ({"a": described([3], [0, 8])}, r"has 8 bytes, but shape \[3\] of F32 needs 12"),
        ({"a": described([2], [0, 8])}, "tensor a ends at byte .*, but the file has"),
        (
            {"a": described([1], [0, 4]), "b": described([1], [2, 6])},
            "tensor b .* starts at byte 2 .* overlaps tensor a, which ends at 4",
        ),
        (
            {"a": described([1], [0, 4]), "b": described([1], [0, 4])},
            "tensor b .* overlaps tensor a",
        ),
        ({"a": described([1], [2, 6])}, "tensor a .* leaves a gap after the header"),
    ],
)
def test_bad_headers(tmp_path: Path, header: Any, message: str) -> None:
    file = write(tmp_path / "bad.safetensors", header, b"\0" * 6)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_entries(file)
    assert str(file) in str(caught.value)


def test_a_file_of_another_format(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("a text that begins as no length of a header would\n")
    with pytest.raises(CheckpointError, match=r"claims a header of \d+ bytes"):
        read_entries(file)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "model.safetensors"


@given(place=st.integers(0, 300), value=st.integers(0, 255))
def test_one_changed_byte_never_crashes_the_reader(scratch: Path, place: int, value: int) -> None:
    header = {"a": described([2], [0, 8]), "b": described([1], [8, 12])}
    raw = json.dumps(header).encode()
    content = bytearray(len(raw).to_bytes(8, "little") + raw + bytes(12))
    content[place % (8 + len(raw))] = value
    scratch.write_bytes(content)
    try:
        entries = read_entries(scratch)
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in entries.values()) == 12
