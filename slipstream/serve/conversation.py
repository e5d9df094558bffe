"""Renders the messages of a request to the prompt.

Special tokens spelled in a request's texts are encoded as plain text, and a content that the chat
template would drop is an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple
from uuid import uuid4

from pydantic_core import from_json
from starlette.responses import Response

from slipstream.core.errors import UsageError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import ApiError, bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.bounds import MOST_SCHEMA_VALUES, MOST_SPELLED_TOKENS, count_values
from slipstream.serve.protocol.chat import Message, TemplateFields, Tool
from slipstream.serve.tools import hermes
from slipstream.serve.tools.tools_in_messages import write_with_tools

_Message = dict[str, Any]


class _Field(NamedTuple):
    """A text in the messages: its path for errors, the object with the text, and the key."""

    where: str
    holder: _Message
    key: str


def require_coverage(
    render: Callable[[Sequence[_Message]], str], messages: Sequence[_Message], text: str
) -> list[str]:
    """Check that the chat template has rendered all contents, tool calls and speaker names.

    Each field is replaced by a unique mark, and the messages are rendered again: a field whose mark
    is not in the new text was not rendered. A template that raises an error for marks reads them.

    Returns:
        The paths of speaker names that were not rendered.

    Raises:
        ApiError: a content or a tool call was not rendered.
    """
    marked = deepcopy([*messages])
    fields = [*_fields(marked, text)]
    if not fields:
        return []
    marks = [str(uuid4().int) for _ in fields]  # digits: templates that change case keep them
    for field, mark in zip(fields, marks, strict=True):
        field.holder[field.key] = mark
    try:
        found = render(marked)
    except UsageError:
        return []
    ignored = [it for it, mark in zip(fields, marks, strict=True) if mark not in found]
    for field in ignored:
        if not field.where.endswith(".name"):
            raise bad_request(
                f"{field.where} would be ignored: the chat template of this model does not read "
                "it; leave it out, or say it in the content of a message that is read",
                "messages",
            )
    return [field.where for field in ignored]


def _fields(messages: Sequence[_Message], text: str) -> Iterator[_Field]:
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        where, calls = f"messages[{place}]", message.get("tool_calls") or ()
        for call in calls:
            called[call["id"]] = call["function"]["name"]
        # The template may leave out a tool's name that repeats the name in the call.
        if "name" in message and message["name"] != called.get(message.get("tool_call_id", "")):
            yield _Field(f"{where}.name", message, "name")
        for number, call in enumerate(calls):
            yield _Field(f"{where}.tool_calls[{number}]", call["function"], "name")
        # Templates may leave out the content of messages with calls, as in training data. Other
        # content is mostly in the text unchanged, and then needs no mark.
        content = message.get("content")
        if isinstance(content, list):
            if any(part["type"] != "text" for part in content):  # the encoder counts images
                continue
            content = "\n".join(part["text"] for part in content)
        if content and not calls and content.strip() not in text:
            yield _Field(f"{where}.content", message, "content")


_DIGITS = 2


class SpelledTokens:
    """Encodes special tokens that are spelled in a request's texts as plain text.

    In the rendered text, they could not be told from the special tokens that the chat template
    writes. So before rendering, each is replaced by a unique number, and the rendered text is then
    encoded in parts. Whole texts are searched with methods of `str` only: a regular expression
    would hold the GIL for long.

    Args:
        marks: token ids of the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = [it for it in map(tokenizer.id_to_token, marks) if it]
        self._prefix = str(uuid4().int)  # templates that change case keep digits
        self._num_hidden = 0

    def hide(self, value: Any) -> Any:
        """Replace marks in JSON data by numbers; raises ApiError if there are too many."""
        if isinstance(value, str):
            return self._hide_in(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(it) for key, it in value.items()}
        return [self.hide(it) for it in value] if isinstance(value, list) else value

    def show(self, text: str) -> str | list[int]:
        """Put the marks back as plain text; returns token ids if any were hidden, else the text."""
        if not self._num_hidden:
            return text
        first, *others = text.split(self._prefix)
        parts = [first]
        for other in others:
            mark = self._marks[int(other[:_DIGITS])]
            # Split after its first character, a mark is not encoded as a special token.
            parts += [mark[:1], mark[1:], other[_DIGITS:]]
        return self._tokenizer.encode_parts(parts)

    def _hide_in(self, text: str) -> str:
        for number, mark in enumerate(self._marks):
            count = text.count(mark)
            self._num_hidden += count
            if self._num_hidden > MOST_SPELLED_TOKENS:
                raise bad_request(
                    f"the messages spell more than {MOST_SPELLED_TOKENS} of the marks by which the "
                    "model tells messages apart; leave some of them out",
                    "messages",
                )
            if count:
                text = text.replace(mark, f"{self._prefix}{number:0{_DIGITS}}")
        return text


# Set by the server, so chat_template_kwargs may not set them.
_OWN = ("messages", "tools", "add_generation_prompt")
_DOCUMENTS, _EFFORT = "documents", "reasoning_effort"
_MOST_NOTED = 16
# Variables by which templates switch thinking on and off.
SWITCHES = ("enable_thinking", "thinking")


def render(
    service: ModelService,
    messages: Sequence[Message],
    fields: TemplateFields,
    tools: Sequence[Tool] | None,
    ignored: list[str],
) -> str | list[int]:
    """Render a conversation to its prompt, as text or as token ids; slow for large ones.

    If the model has an output format with special tokens, those spelled in the request are text.

    Args:
        tools: the tools to write into the prompt; maybe not all of the request.
        ignored: the paths of speaker names that the template does not render are appended here.

    Raises:
        ApiError: the template does not support the request, or would drop a part of it.
        UsageError: the template raises an error for the messages.
    """
    template = service.template
    require_template(template)
    options = _options(service, fields)
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise bad_request(
            "add_generation_prompt and continue_final_message contradict each other; give one",
            "continue_final_message",
        )
    if tools:
        require_tools(service)

    functions = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

    def write_plain(plain: Sequence[dict[str, Any]]) -> str:
        return template.render(
            plain,
            add_generation_prompt=not continues and fields.add_generation_prompt is not False,
            tools=functions,
            **options,
        )

    def write(plain: Sequence[dict[str, Any]]) -> str:
        if service.template_knows_tools:
            return write_plain(plain)
        return write_with_tools(write_plain, plain, functions)

    _check_arguments(messages)
    plain = [_message(place, message, service) for place, message in enumerate(messages)]
    format = service.output_format
    spelled = None if format is None else SpelledTokens(service.tokenizer, format.marks)
    if spelled is not None:
        plain, functions, options = map(spelled.hide, (plain, functions, options))
    text = write(plain)
    ignored += require_coverage(write, plain, text)
    if continues:
        text = _cut(text, plain[-1])
    return text if spelled is None else spelled.show(text)


def note_ignored(response: Response, ignored: Sequence[str]) -> Response:
    """List ignored fields in the header `x-ignored-fields`."""
    if ignored:
        more = [f"and {len(ignored) - _MOST_NOTED} more"] if len(ignored) > _MOST_NOTED else []
        response.headers["x-ignored-fields"] = ", ".join([*ignored[:_MOST_NOTED], *more])
    return response


def require_template(template: ChatTemplate) -> None:
    """Raise ApiError if the model has no chat template."""
    if not template.exists:
        raise bad_request(
            "this model has no chat template, so it cannot chat; use /v1/completions, or start "
            "the server with --chat-template",
            "messages",
        )


def require_tools(service: ModelService) -> None:
    """Raise ApiError if neither the template nor the server can write tools into the prompt."""
    if not service.template_knows_tools and service.tool_format is not hermes.FORMAT:
        raise bad_request(
            "the chat template of this model does not support tools, and the server can describe "
            "them in messages only for the format hermes; leave --tool-call-parser and "
            "--reasoning-parser out, or give the model a template that supports tools",
            "tools",
        )


def require_defaults(service: ModelService) -> None:
    """Raise UsageError for default variables that the model's template does not read."""
    given = service.answers.default_chat_template_kwargs
    if service.template.exists and given:
        try:
            _options(service, TemplateFields.model_construct(chat_template_kwargs=dict(given)))
        except ApiError as error:
            raise UsageError(f"--default-chat-template-kwargs: {error}") from None


def reads_reasoning(service: ModelService) -> bool:
    """Whether the chat template renders the reasoning of earlier answers."""
    format = service.output_format
    key = "reasoning_content" if format is None else format.remember({}, "")
    return service.template.mentions(key)


def _options(service: ModelService, fields: TemplateFields) -> Mapping[str, Any]:
    """The template's variables besides messages and tools; raises ApiError for any that the
    template does not read."""
    template, documents = service.template, fields.documents
    given = _with_effort(dict(fields.chat_template_kwargs or {}), fields, template)
    if documents is not None and given.setdefault(_DOCUMENTS, documents) != documents:
        raise bad_request(f"{_DOCUMENTS} stand in chat_template_kwargs, too", _DOCUMENTS)
    defaults = service.answers.default_chat_template_kwargs or {}
    if fields.chat_template is not None:  # it need not read the server's defaults
        defaults = {name: it for name, it in defaults.items() if name in template.variables}
    options = {**defaults, **given}
    for name in [*options]:
        if name in _OWN:
            raise bad_request(f"give {name} as a field of its own", "chat_template_kwargs")
        if name in template.variables:
            continue
        if name in SWITCHES and options[name] is False and not template.mentions("think"):
            del options[name]  # such a model does not think
            continue
        read = sorted(template.variables - {*_OWN, "raise_exception", "strftime_now"})
        raise bad_request(
            f"the chat template of this model does not read {name}; the variables that it reads: "
            f"{', '.join(read) or 'none'}",
            name if getattr(fields, name, None) is not None else "chat_template_kwargs",
        )
    return options


def _with_effort(
    options: dict[str, Any], fields: TemplateFields, template: ChatTemplate
) -> dict[str, Any]:
    """Add the variables that `reasoning_effort` sets.

    If the template can only switch thinking on or off, "none" is off and all else is on.
    """
    effort = fields.reasoning_effort
    if effort is None:
        return options
    switch = next((it for it in SWITCHES if it in template.variables), None)
    graded = _EFFORT in template.variables
    if switch is None and not graded and effort == "none":
        switch = SWITCHES[0]
    said: dict[str, Any] = {} if switch is not None and not graded else {_EFFORT: effort}
    if switch is not None and (effort == "none" or not graded):
        said[switch] = effort != "none"
    if any(options.get(name, value) != value for name, value in said.items()):
        raise bad_request(
            "reasoning_effort and chat_template_kwargs contradict each other; give one of them",
            _EFFORT,
        )
    return {**options, **said}


def _check_arguments(messages: Sequence[Message]) -> None:
    """Limit the JSON values in tool call arguments: as strings, they count as one in the body."""
    calls = chain.from_iterable(getattr(message, "tool_calls", None) or () for message in messages)
    documents = [call.function.arguments.encode(errors="replace") for call in calls]
    if sum(map(count_values, documents)) > MOST_SCHEMA_VALUES:
        raise bad_request(
            f"the arguments of the tool calls hold more than {MOST_SCHEMA_VALUES} values; leave "
            "some of the calls out",
            "messages",
        )


def _message(place: int, message: Message, service: ModelService) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect."""
    plain = message.model_dump(exclude_none=True)
    older = plain.pop("reasoning_content", None)
    reasoning = plain.pop("reasoning", None) or older
    if reasoning:
        if service.output_format is None:
            key = "reasoning_content"
            plain[key] = reasoning
        else:
            key = service.output_format.remember(plain, reasoning)
        if not service.template.mentions(key):
            raise bad_request(
                f"messages[{place}].reasoning would be ignored: the chat template of this model "
                "does not read it; leave it out",
                "messages",
            )
    if isinstance(plain.get("content"), list):
        plain["content"] = [
            part if part["type"] == "text" else {"type": "image"} for part in plain["content"]
        ]
    if plain["role"] == "developer":  # the newer name of the role; templates know the older
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        # Templates write the arguments as JSON themselves.
        call["function"]["arguments"] = _arguments(place, call["function"]["arguments"])
    return plain


def _arguments(place: int, text: str) -> dict[str, Any]:
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(
            f"messages[{place}]: the arguments of a tool call are not JSON: {error}", "messages"
        ) from None
    if not isinstance(arguments, dict):
        raise bad_request(
            f"messages[{place}]: the arguments of a tool call must be a JSON object", "messages"
        )
    return arguments


def _cut(text: str, last: Mapping[str, Any]) -> str:
    """Cut the text off after the last message's content; raises ApiError if it has none."""
    content = last.get("content")
    if not isinstance(content, str):
        content = content[-1].get("text", "") if content else ""
    ending = content.strip()
    place = text.rfind(ending) if ending else -1
    if place < 0:
        raise bad_request(
            "the last message has no text that could be continued; leave continue_final_message "
            "out",
            "continue_final_message",
        )
    return text[: place + len(ending)]
