"""P-EAGLE in the engine: every layout and flag against an oracle, one pass a round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import SamplingParams
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.drafter import Draft
from slipstream.speculative.p_eagle.network import PEagleDrafter, PEagleHead
from tests.drafters.broken import edit
from tests.drafters.engines import GREEDY, PROMPT, check_drafts, forced, make, run
from tests.drafters.heads import write_p_eagle
from tests.drafters.oracles import MASK
from tests.drafters.oracles import p_eagle_oracle as oracle
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
    "two_layers_read": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    "narrow": {"hidden_size": 32, "norm_before_fc": True},
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


# What they vary is varied by others too, with more.
LESS_TRIED = (
    *("midlayer", "model.layers.0", "one_layer"),
    *("shape_1n", "norm_before_residual", "norm_before_fc"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.full) if it in LESS_TRIED else it for it in LAYOUTS],
)
def test_every_draft_is_the_oracles(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_p_eagle(tmp_path, tiny_target, fit=False, **LAYOUTS[name])
    check_drafts(tiny_target, folder, oracle(folder, tiny_target), monkeypatch)


# No hidden state is reused, so `norm_output` has no effect.
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

        def counted_propose(drafter: PEagleDrafter, batch: DeviceBatch) -> Draft:
            self.inside = True
            draft = propose(drafter, batch)
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
    """Several requests, some near max_model_len, leave all other places of the cache unchanged."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    propose, checked = PEagleDrafter.propose, []

    def watched(drafter: PEagleDrafter, batch: DeviceBatch) -> Draft:
        # The last layer: the keys of a mask in the first one follow from its position alone.
        state, pages = drafter._state, drafter._cache.layers[-1][0]
        before, starts = pages.clone(), drafter._computed[batch.slots].tolist()
        draft = propose(drafter, batch)
        allowed = torch.zeros(pages.shape[0] * pages.shape[1], dtype=torch.bool)
        for row, slot in enumerate(batch.slots.tolist()):
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
