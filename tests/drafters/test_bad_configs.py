"""Drafters that do not fit their target, or are broken: one sentence that names the cause."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from tests.checkpoints import write_qwen3
from tests.drafters import engines
from tests.drafters.assistants import FULL, SLIDING, write_assistant
from tests.drafters.blocks import write_dflash, write_dflash2, write_dspark
from tests.drafters.broken import edit, make, write_config
from tests.drafters.heads import write_eagle1, write_eagle3, write_p_eagle
from tests.drafters.mtp_heads import write_mtp

AUX = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_type": "default", "rope_theta": 1e6}
WRITERS: dict[str, Callable[..., Path]] = {
    "eagle": write_eagle1,
    "eagle3": partial(write_eagle3, fit=False),
    "p-eagle": partial(write_p_eagle, fit=False),
    "dflash": partial(write_dflash, own_head=False),
    "dflash2": write_dflash2,
    "dspark": write_dspark,
    "mtp": write_mtp,
    "gemma4_assistant": write_assistant,
}
CONFIGS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "eagle3": {
        "aux out of range": ({AUX: [0, 1, 3]}, "target of 2 layers has those of 0 to 2"),
        "aux twice": ({AUX: [0, 1, 1]}, "streams of the layers 0, 1, 1"),
        "usual aux of a small target": ({AUX: "drop"}, "which is what a head without a list reads"),
        "fewer aux": ({AUX: [0, 1]}, "fc reads 144 numbers a token, and 2 layers .* give 96"),
        "aux words": ({AUX: ["a"]}, "must be a list of layer numbers"),
        "vocabulary": ({"vocab_size": 99, "draft_vocab_size": 60}, "vocabulary of 99 tokens"),
        "target width": ({"target_hidden_size": 64}, "of hidden size 64, and this one has 48"),
        "both norms": ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        "unknown key": ({"spin": 3}, '"spin" is unknown'),
        "quantised": (
            {"quantization_config": {"quant_method": "fp8"}},
            "asks for fp8 weights, which drafting heads are not read in; .* --drafter-quantization",
        ),
        "flag": ({"norm_output": "yes"}, "norm_output.* must be true or false"),
        "draft vocabulary": ({"draft_vocab_size": 61}, "must hold 61 integers"),
        "width": ({"hidden_size": 96}, "cannot share the target's: its hidden size is 96"),
    },
    "p-eagle": {
        "aux out of range": ({AUX: [0, 1, 3]}, "target of 2 layers has those of 0 to 2"),
        "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens"),
        "target width": ({"target_hidden_size": 64}, "of hidden size 64, and this one has 48"),
        "mask of no token": (
            {"ptd_token_id": 96},
            "mask token 96 is not in its vocabulary",
        ),
        "mask of no number": ({"ptd_token_id": "x"}, '"ptd_token_id" must be a whole number'),
        "unknown key": ({"spin": 3}, '"spin" is unknown'),
    },
    "dflash": {
        "no mask": (
            {"dflash_config": {"mask_token_id": "drop"}},
            "mask_token_id.* must be one of the 96",
        ),
        "far mask": (
            {"dflash_config": {"mask_token_id": 96}},
            "must be one of the 96 token ids .* not 96",
        ),
        "no block": ({"block_size": "drop"}, "block_size.* is missing"),
        "small block": ({"block_size": 1}, "a draft block holds a known token and one more"),
        "layers": (
            {"dflash_config": {"target_layer_ids": [1, 2]}},
            "enter layers 2, 3; a target of 2",
        ),
        "words": (
            {"dflash_config": {"target_layer_ids": [1, "a"]}},
            "list of layer numbers, each once",
        ),
        "twice": (
            {"dflash_config": {"target_layer_ids": [1, 1]}},
            "list of layer numbers, each once",
        ),
        "fewer": (
            {"dflash_config": {"target_layer_ids": [1]}},
            "reads 96 numbers a token, and 1 layers",
        ),
        "two lists": ({"aux_hidden_state_layer_ids": [0, 1]}, "differ; remove one of them"),
        "trained for": ({"num_target_layers": 36}, "a target of 36 layers, and this one has 2"),
        "target width": ({"target_hidden_size": 64}, "hidden size 64, and this one has 48"),
        "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens"),
        "draft vocabulary": ({"draft_vocab_size": 61}, "without a tensor d2t it is unknown which"),
        "sinks": ({"dflash_config": {"attention_sink_bias": True}}, "only false is supported"),
        "projector": ({"projector_type": "domino"}, 'is "domino", but only "dflash"'),
        "unknown": ({"spin": 3}, '"spin" is unknown'),
        "unknown nested": ({"dflash_config": {"spin": 3}}, '"dflash_config.spin" is unknown'),
        "windows": ({"layer_types": ["sliding_attention"] * 2}, "make them agree"),
    },
    "dspark": {
        "head type": ({"markov_head_type": "deep"}, "supported are vanilla, gated, rnn"),
        "rank": ({"markov_rank": 5}, r"markov_w1.weight .* has shape \[96, 6\]"),
        "no rank": ({"markov_rank": 0}, "needs a markov_rank above 0"),
        "below": ({"markov_rank": -1}, "must not be below 0"),
        "unknown": ({"dflash_config": {"spin": 3}}, '"dflash_config.spin" is unknown'),
    },
    "dflash2": {
        "groups": ({"dflash_config": {"conv_group_size": 7}}, "must divide the hidden size 48"),
        "candidates": ({"dflash_config": {"selector_top_k": 97}}, "above the 96 tokens"),
        "taps": ({"dflash_config": {"conv_kernel_size": 0}}, '"conv_kernel_size" must be above 0'),
        "softcap": ({"dflash_config": {"final_logit_softcapping": -1.0}}, "must be above 0"),
        "other taps": ({"dflash_config": {"conv_kernel_size": 2}}, r"has shape \[6, 48\]"),
    },
    "mtp": {
        "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens and the target has 96"),
        "width": ({"hidden_size": 64}, "reads features of 64 numbers and the target's have 48"),
        "unknown key": ({"spin": 3}, '"spin" is unknown'),
        "kind that is no text": ({"model_type": ["x"], "spin": 3}, '"spin" is unknown'),
        "shape": ({"intermediate_size": 72}, r"has shape \[80, 48\]"),
    },
    "gemma4_assistant": {
        "width": ({"backbone_hidden_size": 64}, "of 64 numbers and the target's have 48"),
        "unknown": ({"spin": 3}, '"spin" is unknown'),
        "untied": ({"tie_word_embeddings": False}, "only true is supported"),
        "centroids": (
            {"use_ordered_embeddings": True, "num_centroids": 7},
            "must divide the vocabulary of 96",
        ),
        "ordering": (
            {"use_ordered_embeddings": True, "num_centroids": 32},
            "token_ordering of 96",
        ),
    },
}
# Those within the text_config of an assistant.
TEXT_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens"),
    "head size": (
        {"global_head_dim": 32},
        "full attention read 2 heads of 32 numbers, and the target's cache has 2 of 16",
    ),
    "key heads": ({"num_global_key_value_heads": 1}, "read 1 heads of 16 numbers"),
    "rope": ({"rope_parameters": {FULL: ROPE}}, r"rope of theta 1e\+06 and kind default"),
    "partial rope": ({"rope_parameters": None}, "kind proportional"),
    "sliding": ({"layer_types": [SLIDING, FULL]}, "sliding .* target, which has none"),
    "kinds": ({"layer_types": [FULL]}, "has 1 layers, but num_hidden_layers is 2"),
    "unshared": ({"num_kv_shared_layers": 1}, "has no keys and values of its own"),
    "mixture": ({"enable_moe_block": True}, "enable_moe_block.* only false"),
    "per layer": ({"hidden_size_per_layer_input": 256}, "only 0 is supported"),
    "both ways": ({"use_bidirectional_attention": "all"}, "only causal targets"),
    "activation": ({"hidden_activation": "silu"}, "only .gelu_pytorch_tanh"),
    "heads": ({"num_attention_heads": 3}, "must be a multiple"),
    "window": ({"sliding_window": 0}, "sliding_window.* must be positive"),
    "listed": ({"per_layer_config": {"1": {"spin": 3}}}, "per_layer_config.* must give"),
    "spun": ({"rope_parameters": {FULL: {**ROPE, "rope_type": "spun"}}}, "only default, linear"),
    "turned": (
        {"rope_parameters": {FULL: {**ROPE, "partial_rotary_factor": 0.5}}},
        "only 1.0 is supported",
    ),
    "unknown within": ({"spin": 3}, '"text_config.spin" is unknown'),
}
CONFIGS["gemma4_assistant"] |= {
    name: ({"text_config": changes}, message) for name, (changes, message) in TEXT_CONFIGS.items()
}


@pytest.fixture(scope="module")
def fresh(
    tiny_target: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], Path]:
    """Copies a drafter of a method into a folder; each is written once."""
    written: dict[str, Path] = {}

    def copy(method: str, folder: Path) -> Path:
        if method not in written:
            options: dict[str, dict[str, Any]]
            options = {"eagle3": {"draft_vocab": 60}, "centroids": {"centroids": (16, 4)}}
            write: Callable[..., Path] = WRITERS.get(method, write_assistant)
            where = tmp_path_factory.mktemp("drafter")
            written[method] = write(where, tiny_target, **options.get(method, {}))
        folder.mkdir(exist_ok=True)
        for file in written[method].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copy


Fresh = Callable[[str, Path], Path]


@pytest.mark.parametrize(
    ("method", "name"), [(method, name) for method, cases in CONFIGS.items() for name in cases]
)
def test_a_config_that_does_not_fit(
    method: str, name: str, fresh: Fresh, tiny_target: str, tmp_path: Path
) -> None:
    changes, message = CONFIGS[method][name]
    folder = write_config(fresh(method, tmp_path), **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        make(tiny_target, folder)
    assert "\n" not in str(caught.value)


ONES = torch.ones(3)
TENSORS: list[tuple[str, str | None, dict[str, torch.Tensor], str]] = [
    ("eagle3", "d2t", {}, "without a tensor d2t it is unknown which"),
    ("eagle3", None, {"d2t": torch.arange(60) + 35}, "leads to token ids from 35 to 153, outside"),
    (
        "eagle3",
        None,
        {"d2t": 5 - 2 * torch.arange(60).clamp_max(2)},
        "does not lead to rising token ids",
    ),
    ("eagle3", "hidden_norm.weight", {}, r"no tensor model.layers.0.hidden_norm.weight"),
    ("eagle3", "lm_head.weight", {}, "no lm_head, and the target's has 96 rows"),
    ("eagle3", None, {"extra.weight": ONES}, r"does not use \(extra.weight\)"),
    (
        "eagle3",
        None,
        {"layers.0.hidden_norm.weight": torch.ones(48)},
        "same tensor under two names",
    ),
    (
        "p-eagle",
        "mask_hidden",
        {"mask_hidden": torch.ones(1, 1, 96)},
        r"mask_hidden has 96 numbers where .* have 144",
    ),
    ("p-eagle", "mask_hidden", {}, r"no tensor mask_hidden, .*; export it again"),
    ("dflash", "hidden_norm.weight", {}, r"no tensor hidden_norm.weight"),
    ("dflash", None, {"extra.weight": ONES}, r"does not use \(extra.weight\)"),
    ("dspark", "markov_head.markov_w1.weight", {}, r"no tensor markov_head.markov_w1.weight"),
    ("dspark", None, {"extra.weight": ONES}, r"does not use \(extra.weight\)"),
    ("dflash2", "candidate_selector.predecessor_codebook", {}, "no tensor candidate_selector.pred"),
    ("dflash2", "layers.0.mlp_conv.base_kernel", {}, "no tensor model.layers.0.mlp_conv.base_k"),
    ("mtp", None, {"mtp.extra.weight": ONES}, r"does not use \(mtp.extra.weight\)"),
    (
        "mtp",  # the queries come with a gate each, as in Qwen3-Next
        None,
        {"mtp.layers.0.self_attn.q_proj.weight": torch.ones(192, 48)},
        "has gated attention, which is not supported yet",
    ),
    ("centroids", "pre_projection.weight", {}, r"no tensor pre_projection.weight"),
    (
        "centroids",
        None,
        {"model.layers.0.self_attn.k_proj.weight": ONES},
        r"does not use \(model.layers.0.self_attn.k_proj",
    ),
    (
        "centroids",
        None,
        {"masked_embedding.token_ordering": torch.arange(96).clamp_min(1)},
        "must hold every token id once",
    ),
    (
        "centroids",
        None,
        {"masked_embedding.token_ordering": torch.arange(95)},
        r"needs a tensor .*token_ordering of 96 integers",
    ),
]


@pytest.mark.parametrize(
    ("method", "drop", "tensors", "message"), TENSORS, ids=[f"{it[0]}-{it[3]}" for it in TENSORS]
)
def test_tensors_that_do_not_fit(
    method: str,
    drop: str | None,
    tensors: dict[str, torch.Tensor],
    message: str,
    fresh: Fresh,
    tiny_target: str,
    tmp_path: Path,
) -> None:
    folder = edit(fresh(method, tmp_path), drop, **tensors)
    with pytest.raises(CheckpointError, match=message):
        make(tiny_target, folder)


@pytest.mark.parametrize("method", [method for method in WRITERS if method != "gemma4_assistant"])
def test_a_head_of_a_wider_target(method: str, tiny_target: str, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other", hidden_size=64)
    head = WRITERS[method](tmp_path / "head", other)
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, head)


ONE_WAY = "one way to draft; leave it out"
SHARED = "shares the target's embedding or lm_head"
OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("eagle", {"method": "eagle3"}, CheckpointError, "for method eagle3: .* it is one for eagle"),
    ("eagle", {"method": "mtp"}, CheckpointError, "for method mtp: .* it is one for eagle"),
    ("eagle", {"dtype": "bfloat16"}, UsageError, SHARED),
    ("eagle3", {"method": "p-eagle"}, CheckpointError, "method p-eagle: .* is one for eagle3"),
    ("eagle3", {"parallel_drafting": True}, UsageError, ONE_WAY),
    ("eagle3", {"method": "eagle3", "parallel_drafting": True}, UsageError, ONE_WAY),
    ("eagle3", {"dtype": "bfloat16"}, UsageError, SHARED),
    ("p-eagle", {"method": "eagle3"}, CheckpointError, "method eagle3: .* it is one for p-eagle"),
    (
        "p-eagle",
        {"parallel_drafting": False},
        UsageError,
        "drafts all tokens at once; leave it out, or choose",
    ),
    ("dflash", {"method": "eagle3"}, CheckpointError, "it is one for dflash"),
    ("dflash", {"num_speculative_tokens": 16}, UsageError, "at most 15 tokens a step"),
    ("dflash", {"parallel_drafting": False}, UsageError, "all tokens come from one pass; leave it"),
    ("dflash", {"dtype": "bfloat16"}, UsageError, SHARED),
    ("mtp", {"method": "eagle"}, CheckpointError, "for method eagle: .* it is one for mtp"),
    ("assistant", {"method": "eagle"}, CheckpointError, "it is one for gemma4_assistant"),
    (
        "assistant",
        {"dtype": "bfloat16"},
        UsageError,
        "an assistant reads the target's cache; leave dtype out",
    ),
    ("assistant", {"parallel_drafting": True}, UsageError, "parallel_drafting=True is not support"),
    ("draft_model", {"method": "eagle"}, CheckpointError, "it is one for draft_model"),
    ("draft_model", {"method": "mtp"}, CheckpointError, "for method mtp: .* one for draft_model"),
]


@pytest.mark.parametrize(("head", "options", "error", "message"), OPTIONS)
def test_options_that_do_not_fit(
    head: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    tiny_target: str,
    tiny_draft: str,
    tiny_heads: dict[str, str],
) -> None:
    with pytest.raises(error, match=message):
        make(tiny_target, {**tiny_heads, "draft_model": tiny_draft}[head], **options)


@pytest.mark.parametrize("method", ["eagle", "dflash", "gemma4_assistant"])
def test_a_head_needs_a_checkpoint(method: str, tiny_target: str) -> None:
    with pytest.raises(UsageError, match=f"method {method} needs model"):
        LLM(tiny_target, speculative_config={"method": method}, skip_tokenizer_init=True)


FP8, BFLOAT16 = {"quantization": "fp8"}, {"dtype": "bfloat16"}
HEADS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "eagle": ("eagle", {}, [FP8, {"dtype": "float32"}, {}]),
    "eagle3": ("eagle3", {"own_embedding": True}, [FP8, {"dtype": "float32"}, {}, BFLOAT16]),
    "p-eagle": ("p-eagle", {}, [FP8, BFLOAT16, {}]),
    "dflash": ("dflash", {"own_embedding": True, "own_head": True}, [FP8, BFLOAT16]),
    **{
        f"mtp-{style}": ("mtp", {"style": style}, [FP8, {"draft_sample_method": "greedy"}])
        for style in ("qwen", "deepseek", "speculators")
    },
}


@pytest.mark.parametrize("name", HEADS)
def test_dummy_weights_and_other_precisions(name: str, tmp_path: Path) -> None:
    """A config alone can be timed."""
    method, changes, precisions = HEADS[name]
    target = write_qwen3(tmp_path / "target", num_hidden_layers=6)
    head = WRITERS[method](tmp_path / "head", target, **changes)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    for options in precisions:
        assert engines.run(make(target, head, **options), params).metrics.num_drafts > 0
    for folder in (target, head):
        (folder / "model.safetensors").unlink()
    named = {"method": method}
    llm = engines.make(str(target), head, speculative=named, load_format="dummy")
    assert engines.run(llm, params).metrics.num_drafts > 0
