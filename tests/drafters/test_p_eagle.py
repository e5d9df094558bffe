"""P-EAGLE heads against an oracle in plain torch: layouts, flags, and what one pass does."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, CheckpointError, RequestOutput, SamplingParams, UsageError
from slipstream.cache.kv_cache import KVCache
from slipstream.engine.scheduler import Scheduler
from slipstream.kernels.table import AttentionInputs
from slipstream.models.drafters.head_checkpoint import HeadCheckpoint
from slipstream.models.drafters.p_eagle import PEagleHead, load_p_eagle, read_p_eagle_config
from slipstream.models.loading import LoadOptions
from slipstream.runner.turn import Turn
from slipstream.speculative.drafter import Draft
from slipstream.speculative.head_options import head_layout
from slipstream.speculative.mask_token import MASK_HEAD_KEYS
from slipstream.speculative.p_eagle import PEagleDrafter
from tests.checkpoints import write_qwen3
from tests.drafters.heads import MASK, as_pickle, as_wrapper, write_eagle3, write_p_eagle
from tests.drafters.oracles import PEagle, Target
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.drafters.test_bad_heads import edit, write_config
from tests.padded_steps import use_padded_steps

PROMPT = torch.randint(1, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3)
SEEDED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
K = 4
AUX = "eagle_aux_hidden_state_layer_ids"


def forced(count: int) -> dict[str, Any]:
    """Drafts are accepted to all lengths, by lot."""
    rates = [1 - (place + 1) / (count + 1) for place in range(count)]
    return {
        "num_speculative_tokens": count,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


def make(target: str, head: Path | str | None, **options: Any) -> LLM:
    speculative = None
    if head is not None:
        speculative = {"model": str(head), "num_speculative_tokens": K}
        speculative |= options.pop("speculative", {})
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def oracle(folder: Path, target: str, mask: int = MASK, **flags: Any) -> PEagle:
    return PEagle(folder, Target(target), mask, **flags)


def check(
    target: str, folder: Path, head: PEagle, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """32 steps and more, whatever was accepted."""
    drafted = record_drafts(monkeypatch)
    speculative = {**forced(options.pop("count", K)), **options.pop("speculative", {})}
    llm = make(target, folder, speculative=speculative, **options)
    assert llm.engine.resolved.method == "p-eagle"
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    output = run(llm, params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:32], head)


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "midlayer": {"naming": "midlayer."},
    "model.layers.0": {"prefix": "model."},
    "one_layer": {"num_hidden_layers": 1},
    "four_layers": {"num_hidden_layers": 4},
    "reduced": {"draft_vocab": 60},
    "shared_embedding": {"own_embedding": False},
    "shared_head": {"own_head": False},
    "shape_1n": {"mask_shape": "[1, N]"},
    "shape_n": {"mask_shape": "[N]"},
    "qk_norm": {"qk_norm": True, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "rope": {"rope_theta": 500.0},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "no_aux": {"use_aux_hidden_state": False},
    "two_layers_read": {AUX: [1, 2]},
    "specforge": {"architectures": ["PEagleDraftModel"], "num_depths": 8},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_draft_is_the_oracles(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, **LAYOUTS[name])
    check(tiny_target, folder, oracle(folder, tiny_target), monkeypatch)


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16}, {"block_size": 8}])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_chunks_blocks_and_padding_leave_the_drafts_as_they_are(
    count: int,
    options: dict[str, Any],
    steps: str,
    tiny_target: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if steps == "padded":
        use_padded_steps(monkeypatch)
    folder = Path(tiny_heads["p-eagle"])
    head = oracle(folder, tiny_target)
    check(tiny_target, folder, head, monkeypatch, count=count, max_num_seqs=1, **options)


# Nothing is recycled, so `norm_output` changes nothing.
FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "rope_theta": 500.0}


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_drafts(flag: str, tiny_target: str, tmp_path: Path) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, **{flag: FLAGS[flag]})
    other = {flag: 10000.0 if flag == "rope_theta" else False}
    with_flag = oracle(folder, tiny_target).drafts(PROMPT, 3)[1]
    without = oracle(folder, tiny_target, **other).drafts(PROMPT, 3)[1]
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(with_flag, without, strict=True))


def test_mask_token_and_mask_hidden_change_the_masks_drafts_alone(
    tiny_target: str, tmp_path: Path
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    ours = oracle(folder, tiny_target).drafts(PROMPT, 3)[1]
    other_token = oracle(folder, tiny_target, mask=MASK + 1).drafts(PROMPT, 3)[1]
    vector = load_file(folder / "model.safetensors")["mask_hidden"]
    edit(folder, "mask_hidden", mask_hidden=vector.flip(-1).contiguous())
    other_vector = oracle(folder, tiny_target).drafts(PROMPT, 3)[1]
    for theirs in (other_token, other_vector):
        differences = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
        assert differences[0] == 0
        assert min(differences[1:]) > 1e-2


# ---------------------------------------------------------------------- the network by itself


def load_network(folder: Path, target: str) -> PEagleHead:
    checkpoint = HeadCheckpoint(folder)
    config = read_p_eagle_config(checkpoint, MASK_HEAD_KEYS)
    width = Target(target).embedding.shape[1]
    options = LoadOptions(torch.float32, torch.device("cpu"), "auto", max_positions=256)
    return load_p_eagle(checkpoint, config, width, options)


class Request:
    """One request's blocks, and passes of a network over its rows."""

    def __init__(self, network: PEagleHead, folder: Path) -> None:
        layers = read_p_eagle_config(HeadCheckpoint(folder), MASK_HEAD_KEYS).head.layers
        layout = head_layout(layers, torch.float32)
        self.network, self.cache = network, KVCache(layout, 8, 8, torch.device("cpu"))
        for pages in (pages for layer in self.cache.layers for pages in layer):
            pages.zero_()

    def rows(self, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """The rows of tokens from position `start` on."""
        end = start + len(tokens)
        positions = torch.arange(start, end)
        inputs = AttentionInputs(
            query_start=torch.tensor([0, len(tokens)]),
            context_lens=torch.tensor([end]),
            block_tables=torch.arange(8, dtype=torch.int32).unsqueeze(0),
            positions=positions,
            slots=positions,
            first_seen=1,
        )
        ids = torch.tensor(tokens, dtype=torch.int32)
        return self.network(ids, features, inputs, self.cache.layers)[0]


def test_one_pass_over_many_rows_equals_single_rows(tiny_target: str, tmp_path: Path) -> None:
    """Known tokens and masks alike; row by row, in two halves, and all at once."""
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, draft_vocab=60)
    network, head = load_network(folder, tiny_target), oracle(folder, tiny_target)
    tokens, features = head.masked(PROMPT[:20], 5)
    whole = Request(network, folder).rows(tokens, features, 1)
    for size in (1, 7, 12):
        request = Request(network, folder)
        parts = [
            request.rows(tokens[start : start + size], features[start : start + size], 1 + start)
            for start in range(0, len(tokens), size)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(network.mask_feature(), features[-1:], atol=1e-5, rtol=0)


# ---------------------------------------------------------------------- one pass a round


class Passes:
    """Counts the network's passes in rounds that drafted, and the rows of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds, self.rows = 0, [0]
        self.inside = False
        propose, forward = PEagleDrafter.propose, PEagleHead.__call__

        def counted_propose(drafter: PEagleDrafter, turn: Turn) -> Draft:
            self.inside = True
            draft = propose(drafter, turn)
            self.inside = False
            self.rounds += int(draft.num_tokens.sum()) > 0
            return draft

        def counted(network: PEagleHead, token_ids: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            if self.inside:
                self.rows.append(len(token_ids))
            return forward(network, token_ids, *args)

        monkeypatch.setattr(PEagleDrafter, "propose", counted_propose)
        monkeypatch.setattr(PEagleHead, "__call__", counted)

    @property
    def number(self) -> int:
        return len(self.rows) - 1


@pytest.mark.parametrize("count", [1, 3, 8, 15])
def test_a_round_is_one_pass_whatever_k(
    count: int, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(monkeypatch)
    llm = make(tiny_target, tiny_heads["p-eagle"], speculative=forced(count))
    run(llm, GREEDY)
    assert passes.number == passes.rounds > 0
    assert max(passes.rows) <= 2 * count


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_only_rows_that_mean_something_are_written(
    steps: str, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several requests, also of those that near max_model_len; nowhere else in the cache."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    propose, checked = PEagleDrafter.propose, []

    def watched(drafter: PEagleDrafter, turn: Turn) -> Draft:
        # The last layer: the keys of a mask in the first one follow from its position alone.
        state, pages = drafter._state, drafter._cache.layers[-1][0]
        before, starts = pages.clone(), drafter._computed[turn.slots].tolist()
        draft = propose(drafter, turn)
        allowed = torch.zeros(pages.shape[0] * pages.shape[1], dtype=torch.bool)
        for row, slot in enumerate(turn.slots.tolist()):
            wanted = int(draft.num_tokens[row])
            if wanted:
                end = int(state.num_tokens[slot]) + wanted - 1
                assert end < state.max_model_len
                places = torch.arange(starts[row], end)
                blocks = state.block_tables[slot, places // state.block_size].long()
                allowed[blocks * state.block_size + places % state.block_size] = True
                checked.append(end)
        changed = (pages != before).flatten(2).any(-1).flatten()
        assert torch.equal(changed, allowed)
        return draft

    monkeypatch.setattr(PEagleDrafter, "propose", watched)
    llm = make(
        tiny_target,
        tiny_heads["p-eagle"],
        speculative=forced(7),
        max_model_len=56,
        block_size=8,
        max_num_seqs=4,
    )
    prompts = [{"prompt_token_ids": PROMPT[index : 20 + 3 * index]} for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for output in llm.generate(prompts, params):
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 56
    assert max(checked) == 54


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_more_requests_times_k_than_rows_of_the_target(
    steps: str, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's pass has up to 2K rows a request, the target's budget is a tenth of that."""
    prompts = [{"prompt_token_ids": [index, *PROMPT[:9]]} for index in range(1, 9)]
    expected = make(tiny_target, None).generate(prompts, GREEDY)
    if steps == "padded":
        use_padded_steps(monkeypatch)
    llm = make(
        tiny_target,
        tiny_heads["p-eagle"],
        speculative={"num_speculative_tokens": 15},
        max_num_batched_tokens=24,
        max_num_seqs=8,
        num_kv_blocks=200,
    )
    for ours, theirs in zip(llm.generate(prompts, GREEDY), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("pause", [1, 3, 4, 5, 6, 14])
def test_drafting_goes_on_rightly_after_a_pause(
    pause: int,
    steps: str,
    tiny_target: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K = 0 for some steps: features wait, and are computed when there is no room for more."""
    folder = Path(tiny_heads["p-eagle"])
    expected = run(make(tiny_target, None), GREEDY).outputs[0].token_ids
    if steps == "padded":
        use_padded_steps(monkeypatch)
    llm = make(tiny_target, folder)
    drafted, calls = record_drafts(monkeypatch), iter(range(1000))
    most_drafts = Scheduler._most_drafts

    def paused(self: Scheduler, *args: Any, **kwargs: Any) -> int:
        count = most_drafts(self, *args, **kwargs)
        return 0 if 3 <= next(calls) < 3 + pause else count

    monkeypatch.setattr(Scheduler, "_most_drafts", paused)
    assert run(llm, GREEDY).outputs[0].token_ids == expected
    known = [len(item.known) for item in drafted]
    assert max(after - before for before, after in pairwise(known)) > pause
    assert_drafts_are(drafted, oracle(folder, tiny_target))


# ---------------------------------------------------------------------- requests that come and go


@pytest.mark.parametrize("length", [33, 34, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    length: int, rows: int, tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    """With block_size 8 a prompt of 33 leaves one token to compute, one of 34 two."""
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(
        tiny_target,
        tiny_heads["p-eagle"],
        block_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=rows,
    )
    cold, warm = run(llm, SEEDED, prompt), run(llm, SEEDED, prompt)
    assert cold.metrics.num_cached_tokens == 0
    assert warm.metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert warm.metrics.num_accepted_tokens_per_pos == cold.metrics.num_accepted_tokens_per_pos
    assert warm.metrics.num_drafts == cold.metrics.num_drafts
    assert cold.metrics.num_accepted_tokens > 0


def test_drafts_behind_a_hit_on_a_drafted_text_are_the_oracles(
    tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that masks had written, and blocks of a request of another next token."""
    folder = Path(tiny_heads["p-eagle"])
    llm = make(tiny_target, folder, block_size=8)
    first = run(llm, GREEDY)
    drafted = record_drafts(monkeypatch)
    longer = [*PROMPT, *first.outputs[0].token_ids]
    assert run(llm, GREEDY, [*longer, 5]).metrics.num_cached_tokens == (len(longer) - 1) // 8 * 8
    assert run(llm, GREEDY, [*longer[:20], 7, 7, 7]).metrics.num_cached_tokens == 16
    assert_drafts_are(drafted, oracle(folder, tiny_target))


def test_preempted_requests_draft_what_the_oracle_drafts(
    tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tiny_heads["p-eagle"])
    prompts = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(4)]
    llm = make(tiny_target, folder, num_kv_blocks=18, block_size=8, max_num_seqs=4)
    drafted = record_drafts(monkeypatch)
    outputs = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_drafts_are(drafted, oracle(folder, tiny_target))


@pytest.mark.parametrize("length", [40, 41, 48])
def test_nothing_goes_beyond_max_model_len(
    length: int, tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    plain = run(make(tiny_target, None, max_model_len=length), params, PROMPT[:9])
    options: dict[str, Any] = {"speculative": {"num_speculative_tokens": 7}}
    llm = make(tiny_target, tiny_heads["p-eagle"], max_model_len=length, **options)
    drafted = run(llm, params, PROMPT[:9])
    assert 9 + len(drafted.outputs[0].token_ids) == length
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_beyond_the_drafters_max_model_len_nothing_is_drafted(
    tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    llm = make(tiny_target, tiny_heads["p-eagle"], speculative={"max_model_len": 20})
    output = run(llm, GREEDY, PROMPT[:9])
    plain = run(make(tiny_target, None), GREEDY, PROMPT[:9])
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.num_draft_tokens > 0
    assert run(llm, GREEDY).metrics.num_drafts == 0


def test_requests_may_ask_for_fewer_draft_tokens(
    tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    llm = make(tiny_target, tiny_heads["p-eagle"], block_size=8)
    each = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, num_speculative_tokens=count)
        for count in (0, 1, K)
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 3, each)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [len(out.metrics.num_accepted_tokens_per_pos) for out in outputs] == [0, 1, K]


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("key", ["ptd_token_id", "pard_token", "mask_token_id"])
@pytest.mark.parametrize("pickled", [False, True])
def test_where_the_mask_token_stands(
    key: str, pickled: bool, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, mask_key=key, fit=False)
    head = oracle(folder, tiny_target)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, as_pickle(folder) if pickled else folder)
    run(llm, GREEDY)
    assert_drafts_are(drafted, head)
    assert drafted


def test_the_mask_token_may_be_given(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trainer does not write it down."""
    folder = write_p_eagle(tmp_path, tiny_target, mask_key=None, fit=False)
    with pytest.raises(UsageError, match=r"has no pard_token; give it as pard_token$"):
        make(tiny_target, folder)
    drafted = record_drafts(monkeypatch)
    run(make(tiny_target, folder, speculative={"pard_token": 77}), GREEDY)
    assert_drafts_are(drafted, oracle(folder, tiny_target, mask=77))


def test_a_speculators_wrapper_is_the_same_head(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings its own K, which it was trained for."""
    folder = write_p_eagle(
        tmp_path,
        tiny_target,
        draft_vocab=60,
        norm_before_residual=True,
        mask_key="mask_token_id",
    )
    head = oracle(folder, tiny_target)
    as_wrapper(folder, speculators_model_type="peagle", architectures=["PEagleSpeculator"])
    llm = LLM(
        tiny_target,
        speculative_config={"model": str(folder)},
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    assert llm.engine.resolved.limits.num_speculative_tokens == 3
    check(tiny_target, folder, head, monkeypatch, count=3)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"parallel_drafting": True},
        {"method": "eagle3", "parallel_drafting": True},
        {"method": "p-eagle"},
        {"method": "p_eagle"},
        {"method": "peagle"},
    ],
    ids=str,
)
def test_the_method_has_the_spellings_of_the_field(
    config: dict[str, Any], tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    llm = make(tiny_target, tiny_heads["p-eagle"], speculative=config)
    assert llm.engine.resolved.method == "p-eagle"
    assert run(llm, GREEDY).metrics.num_accepted_tokens > 0


def test_other_methods_are_not_mixed_up(
    tiny_target: str, tiny_heads: dict[str, str], tmp_path: Path
) -> None:
    chain, parallel = tiny_heads["eagle3"], tiny_heads["p-eagle"]
    with pytest.raises(CheckpointError, match=r"for method eagle3: .* it is one for p-eagle"):
        make(tiny_target, parallel, speculative={"method": "eagle3"})
    with pytest.raises(CheckpointError, match=r"for method p-eagle: .* it is one for eagle3"):
        make(tiny_target, chain, speculative={"method": "p-eagle"})
    with pytest.raises(UsageError, match="drafts in a chain; leave it out"):
        make(tiny_target, chain, speculative={"method": "eagle3", "parallel_drafting": True})
    with pytest.raises(UsageError, match="drafts all tokens at once; leave it out, or choose"):
        make(tiny_target, parallel, speculative={"parallel_drafting": False})
    head = write_eagle3(tmp_path, tiny_target, mask_token_id=None)
    assert make(tiny_target, head).engine.resolved.method == "eagle3"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "aux out of range": ({AUX: [0, 1, 3]}, "target of 2 layers has those of 0 to 2"),
    "vocabulary": ({"vocab_size": 99}, "vocabulary of 99 tokens"),
    "target width": ({"target_hidden_size": 64}, "target of hidden size 64, and this one has 48"),
    "mask of no token": ({"ptd_token_id": 96}, "mask token 96 is none of the 96 ids"),
    "mask of no number": ({"ptd_token_id": "x"}, '"ptd_token_id" must be a whole number'),
    "unknown key": ({"spin": 3}, '"spin" is unknown'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit(name: str, tiny_target: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    with pytest.raises(CheckpointError, match=message):
        make(tiny_target, write_config(folder, **changes))


def test_a_mask_hidden_that_is_missing_or_too_short(tiny_target: str, tmp_path: Path) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    edit(folder, "mask_hidden", mask_hidden=torch.ones(1, 1, 96))
    with pytest.raises(CheckpointError, match=r"mask_hidden has 96 numbers where .* have 144"):
        make(tiny_target, folder)
    edit(folder, "mask_hidden")
    with pytest.raises(CheckpointError, match=r"no tensor mask_hidden, .*; export it again"):
        make(tiny_target, folder)


def test_a_head_of_a_wider_target(tiny_target: str, tmp_path: Path) -> None:
    other = write_qwen3(tmp_path / "other", hidden_size=64)
    head = write_p_eagle(tmp_path / "head", other, fit=False)
    with pytest.raises(CheckpointError, match=r"cannot draft for .* another target"):
        make(tiny_target, head)


def test_more_draft_tokens_than_a_head_supports(
    tiny_target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, num_depths=5, mask_key="mask_token_id")
    make(tiny_target, folder, speculative={"num_speculative_tokens": 5})
    with pytest.raises(UsageError, match="guesses at most 5 tokens a step; lower"):
        make(tiny_target, folder, speculative={"num_speculative_tokens": 6})
    write_config(folder, num_depths="drop")
    as_wrapper(folder, speculators_model_type="peagle", norm_before_residual=False)
    with caplog.at_level(logging.WARNING, "slipstream"):
        make(tiny_target, folder, speculative={"num_speculative_tokens": 3})
        assert not caplog.messages
        make(tiny_target, folder, speculative={"num_speculative_tokens": 4})
    assert "was trained for 3 tokens at once and is asked for 4" in caplog.text


def test_dummy_weights_and_other_precisions(tmp_path: Path) -> None:
    """A config alone can be timed."""
    target = write_qwen3(tmp_path / "target", num_hidden_layers=6)
    head = write_p_eagle(tmp_path / "head", target, fit=False)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
    for extra in ({"quantization": "fp8"}, {"dtype": "bfloat16"}, {}):
        output = run(make(str(target), head, speculative=extra), params)
        assert output.metrics.num_drafts > 0
    for folder in (target, head):
        (folder / "model.safetensors").unlink()
    llm = make(str(target), head, load_format="dummy")
    assert run(llm, params).metrics.num_drafts > 0


def test_an_embedding_of_its_own_is_never_the_targets(tiny_target: str, tmp_path: Path) -> None:
    """It is trained: its row of the mask token means something else than the target's."""
    folder = write_p_eagle(tmp_path, tiny_target, fit=False)
    own = load_file(folder / "model.safetensors")
    network, target = load_network(folder, tiny_target), Target(tiny_target)
    weights = {**own, "embed_tokens.weight": target.embedding.clone()}
    row = target.embedding[MASK] + 0.01
    weights["embed_tokens.weight"][MASK] = row
    save_file(weights, folder / "model.safetensors")
    network = load_network(folder, tiny_target)

    class Other:
        weight = target.embedding

    network.share(Other(), None)  # type: ignore[arg-type]
    assert torch.equal(network._ends.embedded(torch.tensor([MASK]))[0], row)
