"""The first token after an image, and decoding after it, beside a text of as many tokens.

    python -m benchmarks.image_first_token [--side 1024] [--rounds 7] [--device cuda]

The geometry of Qwen3-VL-8B with random weights (--layers takes the first ones). In turns: a prompt
with an image that was not seen before; its tower alone; a text of as many tokens. Times are medians
in ms; the ratio is that of the first token after an image to tower and text, one after the other.
Decoding is (time of --tokens more tokens) / --tokens, after an image and after a text.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from benchmarks.geometries import geometry_named
from slipstream import LLM, SamplingParams

TOKEN, TEXT = 151655, 32  # the placeholder; tokens around an image


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--side", type=int, default=1024, help="of an image, in pixels")
    cli.add_argument("--layers", type=int, default=36)
    cli.add_argument("--rounds", type=int, default=7)
    cli.add_argument("--tokens", type=int, default=64)
    cli.add_argument("--device", default="auto")
    given = cli.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(write(Path(folder), given.layers)),
            load_format="dummy",
            device=given.device,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            max_num_seqs=1,
        )
        print(json.dumps(measured(llm, given.side, given.rounds, given.tokens), indent=1))


def write(folder: Path, layers: int) -> Path:
    """A config, and the tensors of its tower."""
    text = {**geometry_named("qwen3-8b"), "num_hidden_layers": layers}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    text["rope_parameters"] = {**rope, "mrope_section": [24, 20, 20]}
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [8, 16, 24],
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    content = {**config.to_dict(), "architectures": ["Qwen3VLForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    model: Any = transformers.Qwen3VLVisionModel
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes a minute
        tower = model._from_config(config.vision_config, dtype=torch.bfloat16)
    tensors = {f"model.visual.{name}": it.cpu() for name, it in tower.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def measured(llm: LLM, side: int, rounds: int, tokens: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    reader: Any = llm.engine.images
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        image, other = (
            Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
            for _ in range(2)
        )
        ids = [*range(100, 100 + TEXT // 2), TOKEN, *range(200, 200 + TEXT // 2)]
        with_image: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": [image]}}
        began = perf_counter()
        spread, _ = reader.place(ids, [other], {})
        tower = perf_counter() - began
        text: Any = {"prompt_token_ids": random.integers(1000, 9000, len(spread)).tolist()}
        first = seconds(llm, with_image, 1)
        alone = seconds(llm, text, 1)
        found = {"image": first, "tower": tower, "text": alone}
        found["image seen before"] = seen = seconds(llm, with_image, 1)
        found["decode after image"] = (seconds(llm, with_image, 1 + tokens) - seen) / tokens
        found["decode after text"] = (seconds(llm, text, 1 + tokens) - alone) / tokens
        found["ratio"] = first / (tower + alone)
        for name, value in found.items() if turn else ():  # the first warms up
            times.setdefault(name, []).append(value * (1 if name == "ratio" else 1e3))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def seconds(llm: LLM, prompt: Any, count: int) -> float:
    began = perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return perf_counter() - began


if __name__ == "__main__":
    main()
