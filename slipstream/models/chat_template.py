"""Renders messages to a prompt with the chat template of a checkpoint.

Templates are untrusted programs: they run in a sandbox and get only plain data.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.tokenizer import Tokenizer, tokenizer_settings

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

_FILE = "chat_template.jinja"
_MORE_FILES = "additional_chat_templates"
_IMAGE = {"type": "image"}  # the part of a message's content for an image


class ChatTemplate:
    """The chat template of a tokenizer's directory, or one given instead.

    chat_template.jinja takes precedence over `chat_template` of tokenizer_config.json. If there are
    several named templates, "tool_use" is used for requests with tools and "default" for others.

    Args:
        template: source of a template that replaces the tokenizer's.
        in_parts: the template gets the content of messages as lists of text parts, not as texts.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, in_parts: bool = False
    ) -> None:
        self._in_parts = in_parts
        self._path, self._special_tokens = tokenizer.path, tokenizer.special_tokens
        self._sources = (
            _sources(tokenizer.path, tokenizer.settings)
            if template is None
            else {"default": template}
        )
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def exists(self) -> bool:
        """Whether there is a template (base models have none)."""
        return bool(self._sources)

    @property
    def default(self) -> str | None:
        """The source of the template for requests without tools; None if there is none."""
        return self._sources.get("default")

    def mentions(self, text: str) -> bool:
        """Whether the source of a template contains this text."""
        return any(text in source for source in self._sources.values())

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the templates read: "messages", "tools", ..."""
        from jinja2.meta import find_undeclared_variables

        for name in self._sources:
            self._template(name)  # raises CheckpointError for an invalid template
        parsed = (self._environment.parse(source) for source in self._sources.values())
        return frozenset().union(*(find_undeclared_variables(tree) for tree in parsed))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render the prompt of a conversation, to be encoded without adding special tokens.

        Args:
            messages: objects with role and content; content may be a list of text parts.
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: JSON schemas of functions that the model may call.
            kwargs: further variables of the template ("enable_thinking", ...).
        """
        template = self._template(self._choose(tools is not None))
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **_plain("chat template options", kwargs),
            "messages": _plain("messages", _checked(messages, self._in_parts)),
            "tools": _plain("tools", _checked_tools(tools)),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except Exception as error:  # raised by the template, by jinja, or by Python operations
            # Without the path: servers send this message to clients.
            raise UsageError(f"the chat template refuses these messages: {error}") from error

    def _choose(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if self._sources:
            raise UsageError(
                f"{self._path} has chat templates named {', '.join(sorted(self._sources))} but no "
                f"default; give a chat template"
            )
        raise UsageError(
            f"{self._path} has no chat template: complete texts instead of messages, or put a "
            f"{_FILE} into it"
        )

    def _template(self, name: str) -> "jinja2.Template":
        if name not in self._compiled:
            self._compiled[name] = self._compile(name)
        return self._compiled[name]

    def _compile(self, name: str) -> "jinja2.Template":
        from jinja2 import TemplateSyntaxError

        try:
            return self._environment.from_string(self._sources[name])
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template {name!r} of {self._path} is not valid: line {error.lineno}: "
                f"{error.message}; fix it or give another"
            ) from error

    @cached_property
    def _environment(self) -> "jinja2.Environment":
        from slipstream.models.chat_environment import make_environment

        return make_environment()


def has_chat_template(path: Path) -> bool:
    """Whether a model directory, or GGUF file, has any template."""
    return bool(_sources(path, tokenizer_settings(path)))


def _sources(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    files = {file.stem: file for file in sorted((path / _MORE_FILES).glob("*.jinja"))}
    if (path / _FILE).is_file():
        files["default"] = path / _FILE
    if files:
        return {name: _read(file) for name, file in files.items()}
    value = settings.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(_is_named_template(item) for item in value):
        return {item["name"]: item["template"] for item in value}
    raise CheckpointError(
        f'{path / "tokenizer_config.json"}: "chat_template" must be a text or a list of '
        f'objects with "name" and "template"'
    )


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def _is_named_template(item: object) -> bool:
    return isinstance(item, Mapping) and all(
        isinstance(item.get(key), str) for key in ("name", "template")
    )


def _checked(messages: Sequence[Message], in_parts: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError("messages must be a list of at least one {role, content} object")
    checked = [_checked_message(index, message) for index, message in enumerate(messages)]
    if in_parts:
        for message in checked:
            if isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return checked


def _checked_tools(tools: object) -> object:
    if tools is None or (
        isinstance(tools, Sequence)
        and not isinstance(tools, str)
        and all(isinstance(tool, Mapping) for tool in tools)
    ):
        return tools
    raise UsageError("tools must be a list of JSON schemas of functions")


def _checked_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} must be an object with role and content, not {message!r}")
    # Protocols use null for missing values, but templates test whether the key is present.
    result = {key: value for key, value in message.items() if value is not None}
    role = result.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where} must have a role, such as user or assistant")
    if "content" in result:
        result["content"] = _text(f"{where}.content", result["content"])
    elif not result.get("tool_calls"):
        raise UsageError(f"{where} must have a content (only a message with tool_calls may not)")
    return result


def _text(where: str, content: object) -> str | list[dict[str, str]]:
    """The text, or the texts of the parts joined by newlines, since templates of text models expect
    a text. If there are images, the list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UsageError(f"{where} must be a text or a list of text parts, not {content!r}")
    if any(part == _IMAGE for part in content):
        return [
            _IMAGE if it == _IMAGE else _part(f"{where}[{i}]", it) for i, it in enumerate(content)
        ]
    return "\n".join(_part(f"{where}[{i}]", it)["text"] for i, it in enumerate(content))


def _part(where: str, part: object) -> dict[str, str]:
    text = part.get("text") if isinstance(part, Mapping) else None
    if (
        not isinstance(part, Mapping)
        or not isinstance(text, str)
        or part.get("type", "text") != "text"
    ):
        raise UsageError(
            f'{where} must be {{"type": "text", "text": ...}}: this model reads text only'
        )
    return {"type": "text", "text": text}


def _plain(what: str, value: object) -> Any:
    """A copy of JSON types only, since a template could call the methods of other objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} must be plain JSON data: {error}") from error
