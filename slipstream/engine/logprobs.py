"""Log probabilities of the target's raw logits, or the logits, for requests that ask for them."""

from collections.abc import Callable, Sequence

import torch

from slipstream.core.batch import ScheduledRequest
from slipstream.core.outputs import Logprob
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.samples import Submission
from slipstream.engine.step_results import RatedRows, StepResult
from slipstream.models.tokenizer import Tokenizer
from slipstream.sampling.logits import TokenLogprobs

_PROMPT_SLICE = 64  # prompt rows whose logits are in memory at once


# (rows, a token of each, num_top, normalised) -> their log probabilities; see `Launcher.rate`.
Rate = Callable[[RatedRows, Sequence[int], int, bool], TokenLogprobs]


class LogprobReader:
    """Turns log probabilities into candidates by token id, with their texts.

    Args:
        normalised: false: candidates have logits where log probabilities are expected.
    """

    def __init__(self, rate: Rate, tokenizer: Tokenizer | None, normalised: bool = True) -> None:
        self._rate, self._tokenizer, self._normalised = rate, tokenizer, normalised

    def of_tokens(
        self, result: StepResult, index: int, token_ids: Sequence[int], params: SamplingParams
    ) -> list[dict[int, Logprob]]:
        """Candidates at every token that the request of batch index `index` gained."""
        rows, named = result.rows_of(index, len(token_ids)), params.logprob_token_ids
        if named is None:
            return self._read(rows, token_ids, params.logprobs or 0)
        return self._read(rows, token_ids, 0, named)

    def of_prompt(
        self, result: StepResult, index: int, token_ids: Sequence[int], first: int, num_top: int
    ) -> list[dict[int, Logprob]]:
        """Candidates at prompt tokens, whose predicting rows start at row `first` of the request.

        The logits are computed slice by slice, so a long prompt does not need them all at once.
        """
        start, rank = result.first_rows[index] + first, result.rank_of(index)
        read: list[dict[int, Logprob]] = []
        for offset in range(0, len(token_ids), _PROMPT_SLICE):
            chosen = token_ids[offset : offset + _PROMPT_SLICE]
            places = range(start + offset, start + offset + len(chosen))
            read.extend(self._read(RatedRows(True, places, rank), chosen, num_top))
        return read

    @torch.inference_mode()
    def take_prompt(
        self, submission: Submission, item: ScheduledRequest, result: StepResult, index: int
    ) -> None:
        """Add the prompt logprobs that request `index` of a step computed to its submission."""
        known, params = submission.prompt_logprobs, submission.params
        assert known is not None
        assert params.prompt_logprobs is not None
        first = len(known)  # the first position that is still to come
        last = min(item.start + item.num_new_tokens, len(submission.prompt_token_ids) - 1)
        if first <= last:
            tokens, row = submission.prompt_token_ids[first : last + 1], first - 1 - item.start
            known.extend(self.of_prompt(result, index, tokens, row, params.prompt_logprobs))

    def _read(
        self, rated: RatedRows, token_ids: Sequence[int], num_top: int, named: Sequence[int] = ()
    ) -> list[dict[int, Logprob]]:
        """Each token with the most likely alternatives, or with the named ones."""
        found = self._rate(rated, token_ids, num_top, self._normalised)
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
            others = self._rate(rated, [token] * len(token_ids), 0, self._normalised)
            every = zip(candidates, others.logprobs.tolist(), others.ranks.tolist(), strict=True)
            for row, logprob, rank in every:
                row.setdefault(token, Logprob(logprob, rank, self._text(token)))
        return candidates

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)
