"""Prompts with images: speculation, chunks, hits, preemptions and neighbours change no token."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.core.batch import Batch
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.models.vision.tower import SpanEmbeddings
from slipstream.runner.device_batch import DeviceBatch, Guesses
from slipstream.speculative.catalogue import METHODS
from slipstream.speculative.drafter import Draft
from slipstream.speculative.heads.loading import HeadNetwork
from slipstream.speculative.ngram.drafter import NgramDrafter
from slipstream.speculative.suffix.drafter import SuffixDrafter
from tests import fake_drafters
from tests.adapters import write_adapter, write_merged
from tests.checkpoints import write_qwen3
from tests.drafters.assistants import write_gemma4_assistant
from tests.drafters.blocks import write_dflash
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp
from tests.image_checkpoints import (
    END,
    IMAGE,
    START,
    VOCAB_SIZE,
    images,
    prompt,
    with_images,
    write,
    write_text_of,
)
from tests.last_hidden_checkpoints import medusa_for
from tests.lossless.test_greedy import remember, tokens
from tests.models.parity_cases import Case as Case4
from tests.padded_steps import use_steps
from tests.pairwise import Case

AXES: dict[str, list[Any]] = {
    "family": ["Qwen3VL", "Mistral3"],
    "drafter": ["none", "ngram", "suffix", "draft_model", "eagle3", "in turn"],
    "k": [1, 5],
    "rows": [512, 24],  # 24: chunks cut images, mixed with decoding
    "blocks": [400, 48],  # 48 blocks of 8 tokens: requests are preempted
    "prefix": ["none", "same", "other"],  # what ran before: these images, or others of their sizes
    "seeded": [False, True],
    "steps": ["exact", "padded", "packed"],
}
GEMMA = {
    **AXES,
    "family": ["Gemma4", "Gemma4-E"],
    "drafter": [*AXES["drafter"], "assistant"],
    "prefix": ["none", "other"],
}
Text = tuple[list[int], list[int]]
COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str], str]:
    return cache(lambda family: str(write(folder / family, family)))


@pytest.fixture(scope="module")
def assistants(folder: Path, models: Callable[[str], str]) -> Callable[[str], str]:
    """Those of both sizes of Gemma 4."""

    def make_one(family: str) -> str:
        text = write_text_of(Path(models(family)), folder / f"{family}-text")
        sizes = {"global_head_dim": 24, "num_global_key_value_heads": 2 - (family == "Gemma4")}
        case = Case4(family, "sees", sizes)
        return write_gemma4_assistant(folder / f"{family}-assistant", text, case)

    return cache(make_one)


@pytest.fixture(scope="module")
def drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """A text model and a head that were made for a plain target of the same sizes."""
    plain = str(write_qwen3(folder / "plain", vocab_size=VOCAB_SIZE, num_hidden_layers=4))
    return {
        "draft_model": {"model": plain},
        "eagle3": {"model": str(write_eagle3(folder / "eagle3", plain))},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "suffix": {"method": "suffix"},
        "in turn": {"method": "fake", "model": "in turn"},
    }


def params(seeded: bool) -> SamplingParams:
    chosen = {"temperature": 0.8, "seed": 7} if seeded else {"temperature": 0}
    return SamplingParams(max_tokens=COUNT, ignore_eos=True, **chosen)


def make(model: str, **options: Any) -> LLM:
    given = {"num_kv_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 512, **options}
    return LLM(model, dtype="float32", skip_tokenizer_init=True, block_size=8, **given)


def prompts(seed: int) -> list[Any]:
    """Equal texts with images of equal sizes, and one without images."""
    return [
        with_images(prompt(1), images(1, seed)),
        with_images(prompt(3), images(3, seed)),
        {"prompt_token_ids": [1, 2, 3, 50, 51, 52]},
        with_images(prompt(3, 2), images(3, seed + 1)),
        with_images(prompt(2), [images(1, seed + 1)[0], images(2, seed)[1]]),
    ]


def texts(llm: LLM, given: list[Any], seeded: bool) -> list[Text]:
    """The tokens of each prompt, and those of its output."""
    outputs = llm.generate(given, params(seeded))
    return [([*it.prompt_token_ids], [*it.outputs[0].token_ids]) for it in outputs]


@pytest.fixture(scope="module")
def plain(models: Callable[[str], str]) -> Callable[[str, bool], list[Text]]:
    """The output of each prompt alone, in a new engine."""

    def run(family: str, seeded: bool) -> list[Text]:
        llm = make(models(family), enable_prefix_caching=False)
        return [texts(llm, [it], seeded)[0] for it in prompts(0)]

    return cache(run)


@pytest.mark.matrix(AXES)
def test_text_is_that_of_plain_decoding(
    case: Case,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    plain: Callable[[str, bool], list[Text]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(case, models, drafters, plain, monkeypatch)


@pytest.mark.matrix(GEMMA)
def test_text_of_gemma_is_that_of_plain_decoding(
    case: Case,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    assistants: Callable[[str], str],
    plain: Callable[[str, bool], list[Text]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case["drafter"] == "assistant":
        drafters = {"assistant": {"model": assistants(case["family"])}}
    check(case, models, drafters, plain, monkeypatch)


def check(
    case: Case,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    plain: Callable[[str, bool], list[Text]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    known = plain(case["family"], case["seeded"])
    remember([{"prompt_token_ids": ids} for ids, _ in known], [answer for _, answer in known])
    use_steps(case["steps"], monkeypatch)
    speculation = drafters.get(case["drafter"])
    if speculation is not None:
        speculation = {**speculation, "num_speculative_tokens": case["k"]}
    llm = make(
        models(case["family"]),
        # Room for one image of those whose images must not be cut.
        max_num_batched_tokens=max(
            case["rows"], 150 * (case["family"] in ("Gemma3", "Gemma4", "Gemma4Unified"))
        ),
        num_kv_blocks=case["blocks"],
        speculative_config=speculation,
    )
    if case["prefix"] != "none":
        texts(llm, prompts(0 if case["prefix"] == "same" else 5), case["seeded"])
    assert texts(llm, prompts(0), case["seeded"]) == known
    manager = llm.engine.scheduler.block_manager
    if case["prefix"] == "same" and case["blocks"] == 400:
        assert manager.num_hit_tokens >= 200


OTHERS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "mtp": lambda folder, plain: {"model": str(write_mtp(folder, plain))},
    "medusa": lambda _, plain: {"method": "medusa", "model": medusa_for(plain)},
    "dflash": lambda folder, plain: {"model": str(write_dflash(folder, plain))},
    "p-eagle": lambda folder, plain: {"model": str(write_p_eagle(folder, plain))},
    "pard": lambda _, plain: {"method": "pard", "model": plain, "pard_token": 80},
    "tree": lambda folder, plain: {
        "model": str(write_eagle1(folder, plain)),
        "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (1, 1)]",
    },
    "combination": lambda _, plain: {
        "drafters": [{"method": "ngram", "min_match": 1}, {"model": plain}]
    },
}


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *(("Qwen3_5", "mtp"), ("Qwen3_5", "p-eagle"), ("Qwen3_5Moe", "combination")),
        *(("Gemma3", "medusa"), ("Qwen3VLMoe", "dflash"), ("Qwen3VL", "tree")),
        *(("Gemma4Unified", "pard"), ("Qwen2VL", "combination"), ("Qwen2_5_VL", "p-eagle")),
        ("InternVL", "medusa"),
    ],
)
def test_text_is_that_of_plain_decoding_with_other_drafters(
    family: str,
    drafter: str,
    tmp_path: Path,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    plain: Callable[[str, bool], list[Text]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = OTHERS[drafter](tmp_path / "head", drafters["draft_model"]["model"])
    case = {"family": family, "drafter": drafter, "k": 5, "rows": 24, "blocks": 48}
    case.update(prefix="other", seeded=drafter > "l", steps="padded")
    check(case, models, {drafter: options}, plain, monkeypatch)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookups_pass_over_images(
    method: str,
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens of an image are neither guessed nor part of what is looked up."""
    guesses = record_guesses(monkeypatch)
    options = {**drafters[method], "num_speculative_tokens": 5}
    llm = make(models("Qwen3VL"), speculative_config=options, enforce_eager=True)
    image = images(1)[0]
    asked = [1, 2, 3, START, IMAGE, END, 7, 8, 9, 1, 2, 3], [5, IMAGE, 6, 4, 3, 6, 8, 2, IMAGE, 6]
    first = []
    for ids in asked:
        guesses.clear()
        llm.generate(with_images(ids, [image] * ids.count(IMAGE)), params(False))
        assert all(IMAGE not in guess for guess in guesses)
        first.append(guesses[0])
    # Behind "image 6" came 4, and after 6 at last 8; n-grams begin after the image.
    assert first == [[START], [8] if method == "suffix" else []]


def record_guesses(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record all further guesses of lookup drafters, request by request."""
    found: list[list[int]] = []
    propose, prepare = NgramDrafter.propose, SuffixDrafter.prepare

    def proposed(self: NgramDrafter, batch: DeviceBatch) -> Draft:
        draft = propose(self, batch)
        rows = zip(draft.token_ids.tolist(), draft.num_tokens.tolist(), strict=True)
        found.extend(tokens[:length] for tokens, length in rows)
        return draft

    def prepared(self: SuffixDrafter, batch: Batch) -> Guesses:
        guesses = prepare(self, batch)
        found.extend(list(guess or ()) for guess in guesses)
        return guesses

    monkeypatch.setattr(NgramDrafter, "propose", proposed)
    monkeypatch.setattr(SuffixDrafter, "prepare", prepared)
    return found


@pytest.mark.parametrize("family", ["Gemma4", "Gemma4-E"])
def test_assistants_guess_behind_images(
    family: str, models: Callable[[str], str], assistants: Callable[[str], str]
) -> None:
    options = {"model": assistants(family), "num_speculative_tokens": 3}
    llm = make(models(family), speculative_config=options)
    outputs = llm.generate([prompts(0)[number] for number in (0, 1, 3, 4)], params(False))
    assert sum(output.metrics.num_accepted_tokens for output in outputs)


def test_heads_take_the_embeddings_of_images(
    models: Callable[[str], str],
    drafters: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Tensor] = []
    embedded = HeadNetwork.embedded

    def spy(self: HeadNetwork, token_ids: Tensor, inputs: PassInputs | None = None) -> Tensor:
        found = embedded(self, token_ids, inputs)
        if inputs is not None and inputs.embedded is not None:
            taken.extend(found[token_ids == IMAGE])
        return found

    monkeypatch.setattr(HeadNetwork, "embedded", spy)
    given, options = prompts(0)[1], {**drafters["eagle3"], "num_speculative_tokens": 2}
    # Launched, since a replayed pass shows its embeddings to nobody.
    settings = {"max_num_batched_tokens": 24, "enforce_eager": True}
    llm = make(models("Qwen3VL"), speculative_config=options, **settings)
    llm.generate(given, params(False))
    ids, seen = given["prompt_token_ids"], given["multi_modal_data"]["image"]
    _, spans = llm.engine.images.place(ids, seen, {})
    found = [span.embedded for span in spans]
    expected = torch.cat([it.rows for it in found if isinstance(it, SpanEmbeddings)])
    assert torch.equal(torch.stack(taken).cpu(), expected)


def test_images_and_adapters_at_once(
    tmp_path: Path, models: Callable[[str], str], drafters: dict[str, dict[str, Any]]
) -> None:
    """Images of requests with another adapter, or without, are no prefix of this one's."""
    target = models("Qwen3VL")
    path = write_adapter(tmp_path / "adapter", target, targets=["o_proj", "up_proj", "down_proj"])
    merged = make(write_merged(tmp_path / "merged", target, path), enable_prefix_caching=False)
    bare = make(target, enable_prefix_caching=False)
    adapter, given, greedy = LoRARequest("a", 1, path), prompts(0), params(False)
    known = [[tokens(it.generate([one], greedy))[0] for one in given] for it in (bare, merged)]
    options = {**drafters["eagle3"], "num_speculative_tokens": 3}
    llm = make(target, enable_lora=True, speculative_config=options, max_num_batched_tokens=24)
    for whose in ((0, 1, 0, 1, 0), (1, 0, 1, 0, 1), (1, 1, 1, 1, 1)):
        asked = [adapter if it else None for it in whose]
        expected = [known[it][place] for place, it in enumerate(whose)]
        assert tokens(llm.generate(given, greedy, asked)) == expected
    assert known[0] != known[1]
    assert llm.engine.scheduler.block_manager.num_hit_tokens >= 100


@pytest.mark.parametrize(("family", "rows"), [("Qwen3VL", 24), ("Gemma4", 150)])
def test_preempted_requests_see_their_images_again(
    family: str,
    rows: int,
    models: Callable[[str], str],
    plain: Callable[[str, bool], list[Text]],
) -> None:
    known = [plain(family, False)[number] for number in (0, 4)]
    blocks = sum(-(-len(ids) // 8) for ids, _ in known) + 2
    llm = make(models(family), num_kv_blocks=blocks, max_num_batched_tokens=rows)
    assert texts(llm, [prompts(0)[0], prompts(0)[4]], False) == known
    assert llm.engine.scheduler.num_preemptions
