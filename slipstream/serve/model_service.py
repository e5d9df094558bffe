"""The served model as the endpoints see it: names, tokenizer, templates, threads for slow work."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from time import time
from typing import ParamSpec, TypeVar

from slipstream.core.adapters import NamedAdapter
from slipstream.core.config import EngineConfig
from slipstream.core.errors import CheckpointError, PromptTooLongError, counted
from slipstream.core.sampling_params import SamplingDefaults, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt, Prompt, PromptEncoder
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.errors import ApiError, bad_request
from slipstream.serve.options import AnswerOptions
from slipstream.serve.output.formats import choose_output_format
from slipstream.serve.output.parts import OutputFormat
from slipstream.serve.prompt_fields import Truncation
from slipstream.serve.protocol.server import ModelCard, ModelSpeculation
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools import hermes
from slipstream.serve.tools.call_format import CallFormat
from slipstream.serve.tools.formats import NAMED, find_format

_SHRINKING = 4  # tokenizers may merge so many characters into one before they look up tokens
TOO_LONG = "context_length_exceeded"
# Cached properties that do not depend on the chat template.
_OF_VOCABULARY = ("texts", "_token_ids", "_encoder", "_longest_text")

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelService:
    """What the endpoints need of an engine.

    Args:
        names: of the model in requests; answers have the first.
        config: that the engine was built from.
        engine: for its properties; only `thread` runs it.
        tool_call_parser: one of `NAMED` or `CALLS_WITHIN`; found from the checkpoint when None.
        reasoning_parser: a name of `OUTPUT_FORMATS`, or `OFF`; found from the checkpoint when None.
        chat_template: replaces the checkpoint's.
        answers: how requests are read and answers written, where a request does not say.
        replica: tells this server from others with the same model; ids of responses have it.
    """

    names: Sequence[str]
    config: EngineConfig
    engine: Engine
    thread: EngineThread
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    replica: str = ""
    created: int = field(default_factory=lambda: int(time()))
    # Parsing holds the interpreter's lock, so more threads would only make others wait longer.
    _parser: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "parse"))
    _pool: Executor = field(default_factory=lambda: ThreadPoolExecutor(2, "tokenize"))
    # An image may have to be fetched first, and prompts of texts must not wait for it.
    _viewers: Executor = field(default_factory=lambda: ThreadPoolExecutor(2, "images"))
    # A large grammar takes seconds, in which the prompts of other requests must not wait.
    _compilers: Executor = field(default_factory=lambda: ThreadPoolExecutor(2, "grammar"))
    # So does a chat template of a request, if it loops.
    _templates: Executor = field(default_factory=lambda: ThreadPoolExecutor(2, "templates"))

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request, prompt and output."""
        return self.engine.resolved.limits.max_model_len

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What a request gets for sampling fields that it does not give."""
        return self.engine.resolved.sampling_defaults

    def require_name(self, name: str | None) -> None:
        """Raise ApiError (404) if a request names another model."""
        known = [*self.names, *self.engine.adapters.names]
        if name is not None and name not in known:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name[:100]!r} here; this server has {', '.join(known)}",
                param="model",
                code="model_not_found",
            )

    def adapter(self, name: str | None) -> NamedAdapter | None:
        """The adapter that a request names as its model; None for the model itself."""
        self.require_name(name)
        if name is None or name in self.names:
            return None
        return self.engine.adapters.named(name)

    def answers_as(self, name: str | None) -> str:
        """What an answer calls the model that a request names: an adapter by its own name."""
        return self.name if name is None or name in self.names else name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ApiError if the engine has none."""
        if self.engine.tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer; send prompts as token ids to "
                "/v1/completions with return_token_ids, and without echo, logprobs and "
                "return_speculation"
            )
        return self.engine.tokenizer

    @cached_property
    def texts(self) -> TokenTexts:
        """Texts of single tokens."""
        return TokenTexts(self.tokenizer)

    def token_names(self, by_id: bool | None) -> TokenTexts:
        """What logprobs call tokens: their texts, or their ids; None is the server's choice."""
        by_id = self.answers.return_tokens_as_token_ids if by_id is None else by_id
        return self._token_ids if by_id else self.texts

    @cached_property
    def _token_ids(self) -> TokenTexts:
        return TokenTexts(self.tokenizer, as_ids=True)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template."""
        in_parts = self.answers.chat_template_content_format == "openai"
        return ChatTemplate(self.tokenizer, self.chat_template, in_parts)

    def with_template(self, source: str) -> "ModelService":
        """This model with the chat template that a request brings; slow.

        Raises:
            ApiError: the template is not valid, or clients may not bring any.
        """
        if not self.answers.trust_request_chat_template:
            raise bad_request(
                "chat_template is taken from requests only where the server was started with "
                "--trust-request-chat-template; leave it out",
                "chat_template",
            )
        other = replace(self, chat_template=source)
        vars(other).update({name: it for name, it in vars(self).items() if name in _OF_VOCABULARY})
        try:
            _ = other.template.variables
        except (CheckpointError, RecursionError) as error:
            reason = getattr(error.__cause__, "message", "it is nested too deep")
            raise bad_request(f"chat_template is not valid: {reason}", "chat_template") from None
        return other

    @cached_property
    def output_format(self) -> OutputFormat | None:
        """The format of the model's answers, if they are more than text; UsageError for flags that
        do not fit it."""
        return choose_output_format(
            self.reasoning_parser,
            self.tool_call_parser,
            self.template,
            self.tokenizer,
            self.engine.resolved.eos_token_ids,
        )

    @cached_property
    def template_knows_tools(self) -> bool:
        """Whether the chat template writes tools and calls; if not, the server tells of them in the
        form of Hermes."""
        return "tools" in self.template.variables

    @cached_property
    def tool_format(self) -> CallFormat | None:
        """The format of the model's tool calls, if known."""
        if self.output_format is not None and self.output_format.calls is not None:
            return self.output_format.calls
        if self.tool_call_parser is not None:
            return NAMED[self.tool_call_parser]
        if not self.template_knows_tools:
            return hermes.FORMAT
        return find_format(self.template, self.tokenizer)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        engine = self.engine
        return PromptEncoder(engine.tokenizer, engine.resolved.vocab_size, engine.images)

    @cached_property
    def _longest_text(self) -> int:
        """Longer texts (in characters) exceed `max_model_len` whatever their tokens are."""
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
        """Tokenize prompts, which came in `field`, and cut them; slow (call by `aside`)."""
        if truncation is not None:
            prompts = [
                truncation.cut_text(it, self._longest_text) if isinstance(it, str) else it
                for it in prompts
            ]
        self.require_short(prompts, field)
        try:
            encoded = [self._encoder.encode(it, params, add_special_tokens) for it in prompts]
        except PromptTooLongError as error:
            raise bad_request(str(error), field, TOO_LONG) from error
        return encoded if truncation is None else [truncation.cut(it) for it in encoded]

    def require_logprobs(self, number: int | None, field: str) -> None:
        """Raise ApiError where a field asks for more alternatives than the server gives."""
        most = self.answers.max_logprobs
        if number is not None and number > most:
            raise bad_request(
                f"{field} must be at most {most}, not {number}; ask for fewer, or start the server "
                "with a larger --max-logprobs",
                field,
            )

    def require_short(self, prompts: Sequence[Prompt], field: str = "prompt") -> None:
        """Raise ApiError for a text that is too long whatever its tokens are."""
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._longest_text:
                raise bad_request(
                    f"the prompt has {len(prompt)} characters, which are more than max_model_len "
                    f"({self.max_model_len} tokens) can hold; shorten it",
                    field,
                    TOO_LONG,
                )

    async def compile(self, params: SamplingParams) -> None:
        """Compile the request's grammar, if it has one, so that the engine need not wait for it."""
        if params.structured is not None:
            await _run(self._compilers, self.engine.compile, params.structured)

    def require_room(
        self,
        prompts: Sequence[EncodedPrompt],
        max_tokens: int | None,
        field_name: str,
        prompt_field: str = "prompt",
    ) -> None:
        """Raise ApiError if a prompt with `max_tokens` of output exceeds `max_model_len`.

        The engine would end such an output early, and the client would not know why.

        Args:
            max_tokens: None if the request does not say.
            field_name: name of the field of `max_tokens`.
            prompt_field: name of the field of the prompts.
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

    async def aside(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        """Run slow work in a thread beside the event loop and the engine."""
        return await _run(self._pool, work, *arguments, **options)

    async def beside_images(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        """Like `aside`, for prompts with images."""
        return await _run(self._viewers, work, *arguments, **options)

    async def beside_templates(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        """Like `aside`, for chat templates that requests bring."""
        return await _run(self._templates, work, *arguments, **options)

    async def parse(
        self, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
    ) -> Result:
        """Like `aside`, for large bodies: one after the other."""
        return await _run(self._parser, work, *arguments, **options)

    def close(self) -> None:
        """Stop the threads."""
        beside = self._viewers, self._compilers, self._templates
        for pool in (self._parser, self._pool, *beside):
            pool.shutdown(wait=False, cancel_futures=True)

    def cards(self) -> list[ModelCard]:
        """One card for each name, then one for each adapter."""
        parents: dict[str, str | None] = dict.fromkeys(self.names)
        parents.update(dict.fromkeys(self.engine.adapters.names, self.name))
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


async def _run(
    pool: Executor, work: Callable[P, Result], *arguments: P.args, **options: P.kwargs
) -> Result:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, lambda: work(*arguments, **options))
