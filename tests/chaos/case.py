"""What a run of chaos does: an engine's settings and a list of operations, all of it plain data.

Operations name what they act on by number, counted round whatever lives by then, so that a case
makes sense whichever of its operations are left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

BLOCK_SIZES = (2, 4, 8)
MAX_MODEL_LEN = 80
FAMILIES, LENGTHS = 4, (3, 9, 17, 26, 33, 45)
MAX_TOKENS = 24

DRAFTERS = (
    *("none", "draft_model", "self", "subset", "pard", "medusa", "mlp_speculator"),
    *("ngram", "suffix", "custom", "perfect", "in turn", "eagle", "eagle3", "p-eagle"),
    *("dflash", "dflash2", "dspark", "assistant", "mtp", "mtp_modules", "static tree"),
    *("dynamic tree", "combination", "host_combination", "uneven_combination"),
)
_SMALL = ("none", "draft_model", "self", "ngram", "suffix", "custom", "perfect", "in turn")
# The drafters that are tried for each target.
SERVED: dict[str, Sequence[str]] = {
    "dense": DRAFTERS,
    "window": [name for name in DRAFTERS if name != "mtp_modules"],
    "hybrid": [*_SMALL, "eagle3", "dflash", "own mtp"],
    "experts": [name for name in DRAFTERS if name not in ("assistant", "subset")],
    "experts, windows, sinks": [n for n in DRAFTERS if n not in ("assistant", "subset")],
    "latent": _SMALL,
    "gemma": _SMALL,
}
WITH_STATES = ("hybrid",)
WITHOUT_INT8 = ("hybrid", "latent")
WITH_ADAPTERS = ("dense", "window")
MOST_ADAPTERS = 3

Wish = dict[str, Any]
# Sampling parameters of requests.
WISHES: dict[str, Wish] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "stop": {"temperature": 0, "stop_token_ids": [*range(1, 9)], "min_tokens": 4},
    "few drafts": {"temperature": 0, "num_speculative_tokens": 1},
    "no drafts": {"temperature": 0, "num_speculative_tokens": 0},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "allowed": {"temperature": 0, "allowed_token_ids": [*range(3, 60)], "logit_bias": {5: 2.0}},
    "seeded": {"seed": 5},
    "seeded, filtered": {"seed": 11, "temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    "seeded, penalties": {"seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "three seeded": {"seed": 7, "n": 3},
    "two greedy": {"temperature": 0, "n": 2},
    "free": {},
    "free, two": {"n": 2, "top_p": 0.9},
}
WORDY_WISHES: dict[str, Wish] = {
    "regex": {"temperature": 0, "structured": {"regex": "[0-9]{2,4}(-[ab]{1,3}){1,2}"}},
    "choice": {"temperature": 0, "structured": {"choice": ["true", "truest", "tab", "name: ab"]}},
    "schema": {
        "temperature": 0,
        "structured": {"json_schema": {"type": "array", "items": {"enum": [1, True]}}},
    },
    "seeded regex": {"seed": 4, "structured": {"regex": "[0-9a-c]{3,9}x"}},
    "stop text": {"temperature": 0, "stop": ["a", "7", "na"]},
    "bad words": {"temperature": 0, "bad_words": ["b", "co", "tr"]},
}
ALL_WISHES = {**WISHES, **WORDY_WISHES}


@dataclass(frozen=True)
class Settings:
    """The settings of an engine.

    Attributes:
        k: draft tokens; "auto" is the policy that chooses.
        seqs, rows, blocks, block_size: limits of a step and of the cache.
        caching: prefixes are shared.
        places: checkpoints of recurrent states; None: as many as the engine likes.
        steps: "exact" as on CPUs; "padded" or "packed" as captured steps, which run one ahead.
        int8: keys and values are kept in 8 bits.
        priority: requests have priorities.
        words: there is a tokenizer, and so grammars, stop texts and bad words.
        adapters: of the target, of which drafters that are whole models have some, too.
        adapter_slots: where adapters are loaded in turn.
    """

    target: str = "dense"
    drafter: str = "none"
    k: int | str = 3
    seqs: int = 4
    rows: int = 512
    blocks: int = 200
    block_size: int = 4
    caching: bool = True
    places: int | None = None
    steps: str = "exact"
    int8: bool = False
    priority: bool = False
    words: bool = False
    adapters: int = 0
    adapter_slots: int = 1


@dataclass(frozen=True)
class Operation:
    """One thing that is done to an engine.

    Attributes:
        do: "add", "step", "abort", "reset" (the prefix cache), "preempt", "poison" (a request makes
            every step fail from here on), "interrupt" and "error" (a step is broken off at a seam
            between its parts), "interrupt line" and "error line" (at a line of Python), "unload"
            (an adapter's name goes) or "load" (it comes, as another one if it was there).
        which: of the live requests for abort and poison; of a step's seams, or lines, for the
            others; the family of prompts for add; of the adapters for load and unload.
        length: of the prompt.
        adapter: of the request, counted round all of them; -1: none.
    """

    do: str
    which: int = 0
    length: int = 9
    wish: str = "greedy"
    max_tokens: int = 12
    priority: int = 0
    salt: str = ""
    adapter: int = -1


@dataclass(frozen=True)
class Case:
    """Settings, and what is done under them."""

    settings: Settings
    operations: tuple[Operation, ...]

    def to_json(self) -> str:
        """One line for each operation, with what differs from the defaults."""
        operations = [json.dumps(_changed(it, Operation("step"))) for it in self.operations]
        settings = json.dumps(_changed(self.settings, Settings()))
        lines = ",\n    ".join(operations)
        return f'{{\n  "settings": {settings},\n  "operations": [\n    {lines}\n  ]\n}}'

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """The inverse of `to_json`."""
        read = json.loads(text)
        operations = [Operation(**{"do": "step", **it}) for it in read["operations"]]
        return cls(Settings(**read["settings"]), tuple(operations))


def _changed(value: Any, plain: Any) -> Mapping[str, Any]:
    usual = asdict(plain)
    return {name: each for name, each in asdict(value).items() if each != usual[name]}


ALL_DRAFTERS = tuple(dict.fromkeys(name for served in SERVED.values() for name in served))


def random_case(
    seed: int,
    length: int,
    targets: Sequence[str] = tuple(SERVED),
    drafters: Sequence[str] = ALL_DRAFTERS,
) -> Case:
    """A case of so many operations, over some of these targets and of these drafters."""
    rng = Random(seed)
    settings = _random_settings(rng, targets, drafters)
    return Case(settings, random_operations(rng, settings, length))


def random_operations(rng: Random, settings: Settings, length: int) -> tuple[Operation, ...]:
    """Draw operations for an engine with these settings."""
    return tuple(_random_operation(rng, settings) for _ in range(length))


def _random_settings(rng: Random, targets: Sequence[str], drafters: Sequence[str]) -> Settings:
    target = rng.choice(targets)
    drafter = rng.choice([name for name in SERVED[target] if name in drafters] or ["none"])
    size = rng.choice(BLOCK_SIZES)
    fewest = -(-MAX_MODEL_LEN // size)
    counts: list[int | str] = [1, 3, 3, 7, "auto"]
    settings = Settings(
        target=target,
        drafter=drafter,
        k=rng.choice(counts),
        seqs=rng.choice([1, 2, 4, 6]),
        rows=rng.choice([512, 64, 24]),
        blocks=rng.choice([fewest, fewest + 5, fewest * 2, fewest * 5]),
        block_size=size,
        caching=rng.random() < 0.85,
        places=rng.choice([None, None, 0, 3, 8]),
        steps=rng.choice(["exact", "exact", "padded", "packed"]),
        int8=rng.random() < 0.15,
        priority=rng.random() < 0.3,
        words=rng.random() < 0.3,
    )
    if target in WITH_ADAPTERS and rng.random() < 0.4:
        count = rng.randint(1, MOST_ADAPTERS)
        slots = rng.randint(1, max(1, count - 1))
        settings = replace(settings, adapters=count, adapter_slots=slots)
    if target in WITHOUT_INT8:
        settings = replace(settings, int8=False)
    return settings if target in WITH_STATES else replace(settings, places=None)


def _random_operation(rng: Random, settings: Settings) -> Operation:
    if settings.adapters and rng.random() < 0.04:
        return Operation(rng.choice(["load", "load", "unload"]), which=rng.randrange(MOST_ADAPTERS))
    found = _usual_operation(rng, settings)
    if settings.adapters and found.do == "add":
        return replace(found, adapter=rng.randint(-1, MOST_ADAPTERS - 1))
    return found


def _usual_operation(rng: Random, settings: Settings) -> Operation:
    chance = rng.random()
    if chance < 0.62:
        return Operation("step")
    if chance < 0.86:
        wishes = ALL_WISHES if settings.words else WISHES
        return Operation(
            "add",
            which=rng.randrange(FAMILIES),
            length=rng.choice(LENGTHS),
            wish=rng.choice([*wishes, *(["greedy", "seeded"] * 3)]),
            max_tokens=rng.choice([1, 5, 12, MAX_TOKENS]),
            priority=rng.choice([-1, 0, 0, 2]) if settings.priority else 0,
            salt=rng.choice(["", "", "", "salt"]),
        )
    if chance < 0.89:
        return Operation("abort", which=rng.randrange(8))
    if chance < 0.90:
        return Operation("reset")
    if chance < 0.93:
        return Operation("preempt")
    if chance < 0.955:
        return Operation("interrupt", which=rng.randrange(40))
    if chance < 0.98:
        return Operation("error", which=rng.randrange(40))
    if chance < 0.99:
        return Operation("poison", which=rng.randrange(8))
    return Operation(rng.choice(["interrupt line", "error line"]), which=rng.randrange(2500))
