"""AWQ (Lin et al. 2023, arXiv 2306.00978) as AutoAWQ stores it ("gemm").

    qweight [K, N / 8] int32        packed along N
    qzeros  [G, N / 8] int32        packed along N
    scales  [G, N]

weight = (q - zero) * scale. A word packs eight rows in the order 0 2 4 6 1 3 5 7, lowest bits
first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.int4 import packed, unpacked
from slipstream.kernels.formats.weight import Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.gptq import read_group
from slipstream.models.quantized.grouped import IntegerForm, as_bytes, grouped_matrix
from slipstream.models.quantized.module import OneForm, StoredModule, Tensors

HARMLESS = {
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "modules_to_not_convert",  # the stored tensors show which modules are quantised
    "pre_quantized",
    "quant_method",
}
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of rows 0 to 7


@dataclass(frozen=True)
class AwqForm(IntegerForm):
    """AWQ's packing of four bits."""

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        groups = self.num_groups(columns)
        module.require_words(rows, 8, "rows")
        module.require_words(columns, 8, "columns")
        return {
            "qweight": module.take("qweight", (torch.int32,), (columns, rows // 8)),
            "qzeros": module.take("qzeros", (torch.int32,), (groups, rows // 8)),
            "scales": module.take_scales("scales", (groups, rows)),
        }

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        values, zeros = packed(_rows(found["qweight"])), _rows(found["qzeros"])
        scales = found["scales"].T.contiguous()
        return grouped_matrix(values, 4, scales, zeros, self.group or columns)


def _rows(words: Tensor) -> Tensor:
    """[M, N / 8] int32 -> [N, M] uint8."""
    in_words = unpacked(as_bytes(words)).view(len(words), -1, 8)
    return in_words[..., _PLACES].flatten(1).T.contiguous()


def read_settings(reader: ConfigReader) -> OneForm:
    reader.expect("bits", 4)
    reader.expect("zero_point", True)
    for key in ("version", "format"):
        version = reader.take(key, str, "gemm")
        if version.lower() != "gemm":
            raise reader.error(key, f"is {version!r}, but only gemm is supported")
    return OneForm("awq", AwqForm(bits=4, group=read_group(reader), symmetric=False))
