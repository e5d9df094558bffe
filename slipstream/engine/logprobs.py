"""Log probabilities of the target's raw logits, or the logits, for requests that ask for them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.core.batch import ScheduledRequest
from slipstream.core.outputs import Logprob
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.samples import Submission
from slipstream.engine.step_results import StepResult
from slipstream.models.tokenizer import Tokenizer
from slipstream.runner.model_runner import Forward
from slipstream.sampling.logits import token_logprobs

_PROMPT_SLICE = 64  # prompt rows whose logits are in memory at once


class LogprobReader:
    """Turns rows of logits into candidates by token id, with their texts.

    Args:
        logits: those of some rows of a pass; see `Step.logits`.
        normalised: false: candidates have logits where log probabilities are expected.
    """

    def __init__(
        self,
        logits: Callable[[Forward, int, int], Tensor],
        tokenizer: Tokenizer | None,
        normalised: bool = True,
    ) -> None:
        self._logits, self._tokenizer, self._normalised = logits, tokenizer, normalised

    def of_tokens(
        self, result: StepResult, index: int, token_ids: Sequence[int], params: SamplingParams
    ) -> list[dict[int, Logprob]]:
        """Candidates at every token that the request of batch index `index` gained."""
        logits, named = result.logits_of(index, len(token_ids)), params.logprob_token_ids
        if named is None:
            return self._read(logits, token_ids, params.logprobs or 0)
        return self._read(logits, token_ids, 0, named)

    def of_prompt(
        self, result: StepResult, index: int, token_ids: Sequence[int], first: int, num_top: int
    ) -> list[dict[int, Logprob]]:
        """Candidates at prompt tokens, whose predicting rows start at row `first` of the request.

        The logits are computed slice by slice, so a long prompt does not need them all at once.
        """
        start = result.forward.layout.row_starts[index] + first
        read: list[dict[int, Logprob]] = []
        for offset in range(0, len(token_ids), _PROMPT_SLICE):
            chosen = token_ids[offset : offset + _PROMPT_SLICE]
            logits = self._logits(result.forward, start + offset, len(chosen))
            read.extend(self._read(logits, chosen, num_top))
        return read

    @torch.inference_mode()
    def take_prompt(
        self, submission: Submission, item: ScheduledRequest, result: StepResult, index: int
    ) -> None:
        """Give a request whose prompt is asked for too what request `index` of a step computed."""
        known, params = submission.prompt_logprobs, submission.params
        assert known is not None
        assert params.prompt_logprobs is not None
        first = len(known)  # the first position that is still to come
        last = min(item.start + item.num_new_tokens, len(submission.prompt_token_ids) - 1)
        if first <= last:
            tokens, row = submission.prompt_token_ids[first : last + 1], first - 1 - item.start
            known.extend(self.of_prompt(result, index, tokens, row, params.prompt_logprobs))

    def _read(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int, named: Sequence[int] = ()
    ) -> list[dict[int, Logprob]]:
        """Each token with its strongest rivals, or with the named ones."""
        chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        found = token_logprobs(logits, chosen, num_top, self._normalised)
        rows = zip(
            token_ids,
            found.logprobs.tolist(),
            found.ranks.tolist(),
            found.top_ids.tolist(),
            found.top_logprobs.tolist(),
            strict=True,
        )
        candidates: list[dict[int, Logprob]] = []
        for token, logprob, rank, top_ids, top_logprobs in rows:
            row = {token: Logprob(logprob, rank, self._text(token))}
            for place, (rival, rival_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True)):
                row.setdefault(rival, Logprob(rival_logprob, place + 1, self._text(rival)))
            candidates.append(row)
        for token in named:
            others = token_logprobs(logits, torch.full_like(chosen, token), 0, self._normalised)
            every = zip(candidates, others.logprobs.tolist(), others.ranks.tolist(), strict=True)
            for row, logprob, rank in every:
                row.setdefault(token, Logprob(logprob, rank, self._text(token)))
        return candidates

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)
