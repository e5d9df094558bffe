"""P-EAGLE in the engine: every layout and flag against an oracle, one pass a round."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.models.drafters.p_eagle import PEagleHead
from slipstream.runner.turn import Turn
from slipstream.speculative.drafter import Draft
from slipstream.speculative.p_eagle import PEagleDrafter
from tests.drafters.heads import MASK, write_p_eagle
from tests.drafters.p_eagle_engines import (
    AUX,
    GREEDY,
    PROMPT,
    SEEDED,
    K,
    check,
    forced,
    make,
    oracle,
    run,
)
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.drafters.test_bad_heads import edit
from tests.padded_steps import use_padded_steps

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
    "specforge": {"architectures": ["PEagleDraftModel"], "norm_before_residual": True},
    "nemo": {
        "architectures": ["LlamaEagle3DraftModel"],
        "prefix": "model.",
        "mask_key": "mask_token_id",
        "mask_shape": "[1, N]",
        "parallel_drafting": True,
        "num_depths": 8,
        "down_sample_ratio": 0.7,
        "down_sample_ratio_min": 0.2,
        "num_draft_layers": 2,
    },
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
