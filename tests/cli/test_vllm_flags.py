"""Every flag of `vllm serve` is honoured, so already, or refused with a reason."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from scripts.from_vllm_page import DECLARED, PAGE, page, serve_options
from slipstream.cli.vllm_flags import ENTRIES, SHORT, NoEffect, Unsupported, arguments_for
from slipstream.cli.vllm_line import rewritten, unknown_flag
from slipstream.core.errors import UsageError
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import FakeLLM
from tests.cli.started import Started

NAMES = (Path(__file__).parent / "vllm_flag_names.txt").read_text().split("# ")
COMMON, OLDER, REST = (
    [f"--{name}" for name in part.split()]
    for part in (
        NAMES[2].removeprefix("Common"),
        NAMES[3].removeprefix("Of versions before"),
        NAMES[4].removeprefix("The rest"),
    )
)
ALL = dict.fromkeys([*COMMON, *OLDER, *REST])

# The effect of each supported flag on the options: (arguments, attribute, value).
EFFECTS: dict[str, tuple[str, str, Any]] = {
    "--model": ("some/model", "config.model", "some/model"),
    "--host": ("127.0.0.2", "host", "127.0.0.2"),
    "--port": ("0", "options.served_model_name", ("demo",)),
    "--uds": ("{tmp}/s", "host", "{tmp}/s"),
    "--api-key": ("k", "options.api_key", ("k",)),
    "--served-model-name": ("a", "options.served_model_name", ("a",)),
    "--dtype": ("float32", "config.dtype", "float32"),
    "--max-model-len": ("1k", "config.max_model_len", 1000),
    "--max-num-seqs": ("7", "config.max_num_seqs", 7),
    "--max-num-batched-tokens": ("1K", "config.max_num_batched_tokens", 1024),
    "--long-prefill-token-threshold": ("256", "config.long_prefill_token_threshold", 256),
    "--gpu-memory-utilization": ("0.5", "config.gpu_memory_utilization", 0.5),
    "--kv-cache-memory-bytes": ("1G", "config.kv_cache_memory", 1 << 30),
    "--kv-cache-dtype": ("int8", "config.kv_cache_dtype", "int8"),
    "--num-gpu-blocks-override": ("9", "config.num_kv_blocks", 9),
    "--block-size": ("32", "config.block_size", 32),
    "--enable-prefix-caching": ("", "config.enable_prefix_caching", True),
    "--prefix-caching-hash-algo": ("sha256", "config.prefix_caching_hash_algo", "sha256"),
    "--enable-chunked-prefill": ("", "config.enable_chunked_prefill", True),
    "--async-scheduling": ("", "config.async_scheduling", True),
    "--limit-mm-per-prompt": ('{"image":2}', "config.max_images", 2),
    "--mm-processor-kwargs": ('{"size":{}}', "config.mm_processor_kwargs", {"size": {}}),
    "--mm-processor-cache-gb": ("0.5", "config.mm_processor_cache_gb", 0.5),
    "--allowed-local-media-path": ("d", "config.allowed_local_media_path", "d"),
    "--allowed-media-domains": ("a.b,c.d", "config.allowed_media_domains", ("a.b", "c.d")),
    "--enforce-eager": ("", "config.enforce_eager", True),
    "--cudagraph-capture-sizes": ("1 2 4", "config.cudagraph_capture_sizes", (1, 2, 4)),
    "--max-cudagraph-capture-size": ("64", "config.max_cudagraph_capture_size", 64),
    "--optimization-level": ("0", "config.optimization_level", 0),
    "--compilation-config": ('{"cudagraph_mode":"NONE"}', "config.enforce_eager", True),
    "--attention-backend": ("CPU_ATTN", "config.attention_backend", "CPU_ATTN"),
    "--tensor-parallel-size": ("2", "config.tensor_parallel_size", 2),
    # Several replicas: tests/deploy/test_command.py.
    "--data-parallel-size": ("1", "config.data_parallel_size", 1),
    "--enable-expert-parallel": ("", "config.enable_expert_parallel", True),
    "--quantization": ("int8", "config.quantization", "int8"),
    "--load-format": ("dummy", "config.load_format", "dummy"),
    "--download-dir": ("d", "config.download_dir", "d"),
    "--revision": ("r", "config.revision", "r"),
    "--hf-token": ("t", "config.hf_token", "t"),
    "--hf-overrides": ('{"a":1}', "config.hf_overrides", {"a": 1}),
    "--hf-config-path": ("c", "config.hf_config_path", "c"),
    "--tokenizer": ("t", "config.tokenizer", "t"),
    "--tokenizer-mode": ("hf", "config.tokenizer_mode", "hf"),
    "--tokenizer-revision": ("r", "config.tokenizer_revision", "r"),
    "--skip-tokenizer-init": ("", "config.skip_tokenizer_init", True),
    "--trust-remote-code": ("", "config.trust_remote_code", True),
    "--config": ("{tmp}/file.yaml", "config.max_num_seqs", 3),
    "--seed": ("5", "config.seed", 5),
    "--speculative-config": ('{"method":"ngram"}', "drafter", {"method": "ngram"}),
    "--spec-model": ("d", "drafter", {"model": "d"}),
    "--spec-method": ("ngram", "drafter", {"method": "ngram"}),
    "--spec-tokens": ("2", "drafter", {"model": "demo/draft", "num_speculative_tokens": 2}),
    "--use-fp64-gumbel": ("", "config.use_fp64_gumbel", True),
    "--generation-config": ("vllm", "config.generation_config", "vllm"),
    "--override-generation-config": (
        '{"top_k":1}',
        "config.override_generation_config",
        {"top_k": 1},
    ),
    "--chat-template": ("{{messages}}", "options.chat_template", "{{messages}}"),
    "--chat-template-content-format": (
        "openai",
        "options.answers.chat_template_content_format",
        "openai",
    ),
    "--default-chat-template-kwargs": (
        '{"a":false}',
        "options.answers.default_chat_template_kwargs",
        {"a": False},
    ),
    "--trust-request-chat-template": ("", "options.answers.trust_request_chat_template", True),
    "--tool-call-parser": ("hermes", "options.tool_call_parser", "hermes"),
    "--reasoning-parser": ("openai_gptoss", "options.reasoning_parser", "openai_gptoss"),
    "--structured-outputs-config": (
        '{"backend":"guidance","reasoning_parser":"openai_gptoss"}',
        "options.reasoning_parser",
        "openai_gptoss",
    ),
    "--response-role": ("bot", "options.answers.response_role", "bot"),
    "--return-tokens-as-token-ids": ("", "options.answers.return_tokens_as_token_ids", True),
    "--max-logprobs": ("50", "options.answers.max_logprobs", 50),
    "--logprobs-mode": ("raw_logits", "config.logprobs_mode", "raw_logits"),
    "--scheduling-policy": ("priority", "config.scheduling_policy", "priority"),
    "--stream-interval": ("4", "options.limits.stream_interval", 4),
    "--enable-log-requests": ("", "options.log.enable_log_requests", True),
    "--disable-log-stats": ("", "options.log.disable_log_stats", True),
    "--enable-log-outputs": ("", "options.log.enable_log_outputs", True),
    "--max-log-len": ("9", "options.log.max_log_len", 9),
    "--log-config-file": (
        "{tmp}/log.json",
        "options.log.log_config_file",
        Path("{tmp}/log.json"),
    ),
    "--uvicorn-log-level": ("trace", "options.log.uvicorn_log_level", "trace"),
    "--disable-uvicorn-access-log": ("", "options.log.disable_uvicorn_access_log", True),
    "--allowed-origins": ('["http://a"]', "options.allowed_origins", ("http://a",)),
    "--allowed-methods": ('["PUT","GET"]', "options.allowed_methods", ("PUT", "GET")),
    "--allowed-headers": ('["x"]', "options.allowed_headers", ("x",)),
    "--allow-credentials": ("", "options.allow_credentials", True),
    "--root-path": ("/m", "options.root_path", "/m"),
    "--shutdown-timeout": ("0", "options.limits.drain_timeout", 0.001),
    "--enable-force-include-usage": ("", "options.answers.enable_force_include_usage", True),
    "--profiler-config": (
        '{"profiler":"torch","torch_profiler_dir":"{tmp}/traces"}',
        "options.enable_profiling",
        Path("{tmp}/traces"),
    ),
    "--disable-fastapi-docs": ("", "options.disable_fastapi_docs", True),
    "--enable-lora": ("", "config.enable_lora", True),
    "--lora-modules": ("a=folder", "options.lora_modules", ("a=folder",)),
    "--max-loras": ("2", "config.max_loras", 2),
    "--max-lora-rank": ("64", "config.max_lora_rank", 64),
    # Flags of earlier versions, and all others.
    "--language-model-only": ("", "config.max_images", 0),
    "--disable-log-requests": ("", "options.log.enable_log_requests", False),
    "--guided-decoding-backend": ("guidance", "config.model", "demo"),
    "--config-format": ("hf", "config.config_format", "hf"),
    "--safetensors-load-strategy": ("prefetch", "config.safetensors_load_strategy", "prefetch"),
}
# With a certificate, in tests/serve/test_front.py.
TLS = ["keyfile", "certfile", "ca-certs", "cert-reqs", "ciphers"]


def test_every_flag_of_the_list_is_told_once() -> None:
    assert (len(COMMON), len(OLDER), len(REST)) == (90, 11, 184)
    assert sorted([*DECLARED, *ENTRIES]) == sorted(ALL)
    assert set(DECLARED) <= set(serve_options())
    assert not set(ENTRIES) & set(serve_options())
    assert set(SHORT.values()) <= set(ENTRIES)


def test_most_of_the_common_flags_work() -> None:
    refused = [name for name in COMMON if isinstance(ENTRIES.get(name), Unsupported)]
    assert len(COMMON) - len(refused) >= 80, refused
    so = [name for name in ALL if isinstance(ENTRIES.get(name), NoEffect)]
    tls = [f"--ssl-{name}" for name in TLS]
    honoured = [name for name in ALL if name not in so and name not in refused]
    tested = {*EFFECTS, *tls, *so}
    assert {name for name in honoured if not isinstance(ENTRIES.get(name), Unsupported)} <= tested


@pytest.mark.parametrize("name", EFFECTS)
def test_a_flag_that_is_honoured_has_its_effect(
    slipstream: CommandLine, started: Started, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file.yaml").write_text("max_num_seqs: 3\nport: 0\n")
    (tmp_path / "log.json").write_text('{"version": 1}')
    text, path, expected = EFFECTS[name]
    given = text.replace("{tmp}", str(tmp_path))
    values = given.split() if name == "--cudagraph-capture-sizes" else [given][: bool(given)]
    port = [] if name in ("--port", "--config") else ["--port", "0"]
    values += ["--enable-lora"] if name == "--lora-modules" else []
    ran = slipstream("serve", *port, name, *values)
    assert ran.code == 0, ran.err
    if isinstance(expected, str | Path):
        expected = type(expected)(str(expected).replace("{tmp}", str(tmp_path)))
    assert attrgetter(path)(started) == expected


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if isinstance(entry, NoEffect)]
)
def test_a_flag_that_is_so_is_accepted_and_its_contrary_is_not(name: str) -> None:
    entry = ENTRIES[name]
    assert isinstance(entry, NoEffect)
    if entry.values is None:
        assert arguments_for(name, None) == []
        with pytest.raises(UsageError, match=f"^{name.replace('--', '--no-', 1)} is not supported"):
            arguments_for(name, None, off=True)
        return
    for value in entry.values:
        assert rewritten(["m", name, value], []) == ["m"]
    with pytest.raises(UsageError, match=f"^{name} 77 is not supported"):
        rewritten([name, "77"], [])


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if isinstance(entry, Unsupported)]
)
def test_a_flag_that_is_refused_is_named_with_the_reason(name: str) -> None:
    entry = ENTRIES[name]
    assert isinstance(entry, Unsupported)
    for given in ([name], [f"{name}=1"], [name.replace("-", "_").replace("__", "--")]):
        with pytest.raises(UsageError) as caught:
            rewritten(["m", *given, "x"], [])
        assert str(caught.value) == f"{name} is not supported: {entry.why}"
    no = name.replace("--", "--no-", 1)
    if entry.switch:
        assert rewritten(["m", no], []) == ["m"]
    else:
        with pytest.raises(UsageError, match=f"^{no} is not supported"):
            rewritten(["m", no], [])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--max-cpu-loras 2", "--max-cpu-loras is not supported: adapters"),
        ("--max-cpu-lora 2", "did you mean --max-cpu-loras, which is not supported: adapters"),
        ("--lora-modules a=b", "--lora-modules goes with --enable-lora"),
        ("--trust-request-lora", "--trust-request-lora goes with --enable-lora"),
        ("--enable-lora --lora-modules a", "--lora-modules takes NAME=FOLDER"),
        ("--max-model-length 9", "did you mean --max-model-len?"),
        ("--max-modle-len 9", "did you mean --max-model-len?"),
        ("--tensor-parallel 1", "did you mean --tensor-parallel-size?"),
        ("--disable-prefix-caching", "did you mean --no-enable-prefix-caching?"),
        ("--min-num-seqs 2", "see slipstream serve --help"),
        ("--temperature 1", "see slipstream serve --help"),
        ("-dpn 2", "--data-parallel-rank 2 is not supported, 0 is: an engine runs on one"),
        ("--quantization-config.a 1", "--quantization-config is not supported"),
        ("--port.a 1", "--port takes no keys"),
        ("-sc {} -sc.method ngram", "whole and by its keys"),
        ("m --model n", "m and n are two models"),
        ("m --ctx-size 9", "no such flag: --ctx-size"),
        ("--no-port", "no such flag: --no-port"),
        ("--no-pipeline-parallel-size", "--pipeline-parallel-size takes a value"),
        ("--nnodes", "--nnodes needs a value"),
        ("m --api-key --enforce-eager", "--api-key needs a value, and --enforce-eager is a flag"),
        ("--model --port 0", "--model needs a value, and --port is a flag"),
        ("--enable-prefix-caching=False", "it has the form --no-enable-prefix-caching"),
        ("--task embed", "--task embed is not supported, auto or generate is"),
        ("--enable-reasoning=false", "--enable-reasoning takes no value"),
        ("--no-trust-remote-code=1", "--no-trust-remote-code takes no value"),
        ("--structured-outputs-config.backend xgrammar", "backend xgrammar is not supported"),
        ("--config /nowhere", "--config /nowhere cannot be read"),
        ("--profiler-config {}x", "--profiler-config is not JSON"),
        ('--profiler-config {"profiler":"cuda"}', "--enable-profiling FOLDER"),
        ("--log-config-file /nowhere", "--log-config-file /nowhere cannot be read"),
        ("--allowed-origins [1]", "--allowed-origins takes a text or a JSON list"),
        ("--ssl-ciphers x", "--ssl-ciphers goes with --ssl-certfile"),
    ],
)
def test_what_does_not_work_is_one_sentence(
    slipstream: CommandLine, started: Started, fake_llm: type[FakeLLM], line: str, told: str
) -> None:
    ran = slipstream("serve", *line.split())
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert told in ran.err
    assert fake_llm.made == []


def test_other_commands_tell_what_is_not_supported(slipstream: CommandLine) -> None:
    assert "adapters" in slipstream("generate", "--prompt", "x", "--max-cpu-loras", "1").err
    told = slipstream("generate", "--prompt", "x", "--shutdown-timeout", "1").err
    assert "slipstream serve alone accepts it" in told


def test_a_name_is_never_taken_for_one_of_another_meaning() -> None:
    flags = [name for name in serve_options() if name.startswith("--")]
    for name in flags:
        others = [it for it in flags if it != name]
        told = str(unknown_flag(name + "x", flags, "it"))
        assert not any(f"mean {it}?" in told for it in others if it not in (name, name + "s"))


@pytest.mark.parametrize(
    ("line", "path", "expected"),
    [
        ("-O3 -q int8 -tp 1", "config.quantization", "int8"),
        (
            "-sc.method ngram -sc.num_speculative_tokens=4",
            "drafter",
            {"method": "ngram", "num_speculative_tokens": 4},
        ),
        ("--hf-overrides.rope.factor 4.0", "config.hf_overrides", {"rope": {"factor": 4.0}}),
        ("--trust-remote-code --no-trust-remote-code", "config.trust_remote_code", False),
        ("--no-trust-remote-code --trust-remote-code", "config.trust_remote_code", True),
        ("--enable-log-requests --disable-log-requests", "options.log.enable_log_requests", False),
        ("--no-disable-log-requests", "options.log.enable_log_requests", True),
        ("--language-model-only", "config.max_images", 0),
        ("--no-language-model-only", "config.limit_mm_per_prompt", None),
        ("m --served-model-name a b --api-key k", "options.served_model_name", ("a", "b")),
        ("--served_model_name a m", "config.model", "m"),
        ("--structured-outputs-config.reasoning_parser none", "options.reasoning_parser", "none"),
    ],
)
def test_forms_that_vllm_has(
    slipstream: CommandLine, started: Started, line: str, path: str, expected: object
) -> None:
    ran = slipstream("serve", "--port", "0", *line.split())
    assert ran.code == 0, ran.err
    assert attrgetter(path)(started) == expected


def test_a_file_of_flags_counts_behind_the_command_line(
    slipstream: CommandLine, started: Started, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nport: 0\nmax-num-seqs: 3\nserved_model_name: [a, b]\nenforce-eager: true\n"
        "enable-prefix-caching: false\nuse-fp64-gumbel: true\ntrust-remote-code: true\n"
        "speculative-config: {method: ngram}\n"
        "tensor-parallel-size: 1\npipeline-parallel-size: 1\napi-key: null\n"
        "cudagraph-capture-sizes: [1, 2]\n"
    )
    ran = slipstream("serve", "--config", str(file), "--max-num-seqs", "5", "--no-use-fp64-gumbel")
    assert ran.code == 0, ran.err
    config = started.config
    assert (config.model, config.max_num_seqs, config.enforce_eager) == ("m", 5, True)
    assert (config.enable_prefix_caching, config.use_fp64_gumbel) == (False, False)
    assert config.trust_remote_code is True
    assert config.cudagraph_capture_sizes == (1, 2)
    assert started.options.served_model_name == ("a", "b")
    assert started.drafter == {"method": "ngram"}
    assert slipstream("serve", "n", "--config", str(file)).code == 0
    assert started.config.model == "n"
    file.write_text("hf-overrides.a: 1\nhf-overrides.b: {c: x}")
    assert slipstream("serve", "--port", "0", "--config", str(file)).code == 0
    assert started.config.hf_overrides == {"a": 1, "b": {"c": "x"}}
    for text in ("max-cpu-loras: 1", "- 1", "{", f"config: {file}"):
        file.write_text(text)
        assert slipstream("serve", "--config", str(file)).code == 2


def test_the_page_is_made_from_the_flags() -> None:
    """`python -m scripts.from_vllm_page` writes it."""
    text = page()
    assert PAGE.read_text() == text, "run python -m scripts.from_vllm_page"
    assert [name for name in ALL if f"`{name}" not in text] == []


def test_rare_flags_are_on_the_page() -> None:
    text = PAGE.read_text()
    options = {name: it for name, it in serve_options().items() if name in it.opts}
    hidden = [name for name, it in options.items() if it.hidden and name.startswith("--")]
    assert hidden
    assert [name for name in hidden if f"`{name}" not in text] == []
