"""How a server answers and what it logs, as users give it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.core.flags import check_fields, flag, parse_object

_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How requests are read and answers written, where a request does not say."""

    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None,
        "Variables of the chat template for requests that do not set them, such as "
        "'{\"enable_thinking\": false}'.",
        panel="Answers",
        metavar="<json>",
        parse=parse_object,
    )
    chat_template_content_format: str = flag(
        "auto",
        "What a template gets as a message's content: string (auto is so, too), or openai, a list "
        "of parts.",
        choices=("auto", "string", "openai"),
        hidden=True,
    )
    trust_request_chat_template: bool = flag(
        False, "Let requests bring a chat template of their own.", hidden=True
    )
    trust_request_lora: bool = flag(
        False,
        "Let requests load adapters from folders of this machine, and unload them.",
        hidden=True,
    )
    response_role: str = flag(
        "assistant", "Role of the messages that the server answers with.", hidden=True
    )
    max_logprobs: int = flag(
        20,
        "Most alternatives for a token that a request may ask for (400).",
        at_least=0,
        at_most=1000,
        hidden=True,
    )
    return_tokens_as_token_ids: bool = flag(
        False, "Write token_id:N in place of the texts of tokens in logprobs.", hidden=True
    )
    enable_force_include_usage: bool = flag(
        False, "End every stream with its usage, asked for or not.", hidden=True
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What the server logs and measures.

    Attributes:
        log_prompts: prompts and outputs may be in the log.
        log_config_file: JSON for `logging.config.dictConfig`, applied after all else.
    """

    log_level: str = flag("info", "debug, info, warning or error.", panel="Log", choices=_LEVELS)
    log_json: bool = flag(False, "Log one JSON object per line.")
    log_prompts: bool = flag(False, "Log prompts and outputs, too.")
    metrics_prefix: str = flag(
        "slipstream",
        "Names of the metrics: vllm uses vLLM's names and labels where the meaning is the same, "
        "for dashboards made for it.",
        choices=("slipstream", "vllm"),
    )
    enable_log_requests: bool = flag(
        False,
        "Log the sampling parameters of each request as it comes; with --log-level debug its "
        "prompt, too.",
        hidden=True,
    )
    enable_log_outputs: bool = flag(False, "Log outputs, and not prompts.", hidden=True)
    max_log_len: int | None = flag(
        None, "Log at most so many characters of a prompt or an output.", at_least=0, hidden=True
    )
    disable_log_stats: bool = flag(
        False, "Leave out the line about the engine, which comes every ten seconds.", hidden=True
    )
    uvicorn_log_level: str | None = flag(
        None,
        "Level of uvicorn's own messages: as --log-level, or critical or trace. [--log-level]",
        choices=(*_LEVELS, "critical", "trace"),
        hidden=True,
    )
    disable_uvicorn_access_log: bool = flag(
        False, "Leave out the line about each HTTP request.", hidden=True
    )
    log_config_file: Path | None = flag(
        None,
        "JSON for Python's logging.config.dictConfig, applied after the other flags.",
        metavar="<file>",
        hidden=True,
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))

    def config(self) -> dict[str, Any] | None:
        """What `log_config_file` holds; UsageError if that is no JSON object."""
        file = self.log_config_file
        if file is None:
            return None
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--log-config-file {file} cannot be read: {error}") from None
        return parse_object("--log-config-file", text)
