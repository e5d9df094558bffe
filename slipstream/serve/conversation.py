"""Render the messages of a request as the text that the model continues.

Marks that a request spells are text there, and nothing that it says is left out unnoticed.
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
from slipstream.serve.tools.told_in_messages import write_with_tools

_Message = dict[str, Any]


class _Field(NamedTuple):
    """A text in the messages: its path, the object that holds it, and its key there."""

    where: str
    holder: _Message
    key: str


def require_coverage(
    render: Callable[[Sequence[_Message]], str], messages: Sequence[_Message], text: str
) -> list[str]:
    """The names of speakers that are not in the rendered text; ApiError for a tool call or a
    content that is not.

    Each is replaced by a unique mark, and the messages are rendered again: a field whose mark is
    not in the new text was not read. A template that raises an error for marks has read them.

    Args:
        render: the template.
        messages: as they were rendered.
        text: the rendered text.
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
    unread = [it for it, mark in zip(fields, marks, strict=True) if mark not in found]
    for field in unread:
        if not field.where.endswith(".name"):
            raise bad_request(
                f"{field.where} would be ignored: the chat template of this model does not read "
                "it; leave it out, or say it in the content of a message that is read",
                "messages",
            )
    return [field.where for field in unread]


def _fields(messages: Sequence[_Message], text: str) -> Iterator[_Field]:
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        where, calls = f"messages[{place}]", message.get("tool_calls") or ()
        for call in calls:
            called[call["id"]] = call["function"]["name"]
        # A tool's name that repeats the call's may be left out.
        if "name" in message and message["name"] != called.get(message.get("tool_call_id", "")):
            yield _Field(f"{where}.name", message, "name")
        for number, call in enumerate(calls):
            yield _Field(f"{where}.tool_calls[{number}]", call["function"], "name")
        # Templates may leave out content beside a call, as in the model's training data. Most
        # other content is in the text unchanged, so that no mark is needed.
        content = message.get("content")
        if isinstance(content, list):
            if any(part["type"] != "text" for part in content):  # whose places are counted
                continue
            content = "\n".join(part["text"] for part in content)
        if content and not calls and content.strip() not in text:
            yield _Field(f"{where}.content", message, "content")


_DIGITS = 2


class SpelledTokens:
    """Takes marks out of a request's texts, and puts them back as ordinary tokens.

    The chat template writes texts and marks into one text, in which they could not be told apart.
    So a mark that a text spells is replaced by a number before, and the rendered text is encoded in
    parts. Only methods of `str` read whole texts: a regular expression would keep the interpreter's
    lock for long.

    Args:
        marks: token ids.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = [it for it in map(tokenizer.id_to_token, marks) if it]
        self._prefix = str(uuid4().int)  # templates that change case keep digits
        self._num_hidden = 0

    def hide(self, value: Any) -> Any:
        """JSON data with numbers in place of marks; ApiError for too many of them."""
        if isinstance(value, str):
            return self._hide_in(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(it) for key, it in value.items()}
        return [self.hide(it) for it in value] if isinstance(value, list) else value

    def show(self, text: str) -> str | list[int]:
        """A rendered text: as token ids where marks were hidden."""
        if not self._num_hidden:
            return text
        first, *others = text.split(self._prefix)
        parts = [first]
        for other in others:
            mark = self._marks[int(other[:_DIGITS])]
            # Without its first character a mark is none.
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


# Set by the server, so chat_template_kwargs may not.
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
    unread: list[str],
) -> str | list[int]:
    """The prompt of a conversation, as text or as token ids; slow for large ones.

    Where special tokens tell what of an answer is for whom, those that the request spells are text.

    Args:
        tools: that the template writes into the text; the request may have others.
        unread: takes the places of names that the template leaves out.

    Raises:
        ApiError: the template cannot do what the request asks for, or leaves out a part of it.
        UsageError: the template refuses the messages.
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
    unread += require_coverage(write, plain, text)
    if continues:
        text = _cut(text, plain[-1])
    return text if spelled is None else spelled.show(text)


def note_unread(response: Response, unread: Sequence[str]) -> Response:
    """Tell in a header what was ignored."""
    if unread:
        more = [f"and {len(unread) - _MOST_NOTED} more"] if len(unread) > _MOST_NOTED else []
        response.headers["x-ignored-fields"] = ", ".join([*unread[:_MOST_NOTED], *more])
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
    """Raise ApiError for tools that neither the template nor the server can tell the model of."""
    if not service.template_knows_tools and service.tool_format is not hermes.FORMAT:
        raise bad_request(
            "the chat template of this model knows no tools, and the server can tell it of some "
            "in the format hermes alone; leave --tool-call-parser and --reasoning-parser out, or "
            "give the model a template that knows tools",
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
    """Whether the chat template writes what earlier answers thought."""
    format = service.output_format
    key = "reasoning_content" if format is None else format.remember({}, "")
    return service.template.mentions(key)


def _options(service: ModelService, fields: TemplateFields) -> Mapping[str, Any]:
    """Further variables; ApiError for those that the template does not read, and would silently
    ignore."""
    template, documents = service.template, fields.documents
    given = _with_effort(dict(fields.chat_template_kwargs or {}), fields, template)
    if documents is not None and given.setdefault(_DOCUMENTS, documents) != documents:
        raise bad_request(f"{_DOCUMENTS} stand in chat_template_kwargs, too", _DOCUMENTS)
    defaults = service.answers.default_chat_template_kwargs or {}
    if fields.chat_template is not None:  # which need not read what the server says by default
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
    """The variables with what reasoning_effort says.

    A template that only switches thinking on or off does so: "none" is off, all else is on.
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
    """Arguments are JSON inside a string, whose values were not counted with the body's."""
    calls = chain.from_iterable(getattr(message, "tool_calls", None) or () for message in messages)
    documents = [call.function.arguments.encode(errors="replace") for call in calls]
    if sum(map(count_values, documents)) > MOST_SCHEMA_VALUES:
        raise bad_request(
            f"the arguments of the tool calls hold more than {MOST_SCHEMA_VALUES} values; leave "
            "some of the calls out",
            "messages",
        )


def _message(place: int, message: Message, service: ModelService) -> dict[str, Any]:
    """A message as templates expect it."""
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
    if plain["role"] == "developer":  # the newer name; templates know the older one
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
    """The text up to the end of the last message's content."""
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
