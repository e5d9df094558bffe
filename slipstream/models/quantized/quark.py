"""MXFP4 as Quark stores it: weight [N, K / 2] uint8 and weight_scale [N, K / 32] uint8, e8m0."""

from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.float4 import Mxfp4Form
from slipstream.models.quantized.module import OneForm
from slipstream.models.quantized.module_lists import read_list

# Keys about calibration and the export.
HARMLESS = {"algo_config", "export", "quant_method", "quant_mode", "version"}
_FOUND = tuple(
    """
    block_size ch_axis is_scale_quant mx_element_dtype observer_cls round_method
    scale_calculation_mode scale_type symmetric zero_point_type
    """.split()
)


def read_settings(reader: ConfigReader) -> OneForm:
    for key in ("layer_quant_config", "layer_type_quant_config", "softmax_quant_spec"):
        if reader.take_optional(key, dict):
            raise reader.error(key, "has settings of its own for some layers, which are not read")
    reader.take_any("kv_cache_quant_config")  # KV caches have the dtype that users choose
    whole = reader.nested("global_quant_config")
    weight = whole.nested("weight")
    weight.expect("dtype", "fp4", default="")
    weight.expect("qscheme", "per_group")
    weight.expect("group_size", Mxfp4Matrix.group, default=0)
    weight.expect("scale_format", "e8m0")
    weight.expect("is_dynamic", False)
    for key in _FOUND:
        weight.take_any(key)
    weight.finish()
    whole.take_any("input_tensors")  # activations are not quantised
    whole.take_any("target_device")
    for key in ("bias", "output_tensors"):
        if whole.take_any(key):
            raise whole.error(key, "is quantised, which is not supported; use another checkpoint")
    whole.finish()
    return OneForm("quark", Mxfp4Form("weight", "weight_scale"), read_list(reader, "exclude"))
