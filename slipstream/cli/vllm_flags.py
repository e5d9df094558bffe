"""The flags of `vllm serve`: supported, spelled differently, accepted without effect, or refused.

Names and meanings are those of vLLM 0.26 and of scripts for versions before it. A name that is in
none of the tables is a flag of `slipstream serve` with the same meaning.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from slipstream.cli.vllm_refused import ONE_GPU, REFUSED
from slipstream.core.errors import UsageError
from slipstream.core.flags import parse_object, read_text

SHORT: Final = {
    "-ac": "--attention-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-r": "--node-rank",
}
"""Short forms of flags of `ENTRIES`."""


@dataclass(frozen=True)
class Spelling:
    """Another spelling of flags of `slipstream serve`.

    Attributes:
        means: a description of the replacement.
        expand: (flag, value) -> the arguments that replace it; UsageError for unsupported values.
        switch: whether it takes no value.
    """

    means: str
    expand: Callable[[str, str], list[str]]
    switch: bool = False


@dataclass(frozen=True)
class NoEffect:
    """Accepted without effect, because it describes what the server does anyway.

    Attributes:
        why: the end of a sentence: the server's behaviour, and the remedy if another is wanted.
        values: the values that describe it; None for a switch, which does when it is on.
    """

    why: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Unsupported:
    """Not supported.

    Attributes:
        why: the reason, and the nearest alternative.
        switch: it may be given as `--no-NAME`, which is accepted.
    """

    why: str
    switch: bool = False


Entry = Spelling | NoEffect | Unsupported


def _renamed(flag: str) -> Spelling:
    return Spelling(f"`{flag}`", lambda _, value: [flag, value])


def _shutdown(_: str, value: str) -> list[str]:
    # In vLLM 0 means to end requests at once; here it means no limit.
    return ["--drain-timeout", value if value.strip("0.") else "0.001"]


def _backend(flag: str, value: str) -> list[str]:
    if value not in ("auto", "guidance", "llguidance"):
        raise UsageError(
            f"{flag} {value} is not supported: llguidance compiles all grammars; give auto or "
            "guidance, or leave it out"
        )
    return []


def _structured(flag: str, text: str) -> list[str]:
    config = parse_object(flag, text) or {}
    parser = config.pop("reasoning_parser", None)
    _backend(f"{flag} backend", str(config.pop("backend", "auto")))
    for name, value in config.items():
        if value is not False:
            raise UsageError(
                f"{flag} {name} {json.dumps(value)} is not supported: JSON has some white space, "
                "schemas count as they are, and grammars begin after the reasoning; leave it out"
            )
    return ["--reasoning-parser", str(parser)] if parser else []


def _config(flag: str, file: str) -> list[str]:
    """The arguments in a YAML file: flags by their names, MODEL as `model`."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            f"{flag} needs the package pyyaml; install it, or give the flags"
        ) from None
    try:
        given = yaml.safe_load(read_text(flag, file))
    except yaml.YAMLError as error:
        raise UsageError(f"{flag} {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"{flag} {file} must have one flag a line, such as `port: 8000`")
    return [it for name, value in given.items() for it in _arguments(f"--{name}", value)]


def _arguments(flag: str, value: object) -> list[str]:
    """A flag with a value of a YAML document."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else negated(flag)]
    if isinstance(value, list) and all(isinstance(it, int) for it in value):
        return [f"{flag}={','.join(map(str, value))}"]
    if isinstance(value, list) and all(isinstance(it, str) for it in value):
        return [f"{flag}={it}" for it in value]
    text = json.dumps(value) if isinstance(value, list | Mapping) else str(value)
    return [f"{flag}={text}"]


_SPELLINGS: Final[Mapping[str, Spelling]] = {
    "model": Spelling("the argument `MODEL`", lambda _, model: [model]),
    "config": Spelling(
        "a YAML file of flags, `port: 8000`, and `model:`; the command line takes precedence",
        _config,
    ),
    "disable-log-requests": Spelling(
        "`--no-enable-log-requests`", lambda _, __: ["--no-enable-log-requests"], switch=True
    ),
    "language-model-only": Spelling(
        """`--limit-mm-per-prompt '{"image": 0}'`""",
        lambda _, __: ["--limit-mm-per-prompt", '{"image": 0}'],
        switch=True,
    ),
    "seed": _renamed("--engine-seed"),
    "shutdown-timeout": Spelling(
        "`--drain-timeout`; 0 ends requests at once, as in vLLM", _shutdown
    ),
    "structured-outputs-config": Spelling(
        "`backend` auto or guidance (llguidance compiles all grammars), and `reasoning_parser`; "
        "other keys may be false",
        _structured,
    ),
    "guided-decoding-backend": Spelling("auto or guidance: llguidance is the backend", _backend),
}

_ONE = ("1",)
_NONE = ("0", "0.0")
_NO_EFFECT: Final[Mapping[str, NoEffect]] = {
    "aggregate-engine-logging": NoEffect("there is one engine, which the log's line is about"),
    "allow-deprecated-quantization": NoEffect("every format that can be read may be used"),
    "api-server-count": NoEffect("one process answers HTTP, and the engine has a thread", _ONE),
    "convert": NoEffect("models generate; embeddings and scores are not served", ("auto", "none")),
    "cpu-offload-gb": NoEffect(
        "weights stay on their device; --quantization makes them smaller", _NONE
    ),
    "data-parallel-rank": NoEffect(ONE_GPU, ("0",)),
    "data-parallel-size-local": NoEffect(ONE_GPU, _ONE),
    "data-parallel-start-rank": NoEffect(ONE_GPU, ("0",)),
    "decode-context-parallel-size": NoEffect(ONE_GPU, _ONE),
    "disable-cascade-attn": NoEffect("there is no cascade attention"),
    "disable-custom-all-reduce": NoEffect("the engine chooses how GPUs exchange sums"),
    "disable-frontend-multiprocessing": NoEffect("the engine is a thread of the server's process"),
    "distributed-executor-backend": NoEffect(ONE_GPU, ("uni", "mp")),
    "enable-auto-tool-choice": NoEffect(
        "models choose tools freely unless a request's tool_choice says otherwise; send none there"
    ),
    "enable-prompt-tokens-details": NoEffect("usage always has prompt_tokens_details"),
    "enable-reasoning": NoEffect("reasoning is separated where the model's format is known"),
    "enable-request-id-headers": NoEffect("every answer has X-Request-Id"),
    "enable-server-load-tracking": NoEffect("/load always counts"),
    "enable-tokenizer-info-endpoint": NoEffect("/tokenizer_info is always there"),
    "exclude-tools-when-tool-choice-none": NoEffect("tools that may not be called are not written"),
    "fingerprint-mode": NoEffect("answers have no system_fingerprint", ("none",)),
    "kv-offloading-size": NoEffect("the KV cache stays on its device", _NONE),
    "linear-backend": NoEffect("each device has one kernel for each op", ("auto",)),
    "log-error-stack": NoEffect("the log has the traceback of every internal error"),
    "model-impl": NoEffect("each family has one implementation, the engine's own", ("auto",)),
    "moe-backend": NoEffect("each device has one kernel for each op", ("auto",)),
    "nnodes": NoEffect(ONE_GPU, _ONE),
    "node-rank": NoEffect(ONE_GPU, ("0",)),
    "num-scheduler-steps": NoEffect("every step is scheduled by itself", _ONE),
    "offload-backend": NoEffect("weights stay on their device", ("auto",)),
    "performance-mode": NoEffect(
        "throughput and latency are balanced by --max-num-seqs and -k auto", ("balanced",)
    ),
    "pipeline-parallel-size": NoEffect(ONE_GPU, _ONE),
    "preemption-mode": NoEffect("what is preempted is computed again", ("recompute",)),
    "prefill-context-parallel-size": NoEffect(ONE_GPU, _ONE),
    "prefill-schedule-interval": NoEffect("every step may read prompts", _ONE),
    "runner": NoEffect("models generate; embeddings are not served", ("auto", "generate")),
    "scheduler-cls": NoEffect("there is one scheduler", ("auto",)),
    "scheduler-reserve-full-isl": NoEffect("a request waits until its whole prompt has room"),
    "swap-space": NoEffect(
        "nothing is swapped out: what is preempted is computed again; leave it out", _NONE
    ),
    "task": NoEffect("models generate; embeddings are not served", ("auto", "generate")),
    "ubatch-size": NoEffect("batches are not split", ("0",)),
    "use-tqdm-on-load": NoEffect("progress bars are shown on a terminal"),
    "use-v2-block-manager": NoEffect("there is one block manager"),
    "watermark": NoEffect("no blocks are kept free; lower --max-num-seqs for that", _NONE),
    "worker-cls": NoEffect("there is one kind of worker", ("auto",)),
}


def _entries() -> dict[str, Entry]:
    entries: dict[str, Entry] = {**_SPELLINGS, **_NO_EFFECT}
    for why, names in REFUSED.items():
        for name in names.split():
            plain = name.removesuffix("!")
            assert plain not in entries, plain
            entries[plain] = Unsupported(why, plain != name)
    return {f"--{name}": entry for name, entry in entries.items()}


ENTRIES: Final = _entries()
"""Flags that `slipstream serve` lacks, by name (`--swap-space`)."""


def arguments_for(name: str, value: str | None, off: bool = False) -> list[str]:
    """The arguments that replace a flag of `ENTRIES`; none if its value is the default here.

    Args:
        value: None for a switch.
        off: it is given as `--no-NAME`.

    Raises:
        UsageError: the flag is refused, or asks for something that is not supported.
    """
    entry = ENTRIES[name]
    if off:
        if isinstance(entry, Unsupported) and entry.switch:
            return []
        if isinstance(entry, Spelling) and entry.switch:
            on = entry.expand(name, "")
            is_negated = on[0].startswith("--no-")
            return [it.replace("--no-", "--", 1) for it in on] if is_negated else []
        if isinstance(entry, Spelling) or takes_value(name):
            raise UsageError(f"no such flag: {negated(name)}; {name} takes a value")
        raise UsageError(f"{negated(name)} is not supported: {entry.why}")
    if isinstance(entry, Unsupported):
        raise UsageError(f"{name} is not supported: {entry.why}")
    if value is not None and not takes_value(name):
        raise UsageError(f"{name} takes no value; it has the form {negated(name)}")
    if isinstance(entry, Spelling):
        return entry.expand(name, value or "")
    if entry.values is not None and value not in entry.values:
        so = " or ".join(entry.values)
        raise UsageError(f"{name} {value} is not supported, {so} is: {entry.why}")
    return []


def negated(name: str) -> str:
    """`--no-NAME`."""
    return name.replace("--", "--no-", 1)


def takes_value(name: str) -> bool:
    """Whether a flag of `ENTRIES` that is not refused has a value."""
    entry = ENTRIES[name]
    if isinstance(entry, Spelling):
        return not entry.switch
    return isinstance(entry, NoEffect) and entry.values is not None
