"""MXFP4 as gpt-oss stores it: only experts are quantised, and a tensor has all experts of a layer.

gate_up_proj_blocks [E, 2 I, K / 32, 16] uint8, rows of gate and up interleaved
gate_up_proj_scales [E, 2 I, K / 32] uint8, e8m0
down_proj_blocks, down_proj_scales: the same for the down projection
"""

from dataclasses import dataclass

import torch

from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float4 import BYTES, POWERS, Mxfp4Form, require_powers
from slipstream.models.quantized.module import OneForm, StoredForm, StoredModule, Tensors
from slipstream.models.quantized.module_lists import read_list

HARMLESS = {"dequantize", "quant_method"}
_EXPERTS = ".experts."


@dataclass(frozen=True)
class Mxfp4Experts(OneForm):
    """gpt-oss's settings."""

    fused_endings = ("blocks", "scales")

    @property
    def description(self) -> str:
        return "mxfp4, experts alone"

    def rounding(self, module: str) -> Rounding | None:
        return super().rounding(module) if _EXPERTS in module else None

    def form_in(self, module: StoredModule) -> StoredForm:
        if _EXPERTS not in module.name:
            raise module.error(
                f"holds {module.name}.weight in a dtype that is not read: its quantization_config "
                "(mxfp4) is about experts alone, and all else must be floats"
            )
        return super().form_in(module)

    def fused_tensors(
        self, module: StoredModule, experts: int, rows: int, columns: int, turns: int
    ) -> Tensors:
        group = Mxfp4Matrix.group
        module.require_groups(columns, group)
        shape = (experts, rows, columns // group)
        return {
            "blocks": module.take_interleaved("blocks", BYTES, (*shape, group // 2), turns),
            "scales": module.take_interleaved("scales", POWERS, shape, turns),
        }

    def read_fused(
        self, module: StoredModule, experts: int, rows: int, columns: int, turns: int
    ) -> Weight:
        found = self.fused_tensors(module, experts, rows, columns, turns)
        powers = found["scales"].view(torch.uint8)
        require_powers(module, "scales", powers)
        return Mxfp4Matrix(found["blocks"].flatten(1), powers)


def read_settings(reader: ConfigReader) -> Mxfp4Experts:
    unquantised = read_list(reader, "modules_to_not_convert")
    return Mxfp4Experts("mxfp4", Mxfp4Form("blocks", "scales"), unquantised)
