"""The served model as the endpoints see it: names, tokenizer, templates, threads for slow work."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from time import time
from typing import Any, ParamSpec, TypeVar

from slipstream.core.adapters import NamedAdapter
from slipstream.core.config import EngineConfig
from slipstream.core.errors import CheckpointError, PromptTooLongError, about_prompt, counted
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt, Prompt, PromptEncoder
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import ApiError, bad_request
from slipstream.serve.options import AnswerOptions, ServerOptions
from slipstream.serve.output.formats import choose_output_format
from slipstream.serve.output.parts import OutputFormat
from slipstream.serve.prompt_fields import Truncation
from slipstream.serve.protocol.server import ModelCard, ModelSpeculation
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools import hermes
from slipstream.serve.tools.call_format import CallFormat
from slipstream.serve.tools.formats import NAMED, find_format

_SHRINKING = 4  # most characters that a tokenizer normalizes into one before it looks up tokens
TOO_LONG = "context_length_exceeded"
# Cached properties that do not depend on the chat template; `with_template` copies them.
_OF_VOCABULARY = ("texts", "_token_ids", "_encoder", "_longest_text")

P = ParamSpec("P")
Result = TypeVar("Result")


class WorkerPool:
    """A thread pool for slow work, off the event loop and the engine's thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)

    async def __call__(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: work(*arguments, **options))

    def close(self) -> None:
        """Drop waiting work; running work goes on."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def has_images(given: object) -> bool:
    """Whether a message or a part of any protocol, or one of a list, is or holds an image."""
    if isinstance(given, list | tuple):
        return any(map(has_images, given))
    fields = getattr(given, "__dict__", {})  # of a text none
    if fields.get("type") in ("image", "image_url", "input_image"):
        return True
    return has_images(fields.get("content", ())) or has_images(fields.get("output", ()))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelService:
    """The model as the endpoints use it: names, tokenizer, formats, and pools for slow work.

    Args:
        options: those of the server; answers have the first of its names.
        config: the configuration that the engine was built from.
        engine: used for its properties; only `thread` runs it.
    """

    options: ServerOptions
    config: EngineConfig
    engine: Engine
    thread: EngineThread
    created: int = field(default_factory=lambda: int(time()))
    # Slow work runs in `workers`. What may take very long has a pool of its own, so that other
    # prompts do not wait for it: images, which may be fetched; large grammars; and chat templates
    # from requests.
    workers: WorkerPool = field(default_factory=lambda: WorkerPool(2, "tokenize"))
    image_workers: WorkerPool = field(default_factory=lambda: WorkerPool(2, "images"))
    template_workers: WorkerPool = field(default_factory=lambda: WorkerPool(2, "templates"))
    compilers: WorkerPool = field(default_factory=lambda: WorkerPool(2, "grammar"))
    # Parsing large bodies holds the GIL, so more threads would only delay other work.
    parse: WorkerPool = field(default_factory=lambda: WorkerPool(1, "parse"))

    @property
    def names(self) -> Sequence[str]:
        return self.options.served_model_name

    @property
    def answers(self) -> AnswerOptions:
        return self.options.answers

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request, prompt and output."""
        return self.engine.resolved.limits.max_model_len

    def require_name(self, name: str | None) -> None:
        """Raise ApiError (404) if no model or adapter has this name; None is allowed."""
        known = [*self.names, *self.engine.adapters.names]
        if name is not None and name not in known:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name[:100]!r} here; this server has {', '.join(known)}",
                param="model",
                code="model_not_found",
            )

    def adapter(self, name: str | None) -> NamedAdapter | None:
        """The adapter of this name; None if it is the model's, or no name is given."""
        self.require_name(name)
        if name is None or name in self.names:
            return None
        return self.engine.adapters.named(name)

    def answers_as(self, name: str | None) -> str:
        """The field `model` of the answer: the adapter's name, or the model's first name."""
        return self.names[0] if name is None or name in self.names else name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ApiError if the engine has none."""
        if self.engine.tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer; send prompts as token ids to "
                "/v1/completions with return_token_ids, and without echo, logprobs and "
                "return_speculation"
            )
        return self.engine.tokenizer

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def token_names(self, by_id: bool | None) -> TokenTexts:
        """How logprobs name tokens: by id or by text; None: by the server's default."""
        by_id = self.answers.return_tokens_as_token_ids if by_id is None else by_id
        return self._token_ids if by_id else self.texts

    @cached_property
    def _token_ids(self) -> TokenTexts:
        return TokenTexts(self.tokenizer, as_ids=True)

    @cached_property
    def template(self) -> ChatTemplate:
        in_parts = self.answers.chat_template_content_format == "openai"
        return ChatTemplate(self.tokenizer, self.options.chat_template, in_parts)

    def with_options(self, **changes: Any) -> "ModelService":
        return replace(self, options=replace(self.options, **changes))

    def with_template(self, source: str) -> "ModelService":
        """Copy this service, with the chat template of a request; slow. ApiError if the template is
        invalid, or the server does not accept templates."""
        if not self.answers.trust_request_chat_template:
            raise bad_request(
                "chat_template is taken from requests only where the server was started with "
                "--trust-request-chat-template; leave it out",
                "chat_template",
            )
        other = self.with_options(chat_template=source)
        vars(other).update({name: it for name, it in vars(self).items() if name in _OF_VOCABULARY})
        try:
            _ = other.template.variables
        except (CheckpointError, RecursionError) as error:
            reason = getattr(error.__cause__, "message", "it is nested too deep")
            raise bad_request(f"chat_template is not valid: {reason}", "chat_template") from None
        return other

    @cached_property
    def output_format(self) -> OutputFormat | None:
        """The output format, if answers have parts such as reasoning; None for plain text. Raises
        UsageError if the parser flags do not fit it."""
        return choose_output_format(
            self.options.reasoning_parser,
            self.options.tool_call_parser,
            self.template,
            self.tokenizer,
            self.engine.resolved.eos_token_ids,
        )

    @cached_property
    def template_knows_tools(self) -> bool:
        """Whether the chat template renders tools and tool calls; otherwise the server writes them
        into the messages in the Hermes format."""
        return "tools" in self.template.variables

    @cached_property
    def tool_format(self) -> CallFormat | None:
        """The format of the model's tool calls; None if unknown."""
        if self.output_format is not None and self.output_format.calls is not None:
            return self.output_format.calls
        if self.options.tool_call_parser is not None:
            return NAMED[self.options.tool_call_parser]
        if not self.template_knows_tools:
            return hermes.FORMAT
        return find_format(self.template, self.tokenizer)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        engine = self.engine
        return PromptEncoder(engine.tokenizer, engine.resolved.vocab_size, engine.images)

    @cached_property
    def _longest_text(self) -> int:
        """Number of characters above which a text always exceeds `max_model_len`."""
        longest = max(map(len, self.tokenizer.vocabulary()), default=1)
        return _SHRINKING * self.max_model_len * longest

    def encode(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        add_special_tokens: bool,
        field: str = "prompt",
        truncation: Truncation | None = None,
    ) -> list[EncodedPrompt]:
        """Tokenize and truncate the prompts of `field`; slow, so call it through `workers`."""
        if truncation is not None:
            prompts = [
                truncation.cut_text(it, self._longest_text) if isinstance(it, str) else it
                for it in prompts
            ]
        self.require_short(prompts, field)
        encoded = []
        try:
            for index, prompt in enumerate(prompts):
                with about_prompt(index, len(prompts)):
                    encoded.append(self._encoder.encode(prompt, params, add_special_tokens))
        except PromptTooLongError as error:
            raise bad_request(str(error), field, TOO_LONG) from error
        return encoded if truncation is None else [truncation.cut(it) for it in encoded]

    def require_logprobs(self, number: int | None, field: str) -> None:
        """Raise ApiError if `number` exceeds the server's `max_logprobs`; None is allowed."""
        most = self.answers.max_logprobs
        if number is not None and number > most:
            raise bad_request(
                f"{field} must be at most {most}, not {number}; ask for fewer, or start the server "
                "with a larger --max-logprobs",
                field,
            )

    def require_short(self, prompts: Sequence[Prompt], field: str = "prompt") -> None:
        """Raise ApiError for a text that must exceed `max_model_len`, without tokenizing it."""
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._longest_text:
                raise bad_request(
                    f"the prompt has {len(prompt)} characters, which are more than max_model_len "
                    f"({self.max_model_len} tokens) can hold; shorten it",
                    field,
                    TOO_LONG,
                )

    def pool_for(self, messages: object, chat_template: str | None = None) -> WorkerPool:
        """The pool in which to prepare a conversation of any protocol."""
        if chat_template is not None:
            return self.template_workers
        return self.image_workers if has_images(messages) else self.workers

    async def compile(self, params: SamplingParams) -> None:
        """Compile the request's grammar, if any, ahead of the engine, which then need not wait."""
        if params.structured is not None:
            await self.compilers(self.engine.compile, params.structured)

    def require_room(
        self,
        prompts: Sequence[EncodedPrompt],
        max_tokens: int | None,
        field_name: str,
        prompt_field: str = "prompt",
    ) -> None:
        """Raise ApiError if a prompt with `max_tokens` of output exceeds `max_model_len`.

        The engine would end such an output early, without an explanation to the client.

        Args:
            field_name, prompt_field: the fields of `max_tokens` and of the prompts, for errors.
        """
        for prompt in prompts:
            num_tokens, most = len(prompt.token_ids), self.max_model_len
            if num_tokens >= most:
                raise bad_request(
                    f"the prompt has {counted(num_tokens, 'token')}, but max_model_len is {most}, "
                    "prompt and output; shorten it",
                    prompt_field,
                    TOO_LONG,
                )
            if max_tokens is not None and num_tokens + max_tokens > most:
                raise bad_request(
                    f"{field_name} is {max_tokens}, but max_model_len is {most}, of which the "
                    f"prompt takes {num_tokens}; ask for at most {most - num_tokens}",
                    field_name,
                    TOO_LONG,
                )

    def close(self) -> None:
        pools = self.workers, self.image_workers, self.template_workers, self.compilers, self.parse
        for pool in pools:
            pool.close()

    def cards(self) -> list[ModelCard]:
        """The model cards of all names, then those of the adapters."""
        parents: dict[str, str | None] = dict.fromkeys(self.names)
        parents.update(dict.fromkeys(self.engine.adapters.names, self.names[0]))
        return [
            ModelCard(
                id=name,
                object="model",
                created=self.created,
                owned_by="slipstream",
                root=self.config.model,
                parent=parent,
                max_model_len=self.max_model_len,
                has_chat_template=self.engine.tokenizer is not None and self.template.exists,
                max_images=self.engine.images.most,
                speculative=self._speculation(),
            )
            for name, parent in parents.items()
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
            adaptive=resolved.adaptive,
        )
