"""Two ranks give the plain text of one process with every kind of drafter, in float32.

Prompts come in chunks beside decoding requests, and some requests are preempted, or find the
prefixes of a first run.
"""

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.core.batch import Batch, LastCheckpoint
from slipstream.core.errors import UsageError
from slipstream.core.structured import StructuredOutput
from slipstream.engine import build, step_results
from slipstream.engine.prompts import TokensPrompt
from slipstream.engine.step_results import Launched
from slipstream.runner.collectives import Collectives
from tests.checkpoints import write_qwen3
from tests.hybrid_checkpoints import write_hybrid
from tests.last_hidden_checkpoints import medusa_for, write_medusa
from tests.lossless.test_greedy import make_prompts, plain_tokens, speculative_config, tokens
from tests.lossless.test_trees import TREES
from tests.ranks.conftest import Opener

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SPLIT = {"draft_tensor_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "draft_model shared": SPLIT,
    "eagle3": {},
    "subset shared": SPLIT,
    "suffix": {},
    "medusa": {},
    "uneven_combination": {},
    "dflash": {},
    "eagle in a static tree": {"num_speculative_tokens": 10, **TREES["static"]},
}
REST: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("subset", "pard", "mlp_speculator", "ngram", "custom", "eagle")},
    **{name: {} for name in ("p-eagle", "dflash2", "dspark", "mtp", "mtp_modules", "self")},
    **{name: {} for name in ("combination", "host_combination")},
    **{name: SPLIT for name in ("self shared", "pard shared")},
    "eagle in a wide tree": TREES["wide"],
    "medusa with the target's head": {"model": "bare"},
    "medusa with some of its tokens": {"model": "mapped"},
}
NARROW = {"max_num_batched_tokens": 24, "num_kv_blocks": 16}  # chunks, preemption
WIDE = {"max_num_batched_tokens": 24}  # the second run finds prefixes
ROOMS = (NARROW, WIDE)
NUMBERS = {name: number for number, name in enumerate([*CASES, *REST])}


def check(
    name: str,
    keys: dict[str, Any],
    models: tuple[str, str, dict[str, str]],
    ranked: Opener,
    room: dict[str, Any],
    ranks: int = 2,
    guesses_count: bool = False,
) -> None:
    """Nor are rows of logits ever put together.

    Args:
        guesses_count: whether ranks must accept as many tokens as one process does.
    """
    prompts = make_prompts(8)
    expected = plain_tokens(models[0], len(prompts), GREEDY)
    case = {"drafter": name.partition(" ")[0], "k": "auto" if name == "eagle3" else 5}
    drafter = {**speculative_config(case, *models), **keys}
    if drafter.get("model") in ("bare", "mapped"):
        drafter["model"] = bare_medusa(models[0], drafter["model"] == "mapped")
    drafter = {key: value for key, value in drafter.items() if value is not None}
    accepted: list[int] = []
    if guesses_count:
        whole = {key: it for key, it in drafter.items() if key not in SPLIT}
        alone = ranked(models[0], whole, tensor_parallel_size=1, **room)
        outputs = alone.generate(prompts, GREEDY)
        accepted = [output.metrics.num_accepted_tokens for output in outputs]
    gathered: list[torch.Size] = []
    gather = Collectives.gather

    def noted(self: Collectives, mine: torch.Tensor) -> torch.Tensor:
        gathered.append(mine.shape)
        return gather(self, mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "gather", noted)
        llm = ranked(models[0], drafter, tensor_parallel_size=ranks, **room)
    if room is WIDE:
        llm.generate(prompts[::2], GREEDY)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    if guesses_count:
        assert [output.metrics.num_accepted_tokens for output in outputs] == accepted
    assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == (room is NARROW)
    assert room is NARROW or sum(output.metrics.num_cached_tokens for output in outputs) > 0
    assert llm.metrics.speculation.num_drafts > 0
    assert gathered
    if keys.get("draft_tensor_parallel_size", ranks) in (1, ranks):  # they are as in `Columns`
        assert all(len(shape) == 2 and shape[0] == 1 for shape in gathered)


def bare_medusa(target: str, mapped: bool) -> str:
    """Heads that take the target's lm_head, of all its tokens or of some."""
    tensors = load_file(Path(medusa_for(target, heads=15)) / "medusa_lm_head.safetensors")
    tensors = {name: it for name, it in tensors.items() if not name.endswith(".1.weight")}
    if mapped:
        tensors["token_map"] = torch.arange(90, 5, -2)
    folder = Path(target) / f"bare-{mapped}"
    return write_medusa(folder, tensors, medusa_num_heads=15, medusa_num_layers=1)


@pytest.fixture
def models(
    tiny_target: str, tiny_draft: str, tiny_heads: dict[str, str]
) -> tuple[str, str, dict[str, str]]:
    return tiny_target, tiny_draft, tiny_heads


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_plain_text(
    name: str, models: tuple[str, str, dict[str, str]], ranked: Opener
) -> None:
    check(name, CASES[name], models, ranked, ROOMS[NUMBERS[name] % 2])


@pytest.mark.full
@pytest.mark.parametrize("name", NUMBERS)
def test_every_drafter(name: str, models: tuple[str, str, dict[str, str]], ranked: Opener) -> None:
    keys = {**CASES, **REST}[name]
    for number, room in enumerate(ROOMS):
        if name not in CASES or number != NUMBERS[name] % 2:
            on_time = name == "eagle3"  # what it costs decides how much is drafted
            counts = room is NARROW and not on_time and "combination" not in name
            check(name, keys, models, ranked, room, guesses_count=counts)


@pytest.mark.parametrize("neighbours", [pytest.param(4, marks=pytest.mark.full), 2])
def test_four_ranks(
    neighbours: int, tmp_path: Path, models: tuple[str, str, dict[str, str]], ranked: Opener
) -> None:
    """There are fewer heads of keys than ranks, so that two have the same one. All share the draft
    model, or each half of them has one."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "seed": 2}
    target = str(write_qwen3(tmp_path / "target", **sizes))
    draft = str(write_qwen3(tmp_path / "draft", keep_layers=1, **sizes))
    keys = {"draft_tensor_parallel_size": neighbours}
    check("draft_model", keys, (target, draft, models[2]), ranked, NARROW, ranks=4)


def test_what_ranks_cannot_share_is_refused(
    models: tuple[str, str, dict[str, str]], ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, heads = models
    monkeypatch.setattr(build, "start_ranks", None)  # nothing is started
    with pytest.raises(UsageError, match="an assistant reads all keys"):
        ranked(target, {"model": heads["assistant"]})
    with pytest.raises(UsageError, match=r"size=4 does not divide .* \(1, 2\)"):
        ranked(target, {"model": draft, "draft_tensor_parallel_size": 4})
    with pytest.raises(UsageError, match="unknown key spin for method draft_model"):
        ranked(target, {"model": draft, "spin": 3})
    with pytest.raises(UsageError, match="enforce_eager must be true or false"):
        ranked(target, {"model": draft, "enforce_eager": 3})
    with pytest.raises(UsageError, match="limit_mm_per_prompt cannot take effect"):
        ranked(target, limit_mm_per_prompt={"image": 1})
    problem = r"\(2\) cannot be split over 3 ranks; .* \(1, 2\)"
    with pytest.raises(UsageError, match=problem):
        ranked(target, tensor_parallel_size=3)


@pytest.mark.parametrize("four", [False, pytest.param(True, marks=pytest.mark.full)])
def test_requests_of_all_kinds(
    four: bool, tmp_path: Path, models: tuple[str, str, dict[str, str]], ranked: Opener
) -> None:
    """Seeds, truncations, penalties, biases, logprobs of both kinds, and what is allowed."""
    target, draft, _ = models
    if four:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4}
        target = str(write_qwen3(tmp_path / "target", **sizes))
        draft = str(write_qwen3(tmp_path / "draft", keep_layers=1, **sizes))
    params = [
        SamplingParams(seed=5, max_tokens=20),
        SamplingParams(seed=6, max_tokens=20, temperature=0.7, top_k=20, top_p=0.9, n=2),
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=list(range(3, 60))),
        SamplingParams(
            seed=7,
            max_tokens=20,
            min_p=0.01,
            logit_bias={5: 2.0, 70: 1.5},
            min_tokens=9,
            stop_token_ids=[5, 70],
        ),
        SamplingParams(max_tokens=20),
    ]
    prompts = make_prompts(len(params))
    drafter = {"model": draft, "num_speculative_tokens": 3}
    found = [
        ranked(target, keys, tensor_parallel_size=size).generate(prompts, params)
        for size, keys in ((1, drafter), (4, drafter) if four else (2, drafter | SPLIT))
    ]
    # The last one has no seed, and its draws may fall otherwise where sums are rounded otherwise.
    texts = [[[list(it.token_ids) for it in out.outputs] for out in run[:-1]] for run in found]
    assert texts[0] == texts[1]
    one, other = (
        [it for it in (*(run[3].prompt_logprobs or ()), *(run[3].outputs[0].logprobs or ())) if it]
        for run in found
    )
    assert len(one) == len(prompts[3]["prompt_token_ids"]) - 1 + 20
    for own, rivals in zip(one, other, strict=True):
        assert {it: round(own[it].logprob, 3) for it in own} == pytest.approx(
            {it: rivals[it].logprob for it in own}, abs=2e-3
        )


def test_grammars_are_walked_by_the_leader(ranked: Opener) -> None:
    drafter = {"model": "demo/draft", "num_speculative_tokens": 3}
    structured = StructuredOutput(regex="[0-9]{2,4}(-[ab]{1,3}){1,2}")
    params = [
        SamplingParams(temperature=0, max_tokens=20, structured=structured),
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(seed=3, max_tokens=20, structured=structured),
    ]
    options = {"skip_tokenizer_init": False}
    found = [
        ranked("demo", keys, tensor_parallel_size=size, **options).generate(["x = "] * 3, params)
        for size, keys in ((1, drafter), (2, drafter | SPLIT))
    ]
    assert tokens(found[0]) == tokens(found[1])
    assert re.fullmatch(structured.regex or "", found[1][0].outputs[0].text)


@pytest.mark.breaks_steps
def test_a_step_that_fails_is_undone_on_all_ranks(
    models: tuple[str, str, dict[str, str]], ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails in the leader's own part, and where all ranks take part."""
    target, draft, _ = models
    prompts = make_prompts(3)
    expected = plain_tokens(target, len(prompts), GREEDY)
    llm = ranked(target, {"model": draft, "num_speculative_tokens": 3})
    for owner, name in (
        (llm.engine.scheduler, "commit"),
        (step_results, "PackedBatch"),
    ):
        calls = count()
        usual = getattr(owner, name)

        def failing(*given: Any, calls: Any = calls, usual: Any = usual, **named: Any) -> Any:
            if next(calls) == 3:
                raise ZeroDivisionError("on purpose")
            return usual(*given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            assert tokens(llm.generate(prompts, GREEDY)) == expected
        assert next(calls) > 4


def test_two_ranks_write_checkpoints_of_drafts_that_were_accepted_last(
    tmp_path: Path, ranked: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank includes them in its share of the states, and the next turn resumes from it."""
    target = str(write_hybrid(tmp_path / "target", "qwen3_next"))
    drafter = {
        "model": str(write_qwen3(tmp_path / "draft")),
        "num_speculative_tokens": 7,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.95] * 7,
    }
    first = [TokensPrompt(prompt_token_ids=list(range(1, 12 + it))) for it in range(1, 9)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = ranked(target, drafter, tensor_parallel_size=size)
        saved = record_last_checkpoints(llm, monkeypatch)
        answers = tokens(llm.generate(first, params))
        pairs = zip(first, answers, strict=True)
        said = [[*prompt["prompt_token_ids"], *answer, 5] for prompt, answer in pairs]
        outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in said], params)
        cached = [output.metrics.num_cached_tokens for output in outputs]
        found.append((answers, tokens(outputs), cached))
        assert len(saved) > 2
    assert found[0] == found[1]


def record_last_checkpoints(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[LastCheckpoint]:
    """Those that steps write from here on."""
    step, saved = llm.engine._step, list[LastCheckpoint]()
    launch = step.launch

    def recorded(batch: Batch) -> Launched:
        saved.extend(batch.checkpoints)
        return launch(batch)

    monkeypatch.setattr(step, "launch", recorded)
    return saved
