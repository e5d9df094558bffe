"""Write a target of random weights and a draft of its first layers, which it often agrees with.

    python -m benchmarks.write_twins OUT [--geometry qwen3-0.6b] [--draft-layers 4]

The weights are those of `load_format` "twin" (`slipstream/models/twin.py`), in files that any
engine reads: OUT/target and OUT/draft hold config.json, model.safetensors and the tokenizer of the
bundled demo. Experts are fused, and rounded to MXFP4 where the geometry stores them so. Rows of
the vocabulary that the tokenizer does not have are halved, so that greedy output hardly ever takes
them. A pass costs what it does in a trained model of that geometry, and drafts are accepted for
real; the text means nothing.
"""

import argparse
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.geometries import GEOMETRIES, geometry_named, write_config
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.reference import REFERENCE
from slipstream.layers.parameters import FusedExperts, Part
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.precision import in_precision
from slipstream.models.quantized.catalogue import read_quantization
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import stored_rounding
from slipstream.models.twin import TwinSource

_DEMO = Path(__file__).parent.parent / "slipstream" / "demo" / "target"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class Recorder:
    """Draws what a network asks for, and keeps it under the names of the parts."""

    def __init__(
        self, source: TwinSource, num_tokens: int, stored: StoredQuantization | None
    ) -> None:
        self._source, self._num_tokens, self._stored = source, num_tokens, stored
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        drawn = self._source.matrix(parts, columns)
        fused = parts[0].fused
        if not isinstance(fused, FusedExperts):
            return self._keep(parts, drawn)
        self._keep_experts(fused, parts, drawn)
        return drawn.new_zeros(()).expand(drawn.shape)  # nobody multiplies by it

    def vector(self, parts: Sequence[Part]) -> Tensor:
        # Addends of loading are not stored in files.
        return self._keep(parts, self._source.vector(parts) - parts[0].offset)

    def _keep_experts(self, fused: FusedExperts, parts: Sequence[Part], drawn: Tensor) -> None:
        form = None
        if self._stored is not None:
            form = stored_rounding(self._stored, parts[0].name, drawn.shape[1])
        if form is None:
            whole = _fused(fused, parts, drawn)
            self.tensors[fused.name] = whole.transpose(1, 2) if fused.transposed else whole
            return
        rounded = form.round(drawn)
        if not isinstance(rounded, Mxfp4Matrix):
            raise ValueError(f"experts in {type(rounded).__name__} are not written")
        blocks = rounded.values.view(len(drawn), -1, Mxfp4Matrix.group // 2)
        self.tensors[f"{fused.name}_blocks"] = _fused(fused, parts, blocks)
        self.tensors[f"{fused.name}_scales"] = _fused(fused, parts, rounded.scales)

    def _keep(self, parts: Sequence[Part], parameter: Tensor) -> Tensor:
        fused = parts[0].fused
        if isinstance(fused, FusedExperts):
            self.tensors[fused.name] = _fused(fused, parts, parameter)
            return parameter
        shares = torch.split(parameter, [part.rows for part in parts])
        for part, rows in zip(parts, shares, strict=True):
            if part.name in _TABLES:
                rows[self._num_tokens :] *= 0.5
            if part.within is None:
                self.tensors[part.name] = rows
                continue
            whole = self.tensors.get(part.name)
            if whole is None:
                whole = rows.new_empty(part.tensor_rows, *rows.shape[1:])
                self.tensors[part.name] = whole
            ends = itertools.accumulate(stop - start for start, stop in part.spans)
            for (start, stop), end in zip(part.spans, ends, strict=True):
                whole[start:stop] = rows[end - stop + start : end]
        return parameter


def _fused(fused: FusedExperts, parts: Sequence[Part], rows: Tensor) -> Tensor:
    """Rows [E n, ...], expert by expert and part by part -> [E, n, ...] as files have them."""
    tail = rows.shape[1:]
    if fused.alternating:
        names = len(parts) // fused.experts
        rows = rows.view(fused.experts, names, -1, *tail).transpose(1, 2)
    return rows.reshape(fused.experts, -1, *tail)


def write_twins(out: Path, geometry: str, draft_layers: int, seed: int = 0) -> tuple[Path, Path]:
    """The two directories.

    Args:
        geometry: a name of `benchmarks/geometries.py`.

    Raises:
        ValueError: the target has no more layers than that, or not all of the tokenizer's tokens.
    """
    layers = geometry_named(geometry)["num_hidden_layers"]
    if not 0 < draft_layers < layers:
        raise ValueError(f"{geometry} has {layers} layers; a draft has from 1 to {layers - 1}")
    target = write_config(out / "target", geometry, eos_token_id=0, bos_token_id=0)
    draft = write_config(
        out / "draft", geometry, eos_token_id=0, bos_token_id=0, num_hidden_layers=draft_layers
    )
    whole = read_decoder_config(Checkpoint(target))
    for folder in (target, draft):
        _write(folder, whole, seed)
    return target, draft


def _write(folder: Path, target: DecoderConfig, seed: int) -> None:
    from safetensors.torch import save_file

    for name in _TOKENIZER:
        shutil.copyfile(_DEMO / name, folder / name)
    tokens = len(json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
    if target.vocab_size < tokens:
        raise ValueError(f"the tokenizer has {tokens} tokens, the geometry {target.vocab_size}")
    cpu = torch.device("cpu")
    checkpoint = Checkpoint(folder)
    stored = read_quantization(checkpoint.config, checkpoint.config_file)
    recorder = Recorder(TwinSource(torch.bfloat16, cpu, seed, target), tokens, stored)
    # The network itself is not wanted, but it knows what it is made of.
    source = in_precision(recorder, None, REFERENCE)
    Decoder(REFERENCE, source, read_decoder_config(checkpoint), 16)
    tensors = {name: tensor.contiguous() for name, tensor in recorder.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("out", type=Path)
    cli.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    cli.add_argument("--draft-layers", type=int, default=4)
    cli.add_argument("--seed", type=int, default=0)
    given = cli.parse_args()
    for folder in write_twins(given.out, given.geometry, given.draft_layers, given.seed):
        print(folder)


if __name__ == "__main__":
    main()
