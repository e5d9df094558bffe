"""Every key of a speculative_config is honoured or refused, with the remedy."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.engine.drafting.sizes import captured_widths
from slipstream.engine.prompts import TokensPrompt
from slipstream.layers.parameters import WHOLE
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.speculative import loading
from slipstream.speculative.draft_model import drafter as draft_model
from slipstream.speculative.draft_model.vocabularies import require_same_vocabulary
from slipstream.speculative.loading import _usual_number
from tests.checkpoints import write_qwen3
from tests.draft_traffic import learn_costs_while_running
from tests.drafters.kinds import KINDS
from tests.last_hidden_checkpoints import medusa_for


def make(target: str, config: Any) -> LLM:
    return LLM(target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=16)


SYNTHETIC = {"model": "DRAFT", "rejection_sample_method": "synthetic"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "needs method"),
    ({"num_speculative_tokens": 3}, "needs method"),
    ({"method": "teleport"}, "unknown method 'teleport'; known methods: combination, custom, "),
    ({"method": "ngram", "num_speculative_tokens": -1}, "0 .plain decoding. to 1024, not -1"),
    ({"method": "ngram", "num_speculative_tokens": True}, 'must be "auto" or an integer'),
    ({"method": "ngram", "num_speculative_tokens": "many"}, 'must be "auto" or an integer'),
    ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "between 1 and"),
    ({"method": "ngram", "prompt_lookup_max": 0}, "lookup_max must be positive, not 0"),
    ({"method": "ngram", "model": "x"}, "leave it out"),
    ({"method": "eagle3", "model": "ngram"}, "ngram is a method .*, and method eagle3 is"),
    ({"method": "draft_model", "model": "mtp"}, "mtp is a method .* leave one of them out"),
    ({"method": "ngram", "max_model_len": 5}, "unknown key max_model_len for method ngram"),
    ({"method": "ngram", "num_speculative_tokens": 1025}, "from 0 .* to 1024, not 1025"),
    ({"method": "ngram", "num_speculative_tokens": 1000}, "does not fit max_model_len=.* at most"),
    ({"method": "suffix", "model": "x"}, "leave it out"),
    ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "between 1 and 1024, not 0"),
    ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "must be 0 or more"),
    ({"method": "suffix", "suffix_decoding_max_cached_tokens": 2.5}, "must be an integer"),
    ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "between 0 and 1, not 1.5"),
    ({"method": "suffix", "suffix_decoding_max_spec_factor": "2"}, "must be a number"),
    ({"method": "suffix", "max_model_len": 5}, "unknown key max_model_len for method suffix"),
    ({"method": "draft_model"}, "needs model"),
    ({"model": "DRAFT", "prompt_lookup_max": 3}, "unknown key prompt_lookup_max"),
    ({"model": "DRAFT", "parallel_drafting": True}, "has no pard_token; give it as pard_token"),
    ({"model": "DRAFT", "parallel_drafting": 1}, "leave it out, or use method pard"),
    ({"model": "DRAFT", "use_heterogeneous_vocab": 1}, "must be true or false, not 1"),
    ({"model": "DRAFT", "draft_tensor_parallel_size": 2}, r"does not divide .* \(1\)"),
    ({"model": "DRAFT", "draft_vocab_size": 0}, "draft_vocab_size must be positive"),
    ({"model": "DRAFT", "draft_vocab_size": 97}, "larger than the vocabulary of 96"),
    ({"model": "DRAFT", "draft_vocab_text": "x"}, "needs draft_vocab_size"),
    (
        {"model": "DRAFT", "draft_vocab_size": 9, "draft_vocab_text": "/no/text"},
        "cannot be read .*; give a text file",
    ),
    (
        {"model": "DRAFT", "quantization": "awq"},
        "quantization must be fp8, .*, or be left out .* not 'awq'",
    ),
    ({"model": "DRAFT", "quantization": 8}, "quantization must be fp8"),
    (
        {"method": "ngram", "quantization": "fp8"},
        r"unknown key quantization \(--drafter-quantization\) for method ngram",
    ),
    (
        {"drafters": [{"method": "ngram"}, {"method": "ngram"}], "draft_window": 16},
        "unknown key draft_window .*; options of one drafter belong in its own entry of drafters",
    ),
    ({"model": "DRAFT", "dtype": "int3"}, "dtype must be one of"),
    ({"model": "DRAFT", "max_model_len": 0}, "max_model_len must be positive"),
    ({"model": "DRAFT", "draft_sample_method": "best"}, "probabilistic or greedy"),
    ({"model": "DRAFT", "rejection_sample_method": "strict"}, "use rejection, standard"),
    ({"model": "DRAFT", "rejection_sample_method": "synthetic"}, "needs either"),
    ({"model": "DRAFT", "synthetic_acceptance_length": 2}, "makes the output meaningless"),
    ({**SYNTHETIC, "synthetic_acceptance_length": 5.5}, "between 1 and 5"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0.1, 0]}, "that never rise"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "must be 4 numbers"),
    ({"model": "DRAFT", "enforce_eager": "yes"}, "true or false"),
    ({"model": 3}, "model must be a string"),
    ({"model": ["demo/draft"]}, "model must be a string"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_a_wrong_key_or_value_is_refused(
    config: dict[str, Any], message: str, tiny_target: str, tiny_draft: str
) -> None:
    config = {key: tiny_draft if value == "DRAFT" else value for key, value in config.items()}
    with pytest.raises(UsageError, match=message):
        make(tiny_target, config)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_no_key_is_offered_that_would_be_refused(method: str, tiny_target: str) -> None:
    with pytest.raises(UsageError, match="unknown key foo") as refused:
        make(tiny_target, {"method": method, "foo": 1})
    offered = str(refused.value).partition("it takes ")[2].split(", ")
    assert "enforce_eager" in offered
    assert not {"model", "speculative_token_tree", "speculative_num_steps"} & {*offered}
    assert len(offered) > 5


def test_hyphens_equal_underscores(tiny_target: str, tiny_draft: str) -> None:
    llm = make(
        tiny_target,
        {
            "model": tiny_draft,
            "method": "draft_model",
            "num-speculative-tokens": 2,
            "max-model-len": 100,
            "rejection-sample-method": "standard",
            "draft_tensor_parallel_size": 1,
            "parallel_drafting": False,
        },
    )
    assert llm.engine.resolved.limits.num_speculative_tokens == 2
    assert llm.engine.resolved.limits.drafter_max_model_len == 100


@pytest.mark.parametrize(
    ("large", "reaches", "vocab_size", "size", "expected"),
    [
        (True, True, 96, 2, 2),
        (False, True, 96, 2, 1),  # so small a draft model is as fast whole
        (True, False, 96, 2, 1),  # sums would go through NCCL or gloo
        (True, True, 97, 2, 1),  # ranks have other tokens of the draft than of the target
        (True, True, 96, 3, 1),  # its sizes cannot be shared by three
    ],
)
def test_large_drafts_are_shared_where_ranks_reach_each_others_memory(
    large: bool,
    reaches: bool,
    vocab_size: int,
    size: int,
    expected: int,
    tiny_draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint(Path(tiny_draft))
    shape = read_decoder_config(checkpoint)
    smallest = shape.num_matrix_parameters + (0 if large else 1)
    monkeypatch.setattr(draft_model, "_SHARED_PARAMETERS", smallest)
    share = replace(WHOLE, size=size, reaches_memory=reaches)
    load: Any = SimpleNamespace(share=share, load_format="auto")
    target: Any = SimpleNamespace(load=load, vocab_size=vocab_size)
    assert shape.vocab_size == 96
    assert draft_model.usual_ranks(checkpoint, shape, target, None) == expected


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"model": "DRAFT"}, 7),
        ({"method": "ngram"}, 12),
        ({"method": "suffix"}, 12),
        ({"drafters": [{"method": "ngram"}, {"model": "DRAFT"}]}, 7),
        ({"method": "medusa", "model": "MEDUSA"}, 3),
    ],
)
@pytest.mark.parametrize("given", [{"num_speculative_tokens": "auto"}, {}], ids=["auto", "none"])
def test_auto_drafts_no_more_than_the_drafter_can(
    given: dict[str, Any],
    config: dict[str, Any],
    most: int,
    tiny_target: str,
    tiny_draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn_costs_while_running(monkeypatch)
    monkeypatch.setattr(loading, "_usual_number", _usual_number)  # tests have another
    text = json.dumps({**config, **given}).replace("DRAFT", tiny_draft)
    medusa = medusa_for(tiny_target, heads=3)
    llm = make(tiny_target, json.loads(text.replace("MEDUSA", medusa)))
    assert llm.engine.resolved.drafts == f"auto (up to {most})"
    assert llm.engine.resolved.limits.num_speculative_tokens == most


@pytest.mark.parametrize(
    ("kind", "max_num_seqs", "most", "at_once"),
    [
        ("pard", 64, 15, True),
        ("p-eagle", 64, 15, True),
        ("dflash", 64, 15, True),
        ("dspark", 64, 15, False),
        ("dflash", 256, 12, True),
        ("dflash", 512, 7, True),
    ],
)
def test_auto_drafts_more_tokens_where_all_come_from_one_pass(
    kind: str,
    max_num_seqs: int,
    most: int,
    at_once: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no more than there is memory for with many requests."""
    learn_costs_while_running(monkeypatch)
    config = {**KINDS[kind](tmp_path, tiny_target).config, "num_speculative_tokens": "auto"}
    llm = LLM(
        tiny_target,
        speculative_config=config,
        skip_tokenizer_init=True,
        num_kv_blocks=16,
        max_num_seqs=max_num_seqs,
    )
    limits = llm.engine.resolved.limits
    assert (limits.num_speculative_tokens, limits.drafts_at_once) == (most, at_once)
    assert len(captured_widths(limits)) <= 6
    assert captured_widths(limits)[-1] == most


def test_auto_fits_into_short_texts(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learn_costs_while_running(monkeypatch)
    auto = {"method": "ngram", "num_speculative_tokens": "auto"}
    llm = LLM(tiny_target, speculative_config=auto, skip_tokenizer_init=True, max_model_len=6)
    assert llm.engine.resolved.limits.num_speculative_tokens == 5
    output = llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model": "DRAFT", "num_speculative_tokens": 3}, 3),
        ({"drafters": [{"method": "ngram", "num_speculative_tokens": 6}, {"model": "DRAFT"}]}, 6),
        ({"model": "DRAFT", "rejection_sample_method": "synthetic",
          "synthetic_acceptance_rates": [0.5] * 4}, 4),
    ],
)  # fmt: skip
def test_a_number_stays_fixed_where_something_tells_it(
    config: dict[str, Any],
    count: int,
    tiny_target: str,
    tiny_draft: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "_usual_number", _usual_number)  # tests have another
    llm = make(tiny_target, json.loads(json.dumps(config).replace("DRAFT", tiny_draft)))
    assert not llm.engine.resolved.adaptive
    assert llm.engine.resolved.limits.num_speculative_tokens == count


def test_k_of_zero_is_plain_decoding(tiny_target: str) -> None:
    llm = make(tiny_target, {"model": "/nowhere", "num_speculative_tokens": 0})
    output = llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4))[0]
    assert output.metrics.num_drafts == 0


def test_the_config_must_be_a_mapping(tiny_target: str) -> None:
    with pytest.raises(UsageError, match="must be a mapping"):
        make(tiny_target, "ngram")


def test_vocabularies_may_differ_by_padding(tiny_target: str, tmp_path: Path) -> None:
    target = Path(tiny_target)
    draft = write_qwen3(tmp_path / "draft", vocab_size=112, keep_layers=1)
    tokenizers = with_tokenizers(tmp_path, ["a", "b"], ["a", "b"])
    require_same_vocabulary(tokenizers[0], 96, tokenizers[1], 112)
    with pytest.raises(CheckpointError, match="has 2 tokens, and its model only 1"):
        require_same_vocabulary(tokenizers[0], 96, tokenizers[1], 1)
    with pytest.raises(CheckpointError, match="has 112 entries and the target's 96"):
        make(str(target), {"model": str(draft)})


def test_a_padded_draft_never_guesses_its_padding(tiny_target: str, tmp_path: Path) -> None:
    """The draft has more rows than the target, all of them legal but for the padding."""
    target = write_qwen3(tmp_path / "target")
    draft = write_qwen3(tmp_path / "draft", vocab_size=112, seed=5, keep_layers=1)
    for folder in (target, draft):
        write_tokenizer(folder, [f"t{i}" for i in range(96)])
    prompt = TokensPrompt(prompt_token_ids=[5, 9, 14])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, seed=3)
        output = make(str(target), {"model": str(draft)}).generate(prompt, params)[0]
        assert output.metrics.num_drafts > 0
        assert max(output.outputs[0].token_ids) < 96
        if temperature == 0:
            plain = make(str(target), None).generate(prompt, params)[0]
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_another_vocabulary_is_refused_naming_the_tokens(tmp_path: Path) -> None:
    target, draft = with_tokenizers(tmp_path, ["a", "b", "c"], ["a", "x", "c", "d"])
    with pytest.raises(CheckpointError) as error:
        require_same_vocabulary(target, 96, draft, 96)
    assert "2 ids differ" in str(error.value)
    assert "id 1 is 'b' in the target and 'x' in the drafter" in str(error.value)
    assert "id 3 is None in the target and 'd' in the drafter" in str(error.value)


def with_tokenizers(folder: Path, target: list[str], draft: list[str]) -> tuple[Path, Path]:
    return write_tokenizer(folder / "t", target), write_tokenizer(folder / "d", draft)


def write_tokenizer(folder: Path, tokens: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    model = {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(tokens)}, "unk_token": "a"}
    content = {"version": "1.0", "added_tokens": [], "model": model, "note": len(tokens)}
    del content["note"]
    text = json.dumps({**content, "normalizer": None, "pre_tokenizer": None})
    # A space more, so that equal vocabularies do not mean equal files.
    (folder / "tokenizer.json").write_text(text + " " * (folder.name == "draft"))
    return folder
