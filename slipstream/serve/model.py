"""What is served: one engine under one name or more, and what is known of it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from time import time
from typing import ParamSpec, TypeVar

from slipstream.core.config import EngineConfig
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.wording import counted
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt, Prompt, PromptEncoder
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import ApiError, bad_request
from slipstream.serve.protocol.server import ModelCard, ModelSpeculation
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.formats import FORMATS, ToolFormat, find_format

_SHRINKING = 4  # so many characters may become one before they are looked up
_TOO_LONG = "context_length_exceeded"

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """A model, and the ways to it.

    Args:
        names: under which requests may ask for it; the first is its own.
        config: that it was opened with.
        engine: for what it knows about itself; `thread` alone runs it.
        thread: takes requests.
        tool_call_parser: a name of `FORMATS`; found from the checkpoint when None.
        chat_template: goes before the checkpoint's own.
    """

    names: Sequence[str]
    config: EngineConfig
    engine: Engine
    thread: EngineThread
    tool_call_parser: str | None = None
    chat_template: str | None = None
    created: int = field(default_factory=lambda: int(time()))
    # Parsing holds the interpreter's lock, so a second thread would only let others wait longer.
    _parser: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="parse")
    )
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenize")
    )
    # Apart: a large grammar takes seconds, in which other requests' prompts must not wait.
    _compilers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="grammar")
    )

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.engine.resolved.limits.max_model_len

    def require(self, name: str | None) -> None:
        """Raise ApiError where a request asks for another model."""
        if name is not None and name not in self.names:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name[:100]!r} here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ApiError when the engine does without."""
        if self.engine.tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer; send prompts as token ids to /v1/completions"
            )
        return self.engine.tokenizer

    @cached_property
    def texts(self) -> TokenTexts:
        """Of single tokens."""
        return TokenTexts(self.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        """Of conversations."""
        return ChatTemplate(self.tokenizer, self.chat_template)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Of the model's tool calls, where it is known."""
        if self.tool_call_parser is not None:
            return FORMATS[self.tool_call_parser]
        return find_format(self.template, self.tokenizer)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.engine.tokenizer, self.engine.resolved.vocab_size)

    @cached_property
    def _longest_text(self) -> int:
        """Characters of a text that certainly is too long, so that nobody need tokenize it."""
        longest = max(map(len, self.tokenizer.vocabulary()), default=1)
        return _SHRINKING * self.max_model_len * longest

    def encode(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        add_special_tokens: bool,
        field: str = "prompt",
    ) -> list[EncodedPrompt]:
        """Prompts as the engine takes them, which came in `field`; takes its time (`aside`)."""
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._longest_text:
                raise bad_request(
                    f"the prompt has {len(prompt)} characters, which are more than max_model_len "
                    f"({self.max_model_len} tokens) can hold; shorten it",
                    field,
                    _TOO_LONG,
                )
        return [self._encoder.encode(prompt, params, add_special_tokens) for prompt in prompts]

    async def compile(self, params: SamplingParams) -> None:
        """Have the request's grammar ready, if it has one, so that the engine need not wait."""
        if params.structured is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compilers, self.engine.compile, params.structured)

    def require_room(
        self,
        prompts: Sequence[EncodedPrompt],
        max_tokens: int | None,
        field_name: str,
        prompt_field: str = "prompt",
    ) -> None:
        """Raise ApiError where a prompt, or the output asked for behind it, cannot fit.

        The engine would end such an output early; who asks over HTTP learns it at once.

        Args:
            max_tokens: None where the request does not say.
            field_name: in which it said so.
            prompt_field: in which the prompts came.
        """
        for prompt in prompts:
            num_tokens, most = len(prompt.token_ids), self.max_model_len
            if num_tokens >= most:
                raise bad_request(
                    f"the prompt has {counted(num_tokens, 'token')}, but max_model_len is {most}, "
                    "prompt and output; shorten it",
                    prompt_field,
                    _TOO_LONG,
                )
            if max_tokens is not None and num_tokens + max_tokens > most:
                raise bad_request(
                    f"{field_name} is {max_tokens}, but max_model_len is {most}, of which the "
                    f"prompt takes {num_tokens}; ask for at most {most - num_tokens}",
                    field_name,
                    _TOO_LONG,
                )

    async def aside(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        """Work that takes its time, beside the event loop and the engine."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*arguments, **options))

    async def parse(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        """Like `aside`, for large bodies, which are parsed one after the other."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parser, lambda: work(*arguments, **options))

    def close(self) -> None:
        """Let its threads go."""
        for pool in (self._parser, self._pool, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def cards(self) -> list[ModelCard]:
        """What /v1/models says, one for each name."""
        return [
            ModelCard(
                id=name,
                object="model",
                created=self.created,
                owned_by="slipstream",
                root=self.config.model,
                max_model_len=self.max_model_len,
                speculative=self._speculation(),
            )
            for name in self.names
        ]

    def _speculation(self) -> ModelSpeculation | None:
        resolved = self.engine.resolved
        if resolved.method is None:
            return None
        drafter = (self.config.drafter_options or {}).get("model")
        return ModelSpeculation(
            method=resolved.method,
            model=None if drafter is None else str(drafter),
            num_speculative_tokens=resolved.limits.num_speculative_tokens,
        )
