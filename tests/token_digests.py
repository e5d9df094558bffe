"""A digest of the tokens that each of many cases gives, so that a change of any token is seen.

Which tokens come out must not change when code is only rearranged. `token_digests.json` beside
`tests/lossless/test_same_tokens.py` holds the digests of float32 cases; they are the same on every
processor, since no case samples from probabilities that a fit by the processor's library decides.
After a change that is meant to change tokens, write it again:

    python -m tests.token_digests record

Cases in other precisions depend on the processor. Two checkouts are compared on one machine by

    python -m tests.token_digests record --everything FILE      in the one,
    python -m tests.token_digests compare --everything FILE     in the other.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.speculative.trees.shapes import TREE_KEYS
from tests.json_schemas import SCHEMAS
from tests.lossless.test_greedy import make_llm, make_prompts, speculative_config
from tests.lossless.test_trees import SAMPLINGS, TREES
from tests.padded_steps import use_padded_steps
from tests.pairwise import Case, pairwise_cases
from tests.quantized_checkpoints import (
    awq,
    float8,
    float_tensors,
    gptq,
    int_tensors,
    packed_tensors,
    write_quantized,
)
from tests.tiny_models import ARCHITECTURES, HEADS, TinyModels

RECORDED = Path(__file__).parent / "lossless" / "token_digests.json"
DEMO_PROMPTS = Path(__file__).parents[1] / "slipstream" / "demo" / "prompts" / "held_out.jsonl"
LENGTH = 40

# Drafters whose checkpoints are the same bits wherever they are written, and those whose last
# matrix is fitted to the target. `suffix` is among the latter since what it drafts depends on the
# requests before: only its greedy text is told.
EXACT = [
    *("none", "draft_model", "self", "subset", "pard", "medusa", "mlp_speculator"),
    *("ngram", "custom"),
]
FITTED = [
    *("suffix", "eagle", "eagle3", "p-eagle", "dflash", "assistant", "mtp", "mtp_modules"),
    *("combination", "host_combination", "uneven_combination"),
]
SHAPES: dict[str, list[Any]] = {
    "k": [1, 3, 7],
    "batch": [1, 8],
    "rows": [512, 24],  # 24: prompts come in chunks, mixed with decoding
    "blocks": [400, 16],  # 16 blocks of 8 tokens: requests are preempted
    "prefix": [False, True],  # the same prompts were run before
    "steps": ["exact", "padded"],
}
DEMO_DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "draft": {"model": "demo/draft"},
    "eagle3": {"model": "demo/eagle3"},
    "mtp": {"model": "demo/mtp"},
    "p-eagle": {"model": "demo/p-eagle"},
    "pard": {"model": "demo/pard"},
    "ngram": {"method": "ngram"},
    "combination": {"drafters": [{"method": "ngram", "min_match": 3}, {"model": "demo/draft"}]},
}
DEMO_SHAPES: dict[str, dict[str, Any]] = {
    "wide": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "one by one": {"max_num_seqs": 1},
    "preempted": {"num_kv_blocks": 11, "max_model_len": 160},
}
FORMATS: dict[str, Callable[[], Any]] = {
    "gptq": gptq,
    "gptq-ordered": lambda: gptq(ordered=True, symmetric=False, group=32),
    "gptq-8": lambda: gptq(bits=8),
    "awq": lambda: awq(group=64),
    "packed": lambda: packed_tensors(group=32, symmetric=False),
    "int8": int_tensors,
    "float8-channels": float_tensors,
    "float8-blocks": float8,
}


def recorded_cases() -> dict[str, Case]:
    """The float32 cases whose digests every processor agrees on."""
    rooms = {
        "tiny": pairwise_cases(
            {"drafter": [*EXACT, *FITTED], **SHAPES, "sampling": ["greedy", "penalties"]}
        ),
        "sampled": pairwise_cases(
            {"drafter": EXACT, **SHAPES, "sampling": ["seeded", "everything"]}
        ),
        # The noise of a node is that of plain decoding, so that the fit decides nothing.
        "tree": pairwise_cases(
            {
                "drafter": ["eagle", "eagle3"],
                "tree": list(TREES),
                **_without(SHAPES, "k"),
                "sampling": list(SAMPLINGS),
            }
        ),
        "architecture": pairwise_cases(
            {
                "name": list(ARCHITECTURES),
                "drafter": ["none", "draft_model"],
                "k": [3],
                "sampling": list(SAMPLINGS),
                "rows": [512, 24],
            }
        ),
        "demo": _demo_cases(["float32"], [None]),
    }
    return _named(rooms)


def all_cases() -> dict[str, Case]:
    """Those, and what only one processor and its libraries can repeat."""
    rooms = {
        "sampled": pairwise_cases(
            {
                "drafter": [name for name in FITTED if name != "suffix"],
                **SHAPES,
                "sampling": ["seeded", "everything"],
            }
        ),
        "int8 cache": pairwise_cases(
            {"drafter": [*EXACT, *FITTED], **SHAPES, "sampling": ["greedy", "penalties"]}
        ),
        "format": pairwise_cases(
            {
                "name": list(FORMATS),
                "dtype": ["float32", "bfloat16"],
                "k": [0, 3],
                "sampling": ["greedy", "seeded"],
            }
        ),
        "demo": _demo_cases(
            ["bfloat16"],
            [None, "int8", "int8-dynamic", "int4", "int4-g128", "int4-asym", "int4-g128-asym"],
        )
        + _demo_cases(["float16"], [None])
        + [
            {**case, "drafter_quantization": kind}
            for case in _demo_cases(["bfloat16"], ["int8"])
            for kind in ("int8", "int4")
        ],
    }
    return recorded_cases() | _named(rooms)


def _demo_cases(dtypes: list[str], quantizations: list[str | None]) -> list[Case]:
    return pairwise_cases(
        {
            "drafter": [*DEMO_DRAFTERS, "tree"],
            "dtype": dtypes,
            "quantization": quantizations,
            "k": [1, 3, 7],
            "shape": list(DEMO_SHAPES),
            "sampling": [*SAMPLINGS, "structured"],
            "prefix": [False, True],
        }
    )


def _without(axes: dict[str, list[Any]], name: str) -> dict[str, list[Any]]:
    return {key: values for key, values in axes.items() if key != name}


def _named(rooms: dict[str, list[Case]]) -> dict[str, Case]:
    return {
        f"{room}: " + ", ".join(f"{name} {value}" for name, value in case.items()): {
            **case,
            "room": room,
        }
        for room, cases in rooms.items()
        for case in cases
    }


def run(case: Case, models: TinyModels, patch: pytest.MonkeyPatch) -> list[RequestOutput]:
    """The outputs of one case, by a new engine."""
    prompts, params = _prompts(case), _params(case)
    if case.get("steps") == "padded":
        use_padded_steps(patch)
    llm = _engine(case, models)
    if case.get("prefix"):
        llm.generate(prompts, params)
    return llm.generate(prompts, params)


def digest(outputs: list[RequestOutput]) -> str:
    """A digest of all token ids."""
    tokens = [[list(sample.token_ids) for sample in output.outputs] for output in outputs]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def _engine(case: Case, models: TinyModels) -> LLM:
    return {
        "demo": _demo_engine,
        "architecture": _engine_of_architecture,
        "format": _engine_of_format,
    }.get(case["room"], _tiny_engine)(case, models)


def _by_rejection(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Verify by rejection, since coupled texts do not depend on drafts; trees always are."""
    if config is None or not config.keys().isdisjoint(TREE_KEYS):
        return config
    return {**config, "rejection_sample_method": "rejection"}


def _tiny_engine(case: Case, models: TinyModels) -> LLM:
    config: dict[str, Any] | None = None
    if case["room"] == "tree":
        config = {"model": models.heads[case["drafter"]], **TREES[case["tree"]]}
    elif case["drafter"] != "none":
        heads = models.heads if case["drafter"] in FITTED else dict.fromkeys(HEADS, "")
        config = speculative_config(case, models.target, models.draft, heads)
    config = _by_rejection(config)
    if case["room"] != "int8 cache":
        return make_llm(models.target, config, case)
    return LLM(
        models.target,
        speculative_config=config,
        skip_tokenizer_init=True,
        kv_cache_dtype="int8",
        max_num_seqs=6,
        max_num_batched_tokens=case["rows"],
        num_kv_blocks=case["blocks"],
        block_size=8,
        max_model_len=128,
    )


def _engine_of_architecture(case: Case, models: TinyModels) -> LLM:
    config = None
    if case["drafter"] != "none":
        draft = models.of_architecture(case["name"], keep_layers=1)
        config = {"model": draft, "num_speculative_tokens": case["k"]}
    config = _by_rejection(config)
    return make_llm(models.of_architecture(case["name"]), config, {**case, "blocks": 400})


def _engine_of_format(case: Case, models: TinyModels) -> LLM:
    folder = models.folder / "formats" / case["name"]
    if not folder.is_dir():
        write_quantized(folder, FORMATS[case["name"]]())
    config = {"method": "ngram", "num_speculative_tokens": case["k"], "prompt_lookup_min": 1}
    return LLM(
        str(folder),
        dtype=case["dtype"],
        speculative_config=_by_rejection(config) if case["k"] else None,
        skip_tokenizer_init=True,
        num_kv_blocks=400,
        block_size=8,
    )


def _demo_engine(case: Case, models: TinyModels) -> LLM:
    config: dict[str, Any] | None = None
    if case["drafter"] == "tree":
        config = {"model": "demo/eagle3", **TREES["static" if case["k"] == 3 else "narrow"]}
    elif case["drafter"] != "none":
        count = min(case["k"], 6) if case["drafter"] == "p-eagle" else case["k"]
        config = {**DEMO_DRAFTERS[case["drafter"]], "num_speculative_tokens": count}
        if "model" in config and "drafter_quantization" in case:
            config["quantization"] = case["drafter_quantization"]
    shape = {"max_num_seqs": 8, "num_kv_blocks": 256, "max_model_len": 512}
    return LLM(
        "demo",
        device="cpu",
        dtype=case["dtype"],
        quantization=case["quantization"],
        speculative_config=_by_rejection(config),
        **{**shape, **DEMO_SHAPES[case["shape"]]},
    )


def _prompts(case: Case) -> list[Any]:
    if case["room"] != "demo":
        return make_prompts(case.get("batch", 4))
    entries = [json.loads(line) for line in DEMO_PROMPTS.read_text().splitlines()]
    texts = [entry["prompt"][:400] for entry in entries if "prompt" in entry]
    return texts[: 2 if case["shape"] == "one by one" else 6]


def _params(case: Case) -> SamplingParams | list[SamplingParams]:
    if case["sampling"] != "structured":
        return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **SAMPLINGS[case["sampling"]])
    from slipstream import StructuredOutput

    # Every other request greedy, the rest with a seed.
    wishes = [StructuredOutput(json_schema=schema) for schema in SCHEMAS[:6]]
    params = [
        SamplingParams(max_tokens=LENGTH, temperature=number % 2, seed=number, structured=wish)
        for number, wish in enumerate(wishes)
    ]
    return params[: len(_prompts(case))]


def recorded(
    cases: dict[str, Case], models: TinyModels, facts: Callable[[list[RequestOutput]], Any]
) -> Iterator[tuple[str, Any]]:
    """(name, facts) of each case."""
    for name, case in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            yield name, facts(run(case, models, patch))


def _digest_and_counts(outputs: list[RequestOutput]) -> str:
    """A digest of the tokens, and the numbers of draft and accepted tokens."""
    metrics = [output.metrics for output in outputs]
    counts = [sum(it.num_drafts for it in metrics), sum(it.num_accepted_tokens for it in metrics)]
    return f"{digest(outputs)} {counts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", nargs="?", type=Path, default=RECORDED)
    parser.add_argument("--everything", action="store_true", help="all precisions, and counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = all_cases() if args.everything else recorded_cases()
    facts: Callable[[list[RequestOutput]], str] = _digest_and_counts if args.everything else digest
    found, began = {}, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, value in recorded(cases, TinyModels(Path(folder)), facts):
            found[name] = value
    print(f"{len(found)} cases in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if args.action == "record":
        args.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(args.file.read_text())
    changed = [name for name in before | found if before.get(name) != found.get(name)]
    for name in changed:
        print(f"{name}: {before.get(name)} -> {found.get(name)}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
