"""The endpoint /v1/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.prompts import EncodedPrompt, Prompt
from slipstream.serve.answer import ChoicesAnswer, check_stream_fields
from slipstream.serve.errors import bad_request
from slipstream.serve.fill_in import fill_in
from slipstream.serve.logprobs_format import (
    TokenFields,
    completion_logprobs,
    prompt_logprobs,
    read_tokens,
    speculation,
)
from slipstream.serve.model_service import ModelService
from slipstream.serve.prompt_fields import placed, truncation
from slipstream.serve.protocol.base import MOST_INT
from slipstream.serve.protocol.completions import CompletionRequest
from slipstream.serve.sampling import logit_bias, sampling_params, structured_output
from slipstream.serve.token_texts import TokenReader, TokenTexts
from slipstream.serve.updates import Candidates, Delta, RequestUpdate, join_deltas

_DEFAULT_MAX_TOKENS = 16
_NOTHING: Sequence[Candidates | None] = ()
_NO_OUTPUT = Delta(0, "", [], [], [], "length", None)


class CompletionEndpoint:
    """Handles POST /v1/completions."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def answer(self, body: CompletionRequest) -> Response:
        """Continue prompts, whole or streamed."""
        service, prompts, n = self._service, _prompts(body), body.n or 1
        service.thread.check_room(len(prompts) * n)
        params, encoded = await service.workers(self._prepare, body, prompts)
        choices = [
            _Choice(service, body, place * n + sample, prompt)
            for place, prompt in enumerate(encoded)
            for sample in range(n)
        ]
        answer = _CompletionAnswer(service, body, encoded, choices, body.max_tokens != 0)
        # Without output and logprobs there is only an echo.
        return await answer.response(
            params, body.max_tokens != 0 or params.prompt_logprobs is not None
        )

    def _prepare(
        self, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> tuple[SamplingParams, list[EncodedPrompt]]:
        """Validate the request and tokenize its prompts; slow for large requests."""
        _check(body)
        self._service.require_logprobs(body.logprobs, "logprobs")
        self._service.require_logprobs(body.prompt_logprobs, "prompt_logprobs")
        service, params = self._service, _params(self._service, body)
        cut = truncation(body, params.max_tokens, service.max_model_len)
        special = body.add_special_tokens is not False
        if body.suffix:
            service.require_short([*prompts, body.suffix])
            prompts = [fill_in(it, body.suffix, service.tokenizer, special) for it in prompts]
        found = service.encode(prompts, params, special, truncation=cut)
        encoded = [placed(it, body, service.adapter(body.model)) for it in found]
        self._service.require_room(encoded, body.max_tokens, "max_tokens")
        return params, encoded


class _CompletionAnswer(ChoicesAnswer["_Choice"]):
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    _body: CompletionRequest

    def _deltas(self, place: int, update: RequestUpdate) -> Iterator[tuple["_Choice", Delta]]:
        num_samples = self._body.n or 1
        own = self._choices[place * num_samples : (place + 1) * num_samples]
        if update.prompt_logprobs is not None:
            for choice in own:
                choice.prompt_logprobs = update.prompt_logprobs
        if self._body.max_tokens == 0:  # the engine has generated one token, which is dropped
            return ((choice, _NO_OUTPUT) for choice in own)
        return ((own[delta.index], delta) for delta in update.deltas)


class _Choice:
    """One continuation of one prompt.

    Attributes:
        prompt_logprobs: logprobs of the prompt's tokens; empty until they are known.
    """

    ended = False  # only the engine ends it

    def __init__(
        self, service: ModelService, body: CompletionRequest, index: int, prompt: EncodedPrompt
    ) -> None:
        self.index = index
        self.prompt_logprobs: Sequence[Candidates | None] = _NOTHING
        self._service, self._body, self._prompt = service, body, prompt
        self._collected: list[Delta] = []
        self._skip_special = body.skip_special_tokens is not False
        self._reads = body.logprobs is not None or bool(body.return_speculation)
        self._reader: TokenReader | None = None
        self._token_fields = TokenFields(body)
        self._num_top = MOST_INT if body.logprob_token_ids else body.logprobs or 0
        self._begun = False

    def collect(self, delta: Delta) -> None:
        self._collected.append(delta)

    def whole(self) -> dict[str, Any]:
        first, *rest = self.chunk_choices(join_deltas(self._collected))
        for chunk_choice in rest:  # after the echo
            text, logprobs = first["text"] + chunk_choice["text"], first["logprobs"]
            if logprobs is not None:
                logprobs = {
                    name: [*logprobs[name], *chunk_choice["logprobs"][name]] for name in logprobs
                }
            first = {**first, **chunk_choice, "text": text, "logprobs": logprobs}
        if self._body.prompt_logprobs is not None:
            first["prompt_logprobs"] = prompt_logprobs(
                self._service.texts,
                self._prompt.token_ids,
                self.prompt_logprobs,
                self._body.prompt_logprobs,
            )
        return first

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        begins, self._begun = not self._begun, True
        chunk_choices = [self._echo()] if begins and self._body.echo else []
        chunk_choices.append(self._chunk_choice(delta))
        if begins and self._body.return_token_ids:
            chunk_choices[0]["prompt_token_ids"] = [*self._prompt.token_ids]
        return chunk_choices

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        chunk_choice = _chunk_choice(self.index, delta.text, delta.finish_reason, delta.stop_reason)
        chunk_choice.update(self._token_fields.of(delta, delta.finish_reason is not None))
        if self._reads:
            if self._reader is None:
                self._reader = TokenReader(self._service.texts, self._skip_special)
            tokens = read_tokens(self._reader, delta.token_ids)
            if self._body.logprobs is not None:
                chunk_choice["logprobs"] = completion_logprobs(
                    self._names, tokens, delta.logprobs or _NOTHING, self._num_top
                )
            if self._body.return_speculation:
                chunk_choice["speculation"] = speculation(delta, tokens)
        return chunk_choice

    @property
    def _names(self) -> TokenTexts:
        return self._service.token_names(self._body.return_tokens_as_token_ids)

    def _echo(self) -> dict[str, Any]:
        prompt, tokenizer = self._prompt, self._service.tokenizer
        text = prompt.text
        if text is None:
            text = tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skip_special)
        chunk_choice = _chunk_choice(self.index, text, None, None)
        if self._body.return_speculation:
            chunk_choice["speculation"] = {"tokens": []}
        if self._body.logprobs is not None:
            # Special tokens may be in the text, or have been added around it by the tokenizer.
            shows_special = text == tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            reader = TokenReader(self._service.texts, not shows_special)
            tokens = read_tokens(reader, prompt.token_ids)
            chunk_choice["logprobs"] = completion_logprobs(
                self._names, tokens, self.prompt_logprobs, self._num_top
            )
        self._reader = TokenReader(self._service.texts, self._skip_special, len(text))
        return chunk_choice


def _chunk_choice(
    index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _check(body: CompletionRequest) -> None:
    """Raise ApiError for contradictory fields."""
    check_stream_fields(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            f"best_of={body.best_of} differs from n={body.n or 1}: nothing is drawn that is not "
            "returned; leave best_of out and choose among n yourself",
            "best_of",
        )
    for name in ("echo", "truncate_prompt_tokens") if body.suffix else ():
        if getattr(body, name):
            raise bad_request(f"{name} cannot be combined with suffix; leave it out", name)
    if body.max_tokens == 0 and body.min_tokens:
        raise bad_request("min_tokens must not exceed max_tokens, which is 0", "min_tokens")


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given: Any = body.prompt
    listed = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return [it if isinstance(it, str) else {"prompt_token_ids": it} for it in listed]


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """The larger of `prompt_logprobs` and, with echo, `logprobs`; None if neither is given."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((it for it in wanted if it is not None), default=None)


def _params(service: ModelService, body: CompletionRequest) -> SamplingParams:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(
        body,
        service.engine.resolved.sampling_defaults,
        max_tokens or 1,  # the engine generates at least one token, which is then left out
        body.logprobs,
        structured_output(body, body.response_format),
        prompt_logprobs=_num_prompt_logprobs(body),
        logit_bias=logit_bias(body, service),
    )
    return params if max_tokens else replace(params, n=1)
