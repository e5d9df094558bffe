"""What leaves a verified tree has exactly the target's distribution, within a step and across.

The loop and the statistics are those of `test_verifier_distribution.py`; drafts are trees whose
siblings the drafter likes for reasons of its own: its q is far from p.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.sampling_params import SamplingParams
from slipstream.kernels.sampling import SampleRows
from slipstream.sampling import verification
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import DraftedTrees, TreeNodes, Verdict, verify_trees
from tests.lossless.test_verifier_distribution import (
    BIAS,
    DEVICE,
    DRAFT,
    LENGTH,
    NUCLEUS,
    NUM_REQUESTS,
    PENALTIES,
    PROMPT,
    TARGET,
    Emitted,
    across_p_value,
    exact_conditionals,
    joint_p_values,
    oracle,
    requests,
    restart,
)

ROUNDS, ROUNDS_BROKEN = 24, 16
SIBLINGS, BRANCHES = ((0, 0), (1, 0)), ((0, 0), (1, 0), (0, 1), (2, 1), (1, 2), (0, 4))


@dataclass(frozen=True)
class Case:
    """A tree, as (rank, parent) of nodes 1, 2 ..., and how to sample.

    `q` are the drafter's scores, [last token, next token]; `ragged`: a request has as many nodes as
    its number says.
    """

    tree: tuple[tuple[int, int], ...]
    params: dict[str, Any] = field(default_factory=dict)
    q: Tensor = DRAFT
    ragged: bool = False

    @property
    def parents(self) -> list[int]:
        return [0, *(parent for _, parent in self.tree)]

    @property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def lengths(self) -> list[int]:
        most = len(self.tree)
        return [n % (most + 1) if self.ragged else most for n in range(NUM_REQUESTS)]

    def nodes(self) -> TreeNodes:
        words = [1]
        for node, parent in enumerate(self.parents[1:], 1):
            words.append(words[parent] | 1 << node)
        parents, depths, ancestors = (
            torch.tensor(numbers, device=DEVICE).expand(NUM_REQUESTS, -1)
            for numbers in (self.parents, self.depths, words)
        )
        return TreeNodes(parents, depths, ancestors, max(self.depths))


def step(case: Case, state: SamplingState, last: Tensor, positions: Tensor) -> Verdict:
    tokens = [last]
    for rank, parent in case.tree:
        tokens.append(case.q[tokens[parent]].argsort(-1, descending=True)[:, rank])
    lengths = case.lengths()
    slots = torch.arange(NUM_REQUESTS, device=DEVICE)
    trees = DraftedTrees(
        nodes=case.nodes(),
        slots=slots,
        positions=positions,
        token_ids=torch.stack(tokens[1:], 1),
        num_nodes=torch.tensor(lengths, device=DEVICE),
        most_accepted=torch.full_like(slots, len(case.tree)),
        num_rows=sum(lengths) + NUM_REQUESTS if case.ragged else None,
    )
    layout = SampleRows.build(
        slots, positions, trees.token_ids, trees.num_nodes, slots > 0, num_rows=trees.num_rows
    )
    last = torch.stack(tokens, 1)[layout.request, layout.offset]
    uses = state.uses([0])
    verdict = verify_trees(TARGET[last], trees, state, uses)
    state.commit(slots, verdict.token_ids, verdict.num_tokens, uses)
    return verdict


def run(case: Case, rounds: int) -> Emitted:
    state, parts = requests(case.params), []
    width = len(case.tree) + 1
    for number in range(rounds):
        restart(state, number)
        tokens = torch.full((NUM_REQUESTS, LENGTH + 2 * width), -1, device=DEVICE)
        length = torch.zeros(NUM_REQUESTS, dtype=torch.int64, device=DEVICE)
        last = torch.full((NUM_REQUESTS,), PROMPT[-1], device=DEVICE)
        verdicts: list[Verdict] = []
        while len(verdicts) < 2 or int(length.min()) < LENGTH:
            verdict = step(case, state, last, length + len(PROMPT))
            places = length.unsqueeze(1) + torch.arange(width, device=DEVICE)
            tokens.scatter_(1, places.clamp_max(tokens.shape[1] - 1), verdict.token_ids)
            last = verdict.token_ids.gather(1, verdict.num_tokens.unsqueeze(1) - 1).squeeze(1)
            length += verdict.num_tokens
            verdicts.append(verdict)
        parts.append((tokens.cpu(), verdicts[0]))
    accepted = sum(int((verdict.num_accepted > 0).sum()) for _, verdict in parts)
    drafted = sum(length > 0 for length in case.lengths()) * rounds
    return Emitted(
        tokens=torch.cat([tokens[:, :LENGTH] for tokens, _ in parts]),
        first_step=torch.cat([verdict.num_tokens.cpu() for _, verdict in parts]),
        after=torch.cat([tokens[:, : width + 1] for tokens, _ in parts]),
        accepted=accepted,
        drafted=drafted,
    )


def p_values(case: Case, rounds: int) -> tuple[list[float], Emitted]:
    emitted = run(case, rounds)
    conditionals = exact_conditionals(
        SamplingParams(**case.params), max(LENGTH - 1, max(case.depths) + 1)
    )
    return [*joint_p_values(emitted, conditionals), across_p_value(emitted, conditionals)], emitted


CASES = {
    "two siblings": Case(SIBLINGS),
    "two siblings that the target hardly likes": Case(SIBLINGS, q=-TARGET),
    "two siblings, top_p": Case(SIBLINGS, NUCLEUS, q=-TARGET),
    "branches": Case(BRANCHES),
    "branches, ragged": Case(BRANCHES, ragged=True),
    "branches that the target hardly likes": Case(BRANCHES, q=-TARGET),
    "branches, penalties": Case(BRANCHES, PENALTIES),
    "branches, everything, ragged": Case(
        BRANCHES,
        {**PENALTIES, **BIAS, "temperature": 1.4, "top_k": 6, "min_p": 0.02},
        ragged=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_lossless(name: str) -> None:
    case = CASES[name]
    values, emitted = p_values(case, ROUNDS)
    p = oracle(TARGET[PROMPT[-1]].double().cpu().numpy(), SamplingParams(**case.params), PROMPT)
    liked = case.q[PROMPT[-1]].argsort(descending=True).tolist()
    if not case.ragged:  # a child is accepted with its probability under the target
        rate = sum(float(p[liked[rank]]) for rank, parent in case.tree if parent == 0)
        error = (rate * (1 - rate) / emitted.drafted) ** 0.5
        assert emitted.accepted / emitted.drafted == pytest.approx(rate, abs=5 * error + 1e-9)
    assert min(values) > 0.001, values


def one_noise_for_all_depths(trees: DraftedTrees, rows: SampleRows) -> SampleRows:
    rows.positions.copy_(trees.positions[0])
    return rows


def forget_the_way(trees: DraftedTrees, rows: SampleRows) -> SampleRows:
    rows.draft_tokens.zero_()
    return rows


Breaks = Callable[[DraftedTrees, SampleRows], SampleRows]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is broken is plain torch")
@pytest.mark.parametrize(
    ("breaks", "case"),
    [(one_noise_for_all_depths, Case(BRANCHES)), (forget_the_way, Case(BRANCHES, PENALTIES))],
)
def test_a_broken_verifier_is_found(
    breaks: Breaks, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of = verification._node_rows

    def broken(trees: DraftedTrees, *args: Any) -> SampleRows:
        return breaks(trees, rows_of(trees, *args))

    monkeypatch.setattr(verification, "_node_rows", broken)
    values, _ = p_values(case, ROUNDS_BROKEN)
    assert min(values) < 1e-9
