"""GPTQ (Frantar et al. 2022, arXiv 2210.17323) as AutoGPTQ and GPTQModel store it.

    qweight [K b / 32, N] int32     packed along K, the first column lowest
    qzeros  [G, N b / 32] int32     packed along N; version 1 stores zero - 1
    scales  [G, N]
    g_idx   [K] int32               the group of each column

weight = (q - zero) * scale. With desc_act, columns were quantised in the order of activation sizes,
so the columns of a group are scattered.
"""

from dataclasses import dataclass

import torch

from slipstream.kernels.formats.int4 import unpacked
from slipstream.kernels.formats.weight import Weight
from slipstream.models.config_reader import ConfigReader
from slipstream.models.quantized.grouped import IntegerForm, as_bytes, grouped_matrix
from slipstream.models.quantized.module import INDICES, OneForm, StoredModule, Tensors

# Keys about calibration, and hints for other engines' kernels.
HARMLESS = set(
    """
    act_group_aware autoround_version backend batch_size block_name_to_quantize
    cache_block_outputs damp_auto_increment damp_percent dataset disable_exllama exllama_config
    hyb_act lm_head max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize mse pad_token_id quant_method
    static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
    """.split()
)


@dataclass(frozen=True, kw_only=True)
class GptqForm(IntegerForm):
    """GPTQ's packing.

    Attributes:
        zero_offset: added to stored zeros (1 in version 1).
    """

    zero_offset: int

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        in_word, groups = 32 // self.bits, self.num_groups(columns)
        module.require_words(columns, in_word, "columns")
        module.require_words(rows, in_word, "rows")
        found = {
            "qweight": module.take("qweight", (torch.int32,), (columns // in_word, rows)),
            "scales": module.take_scales("scales", (groups, rows)),
            "qzeros": module.take("qzeros", (torch.int32,), (groups, rows // in_word)),
        }
        if "g_idx" in module:
            found["g_idx"] = module.take("g_idx", INDICES, (columns,))
        elif self.ordered:
            raise module.error(f"has no tensor {module.name}.g_idx, which desc_act asks for")
        return found

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Weight:
        scales, zeros = found["scales"].T.contiguous(), as_bytes(found["qzeros"])
        if self.bits == 4:
            zeros = unpacked(zeros)
        # Version 1 stores a zero of 0 as the largest integer, so the addition must wrap around.
        zeros = (zeros + self.zero_offset) & ((1 << self.bits) - 1)
        if self.symmetric and bool((zeros != 1 << (self.bits - 1)).any()):
            raise module.error(
                f'says "sym" in its quantization_config, but {module.name}.qzeros are not in the '
                'middle; correct "sym", or "checkpoint_format" (gptq or gptq_v2)'
            )
        group_of = None
        if "g_idx" in found:
            group_of = module.groups("g_idx", found, self.num_groups(columns))
        values, group = as_bytes(found["qweight"].T), self.group or columns
        return grouped_matrix(values, self.bits, scales, zeros.T.contiguous(), group, group_of)


def read_settings(reader: ConfigReader) -> OneForm:
    bits = reader.take("bits", int)
    if bits not in (4, 8):
        raise reader.error("bits", f"is {bits}, but 4 and 8 are supported; use another checkpoint")
    version = reader.take("checkpoint_format", str, "") or reader.take("format", str, "gptq")
    reader.take("format", str, "")
    if version not in ("gptq", "gptq_v2"):
        raise reader.error(
            "checkpoint_format", f"is {version!r}, but gptq and gptq_v2 are supported"
        )
    reader.expect("is_marlin_format", False)
    reader.expect("pack_dtype", "int32")
    if reader.take("dynamic", dict, {}):
        raise reader.error("dynamic", "has modules with other settings, which is not supported")
    form = GptqForm(
        bits=bits,
        group=read_group(reader),
        ordered=reader.take("desc_act", bool, False),
        symmetric=reader.take("sym", bool, True),
        zero_offset=1 if version == "gptq" else 0,
    )
    return OneForm("gptq", form)


def read_group(reader: ConfigReader) -> int | None:
    """`group_size` in columns; None for -1, which means one group a row."""
    group = reader.take("group_size", int)
    if group < 1 and group != -1:
        raise reader.error("group_size", f"is {group}, but must be positive, or -1 for whole rows")
    return None if group == -1 else group
