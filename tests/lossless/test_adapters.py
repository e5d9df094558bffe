"""Speculation with adapters: every text is that of the model with the adapter merged into it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, LoRARequest, RequestOutput, SamplingParams, UsageError
from tests.adapters import write_adapter, write_merged
from tests.lossless import test_sampled
from tests.lossless.test_greedy import make_prompts, speculative_config, tokens
from tests.padded_steps import use_padded_steps

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
RANKS, ALPHAS = (4, 7, 1, 16), (4, 7, 3, 16)
SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_num_seqs": 6, "max_model_len": 128, "block_size": 8,
}  # fmt: skip
TREES = {"speculative_eagle_topk": 2, "speculative_num_steps": 3}
# The adapter of each of eight prompts; -1: none.
WHOSE = (0, 1, -1, 2, 3, 0, -1, 1)


@dataclass(frozen=True)
class Adapted:
    """Attributes:
    requests: an adapter each.
    expected: greedy text of the prompts by the adapter, from merged weights; -1: of the model.
    """

    requests: list[LoRARequest]
    expected: Mapping[int, list[list[int]]]

    def of(self, whose: int) -> LoRARequest | None:
        return None if whose < 0 else self.requests[whose]

    @property
    def mixed(self) -> list[LoRARequest | None]:
        return [self.of(it) for it in WHOSE]

    @property
    def mixed_texts(self) -> list[list[int]]:
        return [self.expected[it][place] for place, it in enumerate(WHOSE)]


@pytest.fixture(scope="module")
def adapted(tiny_target: str, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    prompts, requests, expected = make_prompts(8), [], {}
    for index, (rank, alpha) in enumerate(zip(RANKS, ALPHAS, strict=True)):
        path = folder / str(index)
        write_adapter(path, tiny_target, seed=index, rank=rank, lora_alpha=alpha)
        requests.append(LoRARequest(f"style-{index}", index + 1, path))
        merged = write_merged(folder / f"merged-{index}", tiny_target, path, alpha / rank)
        expected[index] = tokens(LLM(merged, **SIZES).generate(prompts, PARAMS))
    expected[-1] = tokens(LLM(tiny_target, **SIZES).generate(prompts, PARAMS))
    texts = [str(it) for it in expected.values()]
    assert len({*texts}) == len(texts), "adapters change the text"
    return Adapted(requests, expected)


def serving(target: str, speculative: Any = None, **options: Any) -> LLM:
    return LLM(target, speculative_config=speculative, enable_lora=True, **{**SIZES, **options})


@pytest.mark.parametrize(
    ("drafter", "k", "steps", "rows", "blocks"),
    [
        (None, 0, "exact", 512, 400),
        ("draft_model", 4, "padded", 512, 400),
        ("draft_model", "auto", "exact", 24, 16),
        ("ngram", 7, "exact", 24, 400),
        ("suffix", 4, "padded", 24, 16),
        ("eagle3", 4, "padded", 24, 16),
        ("mtp", 4, "exact", 24, 400),
        ("dflash", 7, "exact", 512, 16),
        ("pard", 4, "exact", 512, 400),
        ("medusa", 3, "padded", 24, 400),
        ("p-eagle", 4, "padded", 24, 16),
        ("assistant", 4, "exact", 24, 400),
        ("host_combination", 4, "padded", 24, 16),
        ("mtp_modules", 4, "exact", 24, 16),
    ],
)
def test_four_adapters_in_a_batch_give_the_texts_of_merged_models(
    drafter: str | None,
    k: int | str,
    steps: str,
    rows: int,
    blocks: int,
    adapted: Adapted,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks, preemptions, prefix hits, and requests without an adapter in the batch."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    case = {"drafter": drafter, "k": k}
    speculative = drafter and speculative_config(case, tiny_target, tiny_draft, tiny_heads)
    sizes = {"max_num_batched_tokens": rows, "num_kv_blocks": blocks}
    llm, prompts = serving(tiny_target, speculative, **sizes), make_prompts(8)
    num_preempted = 0
    for again in (False, True):
        outputs = llm.generate(prompts, PARAMS, adapted.mixed)
        assert tokens(outputs) == adapted.mixed_texts
        num_preempted += sum(it.metrics.num_preemptions for it in outputs)
        if again and blocks == 400:
            assert all(it.metrics.num_cached_tokens for it in outputs)
    assert (num_preempted > 0) == (blocks == 16)
    if drafter is not None:
        assert llm.metrics.speculation.num_accepted_tokens > 0


def own_drafts(adapted: Adapted) -> list[LoRARequest | None]:
    """The adapters of `mixed`, each of the drafter as well, but for the third."""
    return [
        it and replace(it, draft_lora_path=None if it.lora_int_id == 3 else it.lora_path)
        for it in adapted.mixed
    ]


@pytest.mark.parametrize(
    ("quantization", "steps", "rows", "blocks", "window"),
    [
        (None, "exact", 512, 400, None),
        (None, "padded", 24, 16, None),
        (None, "exact", 24, 400, 100),
        ("int8", "exact", 24, 400, None),
    ],
)
def test_a_drafter_with_the_adapters_of_the_target_drafts_what_it_says(
    quantization: str | None,
    steps: str,
    rows: int,
    blocks: int,
    window: int | None,
    adapted: Adapted,
    tiny_target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target drafts for itself: all is accepted where it has its adapter then, too."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    speculative = {"model": tiny_target, "num_speculative_tokens": 3, "draft_window": window}
    speculative |= {"quantization": quantization}
    sizes = {"max_num_batched_tokens": rows, "num_kv_blocks": blocks, "max_loras": 3}
    llm, prompts = serving(tiny_target, speculative, **sizes), make_prompts(8)
    if quantization is None:
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS, own_drafts(adapted))
            assert tokens(outputs) == adapted.mixed_texts
    else:
        assert tokens(llm.generate(prompts, PARAMS, own_drafts(adapted))) == adapted.mixed_texts
    counted = {
        name: it.num_accepted_tokens / it.num_draft_tokens
        for name, it in llm.metrics.adapters.items()
    }
    bare = counted.pop("style-2")
    if quantization is None:
        assert {*counted.values()} == {1.0}, counted
    assert bare < 0.8 < min(counted.values())


@pytest.mark.parametrize("drafter", ["pard", "combination"])
def test_other_drafters_of_whole_models_take_adapters(
    drafter: str, adapted: Adapted, tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Adapters of other shapes and ranks than the target's, which change what is drafted."""
    heads: Any = defaultdict(str)
    speculative = speculative_config({"drafter": drafter, "k": 4}, tiny_target, tiny_draft, heads)
    llm, prompts, accepted = serving(tiny_target, speculative), make_prompts(8), []
    for number, path in enumerate((None, write_adapter(tmp_path / "draft", tiny_draft, rank=9))):
        names: dict[str, Any] = {"lora_name": f"a{number}", "lora_int_id": number + 1}
        asked = replace(adapted.requests[0], **names, draft_lora_path=path)
        assert tokens(llm.generate(prompts, PARAMS, asked)) == adapted.expected[0]
        accepted.append(llm.metrics.adapters[f"a{number}"].num_accepted_tokens)
    assert accepted[0] != accepted[1]


@pytest.mark.parametrize(
    ("drafter", "options", "steps", "sizes"),
    [
        ("eagle3", {}, "padded", {"max_num_batched_tokens": 24, "num_kv_blocks": 16}),  # preemption
        ("eagle3", {}, "padded", {"max_num_batched_tokens": 24, "max_num_seqs": 1}),
        ("eagle", {}, "exact", {}),
        ("eagle3", TREES, "padded", {}),
        ("mtp", {}, "exact", {}),
    ],
)
def test_heads_with_adapters_draft_what_merged_heads_do(
    drafter: str,
    options: dict[str, int],
    steps: str,
    sizes: dict[str, int],
    adapted: Adapted,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside requests with another adapter of the head, with none, and without any adapter."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    case = {"drafter": drafter, "k": 6}
    speculative = speculative_config(case, tiny_target, tiny_draft, tiny_heads) | options
    head, prompts, own = speculative["model"], make_prompts(8), [0, 1]
    paths = [write_adapter(tmp_path / f"{it}", head, seed=it, rank=3 + it) for it in own]
    merged = [write_merged(tmp_path / f"merged-{it}", head, paths[it]) for it in own]
    asked: list[LoRARequest | None] = [*adapted.mixed]
    for place, whose in enumerate(WHOSE):
        if whose in own:
            asked[place] = replace(adapted.requests[whose], draft_lora_path=paths[whose])
    outputs = serving(tiny_target, speculative, **sizes).generate(prompts, PARAMS, asked)
    assert tokens(outputs) == adapted.mixed_texts
    if "num_kv_blocks" in sizes:  # how much is drafted depends on the other requests
        assert any(it.metrics.num_preemptions for it in outputs)
        return
    expected: list[Any] = []
    for model in (*merged, head):
        llm = serving(tiny_target, {**speculative, "model": model}, **sizes)
        expected.append([drafts_of(it) for it in llm.generate(prompts, PARAMS, adapted.mixed)])
    for place, whose in enumerate(WHOSE):
        assert drafts_of(outputs[place]) == expected[whose if whose in own else -1][place]
    assert expected[0] != expected[-1] != expected[1], "adapters change the drafts"


def drafts_of(output: RequestOutput) -> tuple[int, int]:
    return output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens


@pytest.mark.parametrize("drafter", ["ngram", "p-eagle"])
def test_drafters_without_adapters_refuse_them(
    drafter: str,
    adapted: Adapted,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
) -> None:
    case = {"drafter": drafter, "k": 3}
    speculative = speculative_config(case, tiny_target, tiny_draft, tiny_heads)
    llm, style = serving(tiny_target, speculative), adapted.requests[0]
    asked = replace(style, draft_lora_path=style.lora_path)
    with pytest.raises(UsageError, match="this engine's drafter takes no adapters"):
        llm.generate(make_prompts(1), PARAMS, asked)
    assert tokens(llm.generate(make_prompts(8)[:1], PARAMS, style)) == adapted.expected[0][:1]


def test_prefixes_are_shared_within_an_adapter_alone(adapted: Adapted, tiny_target: str) -> None:
    llm, prompts = serving(tiny_target, num_kv_blocks=400), make_prompts(8)
    for whose in (0, 1, -1, 0, 1, -1):
        output = llm.generate(prompts[3], PARAMS, adapted.of(whose))[0]
        assert list(output.outputs[0].token_ids) == adapted.expected[whose][3]
    hits = [
        llm.generate(prompts[3], PARAMS, adapted.of(it))[0].metrics.num_cached_tokens
        for it in (0, 1, 2, 3, -1)
    ]
    assert [bool(it) for it in hits] == [True, True, False, False, True]


def test_a_salt_is_never_taken_for_an_adapter(adapted: Adapted, tiny_target: str) -> None:
    """Whatever a client writes into it."""
    llm, prompts = serving(tiny_target, num_kv_blocks=400), make_prompts(8)
    llm.generate(prompts[3], PARAMS, adapted.of(0))
    serial = llm.engine.adapters.named("style-0").serial
    for salt in (f"\0adapter {serial}", f"{serial}", f"\0{serial}", f"{serial}\0", f"\0{serial}\0"):
        prompt: Any = {"prompt_token_ids": prompts[3]["prompt_token_ids"], "cache_salt": salt}
        [output] = llm.generate(prompt, PARAMS)
        assert output.metrics.num_cached_tokens == 0
        assert list(output.outputs[0].token_ids) == adapted.expected[-1][3]
        [output] = llm.generate(prompt, PARAMS, adapted.of(1))
        assert output.metrics.num_cached_tokens == 0


def test_more_adapters_than_slots_take_turns(adapted: Adapted, tiny_target: str) -> None:
    llm = serving(tiny_target, num_kv_blocks=400, max_loras=2)
    for _ in range(2):
        outputs = llm.generate(make_prompts(8), PARAMS, adapted.mixed)
        assert tokens(outputs) == adapted.mixed_texts
    llm.engine.scheduler.check_invariants()


def test_a_text_and_its_numbers_do_not_depend_on_the_adapters_beside_it(
    adapted: Adapted, tiny_target: str, tiny_draft: str
) -> None:
    """Bit for bit with the C++ kernels, also for seeded requests."""
    speculative = {"model": tiny_draft, "num_speculative_tokens": 3}
    llm = serving(tiny_target, speculative, dtype="bfloat16", num_kv_blocks=400)
    if not llm.engine.resolved.reasons or "cpu" not in _backend():
        pytest.skip("plain torch promises no bits")
    prompts = make_prompts(8)
    params = [
        SamplingParams(temperature=place % 2, seed=place, max_tokens=12, logprobs=0)
        for place in range(8)
    ]
    together = llm.generate(prompts, params, adapted.mixed)
    for place, prompt in enumerate(prompts):
        llm.engine.reset_prefix_cache()
        [alone] = llm.generate(prompt, params[place], adapted.mixed[place])
        assert alone.outputs[0].token_ids == together[place].outputs[0].token_ids
        assert alone.outputs[0].logprobs == together[place].outputs[0].logprobs


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_over_rounded_weights(
    quantization: str, adapted: Adapted, tiny_target: str, tiny_draft: str
) -> None:
    prompts, texts = make_prompts(8), []
    for speculative in (None, {"model": tiny_draft, "num_speculative_tokens": 4}):
        llm = serving(tiny_target, speculative, quantization=quantization, num_kv_blocks=400)
        texts.append(tokens(llm.generate(prompts, PARAMS, adapted.mixed)))
    assert texts[0] == texts[1]
    bare = tokens(llm.generate(prompts, PARAMS))
    pairs = zip(WHOSE, bare, texts[0], strict=True)
    assert all((one == other) == (whose < 0) for whose, one, other in pairs)


def test_acceptance_is_counted_for_each_adapter(
    adapted: Adapted, tiny_target: str, tiny_draft: str
) -> None:
    llm = serving(tiny_target, {"model": tiny_draft, "num_speculative_tokens": 4})
    outputs = llm.generate(make_prompts(8), PARAMS, adapted.mixed)
    assert llm.metrics.adapters.keys() == {it.lora_name for it in adapted.requests}
    for index, request in enumerate(adapted.requests):
        own = [it.metrics for it, whose in zip(outputs, WHOSE, strict=True) if whose == index]
        counted = llm.metrics.adapters[request.lora_name]
        assert counted.num_drafts == sum(it.num_drafts for it in own) > 0
        assert counted.num_accepted_tokens == sum(it.num_accepted_tokens for it in own)


def _backend() -> str:
    import torch

    from slipstream.kernels.registry import kernels_for

    return kernels_for(torch.device("cpu")).network.backend


@pytest.mark.parametrize(
    ("name", "adapts_drafts"),
    [
        *(("draft_model", False), ("draft_model", True), ("pard", True), ("combination", True)),
        *(("eagle3_dynamic_tree", True), ("mtp", False), ("block", False)),
    ],
)
def test_sampled_output_has_the_distribution_of_the_merged_model(
    name: str,
    adapts_drafts: bool,
    tmp_path: Path,
    pair: tuple[str, str],
    heads: Mapping[str, str],
) -> None:
    path = write_adapter(tmp_path / "adapter", pair[0], size=1.0)
    merged = write_merged(tmp_path / "merged", pair[0], path)
    case = test_sampled.CASES[name]
    drafter = heads.get(case["drafter"], pair[1])
    drafts = write_adapter(tmp_path / "drafts", drafter, size=1.0) if adapts_drafts else None
    params = {"temperature": 1.0, **case.get("params", {})}
    exact = test_sampled.exact_distribution(merged, params)
    llm = LLM(
        pair[0],
        speculative_config=test_sampled.speculation(pair, case, heads),
        enable_lora=True,
        skip_tokenizer_init=True,
        num_kv_blocks=300,
    )
    sampling = SamplingParams(max_tokens=test_sampled.LENGTH, ignore_eos=True, **params)
    request = LoRARequest("a", 1, path, drafts)
    drawn = test_sampled.drawn_from(llm, sampling, request, is_drafted=True)
    for places in ((0, 1), (1, 2), (2, 3)):
        assert test_sampled.p_value(drawn, exact, places) > 0.001, places


def test_an_adapter_can_be_unloaded(adapted: Adapted, tiny_target: str) -> None:
    """Then its name and number are free; prompts that run with it end with it."""
    llm, prompts = serving(tiny_target, num_kv_blocks=400, max_loras=1), make_prompts(8)[:2]
    old, new = adapted.requests[0], replace(adapted.requests[1], lora_name="style-0", lora_int_id=1)
    running = llm.stream(prompts, PARAMS, old)
    next(running)
    llm.unload_adapter("style-0")
    with pytest.raises(UsageError, match="there is no adapter 'style-0'; there is none"):
        llm.unload_adapter("style-0")
    assert tokens(llm.generate(prompts, PARAMS, new)) == adapted.expected[1][:2]
    ended = sorted((it for it in running if it.finished), key=lambda it: it.request_id)
    assert tokens(ended) == adapted.expected[0][:2]
    llm.unload_adapter("style-0")
    assert tokens(llm.generate(prompts, PARAMS, old)) == adapted.expected[0][:2]


def test_what_is_asked_for_wrongly_is_refused(adapted: Adapted, tiny_target: str) -> None:
    llm, prompts = serving(tiny_target, num_kv_blocks=400), make_prompts(2)
    with pytest.raises(UsageError, match="1 lora_requests were given for 2 prompts"):
        llm.generate(prompts, PARAMS, [adapted.of(0)])
    llm.generate(prompts, PARAMS, adapted.of(0))
    other = LoRARequest("other", 1, adapted.requests[1].lora_path)
    with pytest.raises(UsageError, match="lora_int_id 1 belongs to 'style-0'"):
        llm.generate(prompts, PARAMS, other)
    with pytest.raises(UsageError, match="there is an adapter 'style-0' already"):
        llm.generate(prompts, PARAMS, LoRARequest("style-0", 9, other.lora_path))
    with pytest.raises(UsageError, match="must be a LoRARequest"):
        llm.generate(prompts, PARAMS, "style-0")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="lora_int_id must be an integer of at least 1"):
        LoRARequest("a", 0, Path("a"))
    bare = LLM(tiny_target, num_kv_blocks=400, **SIZES)
    with pytest.raises(UsageError, match=r"start it with enable_lora \(--enable-lora\)"):
        bare.generate(prompts, PARAMS, adapted.of(0))
