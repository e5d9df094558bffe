"""How often the first choice of a GGUF model is that of its dequantised numbers: here, llama.cpp.

    scripts/real_model          # fetches models and texts, and prints their paths
    python -m benchmarks.first_choices MODEL.gguf SHAREGPT.json [--venv DIR] [--positions 2000]

The reference is transformers' reading of the file in float32 (needs the package gguf). Texts are
the first answers of ShareGPT's conversations, cut into windows; each position is asked for its
likeliest next token. DIR is a virtual environment with llama-cpp-python; without
it only this project is compared. Speed is not measured. The last line is one JSON document.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from slipstream import LLM, SamplingParams
from slipstream.models.tokenizer import Tokenizer

WINDOW = 250  # tokens
# Runs in the other environment: windows of ids come in, the likeliest tokens after each go out.
_LLAMA = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, logits_all=True, verbose=False)
found = []
for window in json.load(sys.stdin):
    model.reset()
    model.eval(window)
    found.append(model.scores[: len(window)].argmax(axis=1).tolist())
print("choices " + json.dumps(found))
"""

Choices = list[list[int]]


def windows(model: Path, conversations: Path, positions: int) -> Choices:
    """Windows of answers, in the order of the file, which may be cut off at its end."""
    tokenizer, found = Tokenizer(model), Choices()
    decoder, text = json.JSONDecoder(), conversations.read_text("utf-8", errors="replace")
    place = text.index("{")
    while len(found) * WINDOW < positions:
        entry, place = decoder.raw_decode(text, place)
        place = text.index("{", place)
        answers = [it["value"] for it in entry["conversations"] if it["from"] == "gpt"]
        ids = tokenizer.encode(answers[0], add_special_tokens=False) if answers else []
        if len(ids) >= WINDOW:
            found.append(ids[:WINDOW])
    return found


def of_transformers(model: Path, asked: Choices) -> Choices:
    """The reference."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    with torch.inference_mode():
        rows: list[torch.Tensor] = [network(torch.tensor([ids])).logits[0] for ids in asked]
    return [[int(token) for token in each.argmax(-1)] for each in rows]


def of_this_engine(model: Path, asked: Choices, dtype: str) -> Choices:
    """The choices of this engine with a weight format."""
    llm = LLM(str(model), dtype=dtype, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    found = Choices()
    for output in llm.generate([{"prompt_token_ids": ids} for ids in asked], params):
        assert output.prompt_logprobs is not None
        inner = [
            max(candidates, key=lambda token: candidates[token].logprob)
            for candidates in output.prompt_logprobs
            if candidates is not None
        ]
        found.append([*inner, output.outputs[0].token_ids[0]])
    return found


def of_llama(model: Path, asked: Choices, venv: Path) -> Choices:
    """llama.cpp's, position by position."""
    command = [str(venv / "bin" / "python"), "-c", _LLAMA, str(model)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    lines = [it for it in done.stdout.splitlines() if it.startswith("choices ")]
    if not lines:
        raise SystemExit(f"llama.cpp did not answer: {done.stderr[-2000:]}")
    found: Choices = json.loads(lines[0].removeprefix("choices "))
    return found


def agreeing(one: Choices, other: Choices) -> int:
    """Positions of equal choice."""
    return sum(a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--positions", type=int, default=2000)
    given = parser.parse_args(arguments)
    asked = windows(given.model, given.conversations, given.positions)
    engines: dict[str, Callable[[], Choices]] = {
        "slipstream auto": partial(of_this_engine, given.model, asked, "auto"),
        "slipstream float32": partial(of_this_engine, given.model, asked, "float32"),
    }
    if given.venv is not None:
        engines["llama.cpp"] = partial(of_llama, given.model, asked, given.venv)
    reference = of_transformers(given.model, asked)
    report = {"positions": sum(map(len, asked)), "model": given.model.name}
    for name, choose in engines.items():
        report[name] = agreeing(choose(), reference)
        print(f"{name}: {report[name]} of {report['positions']} first choices", file=sys.stderr)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
