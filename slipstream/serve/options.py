"""The options of a server, as users give them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.core.errors import UsageError
from slipstream.core.flags import check_fields, flag, parse_object, rare_flag, read_text
from slipstream.serve.limits import ServeLimits

_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Defaults for reading requests and writing answers."""

    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None,
        "Variables of the chat template for requests that do not set them, such as "
        "'{\"enable_thinking\": false}'.",
        panel="Answers",
    )
    chat_template_content_format: str = rare_flag(
        "auto",
        "Form of a message's content in chat templates: string (also auto), or openai, a list "
        "of parts.",
        choices=("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = rare_flag(
        False, "Let requests bring a chat template of their own."
    )
    trust_request_lora: bool = rare_flag(
        False, "Let requests load adapters from folders of this machine, and unload them."
    )
    response_role: str = rare_flag(
        "assistant", "Role of the messages that the server answers with."
    )
    max_logprobs: int = rare_flag(
        20,
        "Maximum number of logprobs per token that a request may ask for, else 400.",
        at_least=0,
        at_most=1000,
    )
    return_tokens_as_token_ids: bool = rare_flag(
        False, "Write token_id:N in place of the texts of tokens in logprobs."
    )
    enable_force_include_usage: bool = rare_flag(
        False, "End every stream with its usage, even if the request does not ask for it."
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What the server logs and measures."""

    log_level: str = flag("info", "debug, info, warning or error.", panel="Log", choices=_LEVELS)
    log_json: bool = flag(False, "Log one JSON object per line.")
    log_prompts: bool = flag(False, "Log prompts and outputs, too.")
    metrics_prefix: str = flag(
        "slipstream",
        "Names of the metrics: vllm uses vLLM's names and labels where the meaning is the same, "
        "for dashboards made for it.",
        choices=("slipstream", "vllm"),
    )
    enable_log_requests: bool = rare_flag(
        False,
        "Log the sampling parameters of each request as it comes; with --log-level debug its "
        "prompt, too.",
    )
    enable_log_outputs: bool = rare_flag(False, "Log outputs, and not prompts.")
    max_log_len: int | None = rare_flag(
        None, "Maximum number of characters of a prompt or an output in the log.", at_least=0
    )
    disable_log_stats: bool = rare_flag(
        False, "Do not log a line about the engine every ten seconds."
    )
    uvicorn_log_level: str | None = rare_flag(
        None,
        "Level of uvicorn's own messages: as --log-level, or critical or trace. [--log-level]",
        choices=(*_LEVELS, "critical", "trace"),
    )
    disable_uvicorn_access_log: bool = rare_flag(False, "Do not log a line for each HTTP request.")
    log_config_file: Path | None = rare_flag(
        None, "JSON for Python's logging.config.dictConfig, applied after the other flags."
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))

    def config(self) -> dict[str, Any] | None:
        """What `log_config_file` holds; UsageError if that is no JSON object."""
        if self.log_config_file is None:
            return None
        name = "--log-config-file"
        return parse_object(name, read_text(name, self.log_config_file))


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server: where it listens, under which names, for whom, and how it answers.

    Attributes:
        replica: identifies this server among replicas of the model; a part of response ids.
    """

    host: str = flag(
        "127.0.0.1", "Address to listen on; 0.0.0.0 is open to the network.", panel="Listening"
    )
    port: int = flag(8000, "0 takes a free port.", at_least=0, at_most=65535)
    served_model_name: tuple[str, ...] = flag(
        (),
        "Name of the model in requests (repeatable); answers have the first. [MODEL, or what a "
        "GGUF file is called without .gguf]",
        metavar="<name>",
    )
    api_key: tuple[str, ...] = flag(
        (),
        "Accept only requests with one of these keys (repeatable); better given in the "
        "environment, as SLIPSTREAM_API_KEY.",
        metavar="<key>",
        envvar="SLIPSTREAM_API_KEY",
    )
    uds: Path | None = flag(
        None, "Listen on a Unix domain socket at this path, in place of host and port."
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "Allow web pages of this origin to use the server (repeatable, or a JSON list); * allows "
        "all. [none]",
        metavar="<origin>",
        also=("--cors-origin",),
    )
    allowed_methods: tuple[str, ...] = rare_flag(
        (),
        "Methods that pages of allowed origins may use (repeatable, or a JSON list); * allows all. "
        "[GET, POST]",
        metavar="<method>",
    )
    allowed_headers: tuple[str, ...] = rare_flag(
        (),
        "Headers that pages of allowed origins may send (repeatable, or a JSON list). [*]",
        metavar="<header>",
    )
    allow_credentials: bool = rare_flag(
        False, "Let pages of allowed origins send cookies and the like."
    )
    ssl_certfile: Path | None = flag(None, "Serve HTTPS with this certificate (PEM).")
    ssl_keyfile: Path | None = flag(None, "The certificate's key. [in the certificate's file]")
    ssl_ca_certs: Path | None = rare_flag(
        None, "Authorities that may have signed clients' certificates (PEM)."
    )
    ssl_cert_reqs: int = rare_flag(
        0,
        "Clients' certificates: 0 does not ask for them, 1 accepts them, 2 requires them.",
        at_least=0,
        at_most=2,
    )
    ssl_ciphers: str | None = rare_flag(
        None, "Ciphers up to TLS 1.2, as OpenSSL writes them. [uvicorn's]"
    )
    root_path: str = flag(
        "", "Path under which a proxy offers this server, such as /models/a.", metavar="<path>"
    )
    enable_profiling: Path | None = flag(
        None,
        "Let clients profile the server (POST /start_profile, /stop_profile); traces are written "
        "to this folder.",
        metavar="<folder>",
    )
    profiler_config: Mapping[str, Any] | None = rare_flag(
        None, 'A folder for traces as {"torch_profiler_dir": FOLDER}; clients may then profile.'
    )
    disable_fastapi_docs: bool = rare_flag(
        False, "Do not serve /openapi.json; there are no documentation pages."
    )
    allow_synthetic: bool = flag(
        False,
        "Allow rejection_sample_method synthetic, for benchmarks: the texts are not the model's.",
    )
    lora_modules: tuple[str, ...] = flag(
        (),
        "An adapter that requests may name as their model (repeatable), with --enable-lora.",
        metavar="<name=folder>",
    )
    tool_call_parser: str | None = flag(
        None,
        "Format of tool calls: hermes, qwen3_coder, glm45, llama3_json, pythonic, mistral or "
        "openai. [found from the checkpoint]",
        panel="Answers",
    )
    reasoning_parser: str | None = flag(
        None,
        "qwen3, glm45, deepseek_r1, mistral or openai_gptoss; none leaves a model's reasoning in "
        "the content. [found from the checkpoint]",
    )
    chat_template: str | None = flag(
        None,
        "A chat template in place of the checkpoint's: a file, or the text of one.",
        metavar="<file>",
    )
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    limits: ServeLimits = field(default_factory=ServeLimits)
    log: LogOptions = field(default_factory=LogOptions)
    replica: str = ""

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if not all(key.strip() == key and key.isascii() and key for key in self.api_key):
            raise UsageError("an API key must be non-empty ASCII text without spaces around it")
        if not all(self.served_model_name):
            raise UsageError("--served-model-name must not be empty; leave it out to serve MODEL")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path[-1] == "/"):
            raise UsageError(
                f"--root-path must begin with a slash and not end with one, not {self.root_path!r}"
            )

    def for_replica(self, replica: str) -> "ServerOptions":
        """The options of a replica, which a front asks by plain HTTP."""
        return replace(
            self,
            replica=replica,
            ssl_certfile=None,
            ssl_keyfile=None,
            ssl_ca_certs=None,
            ssl_cert_reqs=0,
            ssl_ciphers=None,
        )
