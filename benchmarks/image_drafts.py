"""What a draft model of text should see of an image: tokens gained a round, counted.

    python -m benchmarks.image_drafts [--target PATH --draft PATH] [-k 4] [--tokens 48] [--side 64]

The target reads an image and the text around it, and writes greedily. Then a draft model guesses
that text round by round, as an engine would have it, from one of three contexts: with placeholders
where the image is, without them, or from after the image alone. Nothing is timed.

Without paths the target is the demo's language model behind a tower of random weights, whose rows
are as large as embeddings of tokens: it knows its text, and an image is noise to it.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import slipstream
from slipstream import LLM, SamplingParams
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.safetensors_file import read_into
from slipstream.models.vision.catalogue import image_family

DEMO = Path(slipstream.__file__).parent / "demo"
PROMPTS, SHAPES = 64, ((1.0, 1.0), (1.5, 0.75), (0.6, 1.9))
Contexts = dict[str, Callable[[Sequence[int], int], list[int]]]


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--target")
    cli.add_argument("--draft", default=str(DEMO / "draft"))
    cli.add_argument("-k", type=int, default=4)
    cli.add_argument("--tokens", type=int, default=48)
    cli.add_argument("--side", type=int, default=64, help="of an image in pixels, about")
    options = cli.parse_args()
    with TemporaryDirectory() as folder:
        target = options.target or write_twin(Path(folder))
        family = image_family(Checkpoint(Path(target)))
        assert family is not None, "the target sees images"
        token = family.placeholder.token
        seen = LLM(target, dtype="float32", num_kv_blocks=2000)
        draft = LLM(options.draft, dtype="float32", num_kv_blocks=4000)
        for place in ("in front of the text", "in the middle of the text"):
            texts = written(seen, token, place, options.tokens, options.side)
            for name, context in contexts(token).items():
                gained, rounds = drafted(draft, texts, context, options.k)
                row = {"image": place, "draft model sees": name, "k": options.k}
                row |= {"rounds": rounds, "acceptance length": round(gained / rounds, 3)}
                print(json.dumps(row), flush=True)


def contexts(token: int) -> Contexts:
    """The draft model's inputs for tokens that begin with a prompt of this length."""

    def after_image(ids: Sequence[int], prompt: int) -> list[int]:
        last = max(place for place in range(prompt) if ids[place] == token)
        return list(ids[last + 1 :])

    return {
        "placeholders": lambda ids, prompt: list(ids),
        "the text without them": lambda ids, prompt: [it for it in ids if it != token],
        "what is after the image": after_image,
    }


def written(llm: LLM, token: int, place: str, count: int, side: int) -> list[tuple[list[int], int]]:
    """The tokens of prompts and of what the target wrote after them, and the prompts' lengths."""
    lines = (DEMO / "prompts" / "held_out.jsonl").read_text().splitlines()
    known = [line["prompt"] for line in map(json.loads, lines) if "prompt" in line]
    chance, given = np.random.default_rng(0), []
    assert llm.engine.tokenizer is not None
    for number, text in enumerate(known[:PROMPTS]):
        ids = llm.engine.tokenizer.encode(text)
        assert token not in ids, "the placeholder is no word"
        at = 0 if place.startswith("in front") else len(ids) // 2
        size = (*(int(side * part) for part in SHAPES[number % len(SHAPES)]), 3)
        image = Image.fromarray(chance.integers(0, 255, size, dtype=np.uint8))
        prompt: Any = {
            "prompt_token_ids": [*ids[:at], token, *ids[at:]],
            "multi_modal_data": {"image": image},
        }
        given.append(prompt)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [
        ([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
        for output in llm.generate(given, params)
    ]


def drafted(
    llm: LLM,
    texts: list[tuple[list[int], int]],
    context: Callable[[Sequence[int], int], list[int]],
    count: int,
) -> tuple[int, int]:
    """Tokens gained, and rounds, where the first token after a prompt is the target's own."""
    known = [prompt + 1 for _, prompt in texts]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    gained = rounds = 0
    while True:
        left = [i for i, (ids, _) in enumerate(texts) if known[i] + count < len(ids)]
        if not left:
            return gained, rounds
        given: list[Any] = [
            {"prompt_token_ids": context(texts[i][0][: known[i]], texts[i][1])} for i in left
        ]
        for i, output in zip(left, llm.generate(given, params), strict=True):
            wanted = texts[i][0][known[i] :]
            guessed = output.outputs[0].token_ids
            right = next(
                (
                    n
                    for n, pair in enumerate(zip(guessed, wanted, strict=False))
                    if len({*pair}) > 1
                ),
                count,
            )
            known[i] += right + 1
            gained, rounds = gained + right + 1, rounds + 1


def write_twin(folder: Path) -> str:
    """The demo's language model with eyes."""
    import transformers

    text = json.loads((DEMO / "target" / "config.json").read_text())
    sections = {"rope_type": "default", "rope_theta": text["rope_theta"]}
    sections |= {"mrope_interleaved": True, "mrope_section": [12, 10, 10]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    vision |= {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 64}
    config = transformers.Qwen3VLConfig(
        text_config={**text, "rope_scaling": None, "rope_parameters": sections},
        vision_config={**vision, "deepstack_visual_indexes": []},
        image_token_id=text["vocab_size"] - 1,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    torch.manual_seed(0)
    model: Any = transformers.Qwen3VLVisionModel
    tower = model._from_config(config.vision_config).float()
    own = Checkpoint(DEMO / "target")
    weights = {f"model.visual.{name}": it for name, it in tower.state_dict().items()}
    for name, entry in own.all_entries.items():
        stored = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(entry, stored)
        weights[name.replace("model.", "model.language_model.")] = stored.float()
    config.save_pretrained(folder)
    sizes: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": 1024, "longest_edge": 65536}
    transformers.Qwen2VLImageProcessorPil(**sizes, size=limits).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((DEMO / "target" / name).read_text())
    _scale_rows(folder, weights)
    return str(folder)


def _scale_rows(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Save the weights with rows of images as large as embeddings of tokens."""
    table = weights["model.language_model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors")
    family = image_family(Checkpoint(folder))
    assert family is not None
    tower = family.load(torch.float32, torch.device("cpu"))
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    with torch.inference_mode():
        rows = tower.encode(Image.fromarray(noise), {}).rows
    for name in ("weight", "bias"):
        weights[f"model.visual.merger.linear_fc2.{name}"] *= table.std() / rows.std()
    save_file(weights, folder / "model.safetensors")


if __name__ == "__main__":
    main()
