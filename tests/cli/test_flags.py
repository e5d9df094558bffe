"""From flags to the engine's options and sampling parameters."""

import json
from dataclasses import dataclass

import pytest
import typer

from slipstream.cli.drafter_flags import DrafterFlags
from slipstream.cli.errors import run
from slipstream.cli.flags import add_commands
from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import flag, parse_bytes
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.llm import LLM
from tests.cli.conftest import CommandLine
from tests.cli.fake_llm import FakeLLM

DEMO_DRAFT = {"model": "demo/draft"}


def options_of(fake_llm: type[FakeLLM]) -> dict[str, object]:
    return fake_llm.made[-1].options


def test_the_modules_of_the_demo_are_pointed_to(slipstream: CommandLine) -> None:
    for flags in (("--drafter", "mtp"), ("--spec-method", "mtp")):
        ran = slipstream("generate", "--prompt", "x", *flags)
        assert ran.code == 2
        assert "give --drafter demo/mtp" in ran.err


def test_nothing_given_is_the_demo_with_its_draft(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    assert slipstream("generate", "--prompt", "x").code == 0
    expected = EngineConfig(model="demo", speculative_config=DEMO_DRAFT)
    assert options_of(fake_llm) == vars(expected)
    assert fake_llm.made[-1].params == SamplingParams(temperature=0.0, max_tokens=128)


def test_every_engine_flag_arrives(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    line = (
        "generate some/model --prompt x --tokenizer t --revision r --dtype float32 --device cpu "
        "--load-format dummy --quantization fp8 --batch-invariant --max-model-len 99 "
        "--max-num-seqs 3 --max-num-batched-tokens 77 --block-size 8 --kv-cache-dtype int8 "
        "--kv-cache-memory 512M --no-enable-prefix-caching --engine-seed 5 --use-fp64-gumbel "
        "--gpu-memory-utilization 0.5 -tp 1 --enforce-eager --no-async-scheduling "
        "--trust-remote-code"
    )
    assert slipstream(*line.split()).code == 0
    assert options_of(fake_llm) == vars(
        EngineConfig(
            model="some/model",
            tokenizer="t",
            revision="r",
            dtype="float32",
            device="cpu",
            load_format="dummy",
            quantization="fp8",
            batch_invariant=True,
            max_model_len=99,
            max_num_seqs=3,
            max_num_batched_tokens=77,
            block_size=8,
            kv_cache_dtype="int8",
            kv_cache_memory=512 << 20,
            enable_prefix_caching=False,
            seed=5,
            use_fp64_gumbel=True,
            gpu_memory_utilization=0.5,
            enforce_eager=True,
            async_scheduling=False,
            trust_remote_code=True,
        )
    )
    assert slipstream("generate", "--prompt", "x", "--num-kv-blocks", "12").code == 0
    assert options_of(fake_llm)["num_kv_blocks"] == 12


def test_every_sampling_flag_arrives(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    line = (
        "generate --json --prompt x --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 "
        "--presence-penalty -1 --frequency-penalty 1 --repetition-penalty 1.5 --seed 3 -n 2 "
        "--max-tokens 9 --min-tokens 2 --stop a --stop b --ignore-eos --logprobs 2 "
        "--prompt-logprobs 1 --bad-words c --stop-token-ids 4 --stop-token-ids 5 "
        "--allowed-token-ids 6 --include-stop-str-in-output --no-skip-special-tokens"
    )
    assert slipstream(*line.split(), "--logit-bias", '{"8": -2.5}').code == 0
    assert fake_llm.made[-1].params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        seed=3,
        n=2,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        bad_words=("c",),
        stop_token_ids=(4, 5),
        allowed_token_ids=(6,),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logit_bias={8: -2.5},
    )


def test_chat_has_defaults_of_its_own(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    assert slipstream("chat", stdin=b"hi\n").code == 0
    assert fake_llm.made[-1].params == SamplingParams(temperature=0.7, max_tokens=512)


@pytest.mark.parametrize("hyphens", ["--max-model-len", "--max_model_len", "--max-model_len"])
def test_hyphens_equal_underscores(
    slipstream: CommandLine, fake_llm: type[FakeLLM], hyphens: str
) -> None:
    assert slipstream("generate", "--prompt", "x", hyphens, "50").code == 0
    assert slipstream("generate", "--prompt", "x", f"{hyphens}=50").code == 0
    assert [llm.options["max_model_len"] for llm in fake_llm.made] == [50, 50]


def test_the_last_of_contradictory_flags_counts(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    flags = ("--enforce-eager", "--no-enforce-eager")
    slipstream("generate", "--prompt", "x", *flags, "--max-model-len", "9", "--max-model-len", "8")
    slipstream("generate", "--prompt", "x", *reversed(flags))
    assert [llm.options["enforce_eager"] for llm in fake_llm.made] == [False, True]
    assert fake_llm.made[0].options["max_model_len"] == 8


def test_values_keep_their_underscores(slipstream: CommandLine, fake_llm: type[FakeLLM]) -> None:
    slipstream("generate", "--prompt", "--max_model_len", "--prompt=a_b", "--stop", "c_d")
    llm = fake_llm.made[-1]
    assert llm.prompts == ["--max_model_len", "a_b"]
    assert llm.params is not None
    assert llm.params.stop == ("c_d",)


def test_the_line_of_the_draft_model_pull_request(
    slipstream: CommandLine, fake_llm: type[FakeLLM]
) -> None:
    config = {
        "model": "Qwen/Qwen3-1.7B",
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "max_model_len": 20000,
    }
    for spelling in ("--speculative-config", "--speculative_config", "-sc"):
        ran = slipstream(
            "generate", "Qwen/Qwen3-32B", spelling, json.dumps(config), "--prompt", "x"
        )
        assert ran.code == 0
        assert options_of(fake_llm)["model"] == "Qwen/Qwen3-32B"
        assert options_of(fake_llm)["speculative_config"] == config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("m", None),
        ("m --no-speculation", {"num_speculative_tokens": 0}),  # m may name a target of its own
        ("m -k 3", {"num_speculative_tokens": 3}),
        ("demo/draft --no-speculation", None),
        ("--no-speculation", None),
        ("-k 2", {"model": "demo/draft", "num_speculative_tokens": 2}),
        ("--num_speculative_tokens 2", {"model": "demo/draft", "num_speculative_tokens": 2}),
        ("m --drafter d", {"model": "d"}),
        ("m --drafter d -k auto", {"model": "d", "num_speculative_tokens": "auto"}),
        ("m --drafter d -k 3", {"model": "d", "num_speculative_tokens": 3}),
        ("m --drafter ngram -k 3", {"method": "ngram", "num_speculative_tokens": 3}),
        ("--drafter ngram", {"method": "ngram"}),
        ("m --drafter mtp -k 2", {"method": "mtp", "num_speculative_tokens": 2}),
        ("m --drafter suffix", {"method": "suffix"}),
        ("m --spec-method ngram --spec-tokens 5", {"method": "ngram", "num_speculative_tokens": 5}),
        ("--spec-method ngram --drafter ngram", {"method": "ngram"}),
        (
            "m --spec-method draft_model --spec-model d --spec-tokens 5",
            {"method": "draft_model", "model": "d", "num_speculative_tokens": 5},
        ),
        (
            "m --drafter d --drafter-quantization fp8",
            {"model": "d", "quantization": "fp8"},
        ),
        (
            "--drafter-quantization fp8",
            {"model": "demo/draft", "quantization": "fp8"},
        ),
        ("--speculative-config null", None),
        (
            '-sc [{"method":"ngram"},{"model":"d"}]',
            {"drafters": [{"method": "ngram"}, {"model": "d"}]},
        ),
        ("-k 0", {"model": "demo/draft", "num_speculative_tokens": 0}),
    ],
)
def test_ways_to_choose_a_drafter(
    slipstream: CommandLine,
    fake_llm: type[FakeLLM],
    line: str,
    expected: dict[str, object] | None,
) -> None:
    ran = slipstream("generate", *line.split(), "--prompt", "x")
    assert ran.code == 0, ran.err
    assert options_of(fake_llm)["speculative_config"] == expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--drafter d --speculative-config {}", ["--drafter", "--speculative-config"]),
        ("-k 3 --speculative-config {}", ["-k", "--speculative-config"]),
        ("--spec-method ngram -sc {}", ["--spec-method", "--speculative-config"]),
        ("--no-speculation --speculative-config {}", ["--no-speculation", "--speculative-config"]),
        ("--drafter d --no-speculation", ["--drafter", "--no-speculation"]),
        ("-k 3 --no-speculation", ["-k", "--no-speculation"]),
        ("demo/draft -k 3", ["-k", "--drafter"]),
        ("--drafter eagle3", ["eagle3 is a method", "--drafter"]),
        ("demo/draft --drafter-quantization fp8", ["--drafter-quantization", "--drafter"]),
        ("-sc {} --drafter-quantization fp8", ["--drafter-quantization", "--speculative-config"]),
        ("--quantization int3", ["quantization", "fp8"]),
        ("-sc {oops", ["--speculative-config", "not JSON"]),
        ("-sc [1]", ["--speculative-config", "JSON object"]),
        ("--logit-bias [1]", ["--logit-bias", "JSON object"]),
        ("--logit-bias {", ["--logit-bias", "not JSON"]),
        ('--logit-bias {"x":1}', ["--logit-bias", "token ids"]),
        ('--logit-bias {"1":"x"}', ["logit_bias"]),
        ("--logprobs 1", ["--logprobs", "--json"]),
        ("--temperature -1", ["temperature"]),
        ("--temperature warm", ["--temperature"]),
        ("--kv-cache-dtype int3", ["--kv-cache-dtype", "int8"]),
        ("--kv-cache-memory lots", ["--kv-cache-memory", "4GiB"]),
        ("--kv-cache-memory 1G --num-kv-blocks 4", ["kv_cache_memory", "num_kv_blocks"]),
        ("-tp 0", ["--tensor-parallel-size"]),
        ("--device tpu", ["--device"]),
        ("--no-such-flag", ["--no-such-flag", "generate --help"]),
        ("-hf a/b", ["no such flag: -hf;", "as the argument: slipstream generate MODEL"]),
        ("-m a.gguf", ["no such flag: -m;", "as the argument: slipstream generate MODEL"]),
        ("--model a.gguf", ["no such flag: --model;", "as the argument"]),
        ("-ngl 99", ["no such flag: -ngl;", "generate --help"]),
        ("--drafter NGRAM", ["NGRAM", "--drafter ngram"]),
        ("--drafter Eagle3", ["eagle3 is a method", "--drafter"]),
    ],
)
def test_wrong_flags_are_one_sentence_and_exit_code_2(
    slipstream: CommandLine, fake_llm: type[FakeLLM], line: str, named: list[str]
) -> None:
    ran = slipstream("generate", "--prompt", "x", *line.split())
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("slipstream: ")
    assert ran.err.count("\n") == 1
    for name in named:
        assert name in ran.err
    assert fake_llm.made == []  # found before anything was loaded


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123", 123),
        ("512M", 512 << 20),
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        ("2GB", 2_000_000_000),
        ("1.5K", 1536),
        ("7 B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("--size", text) == size


def test_the_json_of_a_benchmark_is_a_file(slipstream: CommandLine) -> None:
    for command in ("serve", "latency", "throughput", "sweep", "advise"):
        ran = slipstream("bench", command, "--json")
        assert (ran.code, ran.out) == (2, "")
        assert "did you mean --output-json?" in ran.err


def test_a_list_of_drafters_may_have_spaces() -> None:
    flags = DrafterFlags(speculative_config=' [ {"method": "ngram"} ]')
    assert flags.config("demo") == {"drafters": [{"method": "ngram"}]}


def test_a_given_method_is_not_overruled_by_the_demo() -> None:
    assert DrafterFlags(spec_method="ngram").config("demo") == {"method": "ngram"}
    with pytest.raises(UsageError, match="-k"):
        DrafterFlags(num_speculative_tokens=2).config("demo/draft")


def test_a_field_of_a_config_is_a_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        share: float = flag(0.5, "A share.", also=("-s",), above=0, at_most=1)
        names: tuple[str, ...] = flag(())
        internal: int = 3

    taken = []

    def command(*, config: Config) -> None:
        taken.append(config)

    app = typer.Typer()
    add_commands(app, command)
    assert run(app, ["-s", "0.25", "--names", "a", "--names", "b"]) == 0
    assert run(app, ["--share", "2"]) == 2
    assert run(app, ["--internal", "4"]) == 2
    assert taken == [Config(share=0.25, names=("a", "b"))]


def test_a_whole_config_goes_without_options() -> None:
    with pytest.raises(UsageError, match="device: set this in the EngineConfig"):
        LLM(EngineConfig(), device="cpu")
