"""A flag is a promise: whoever adds or drops one does it here as well."""

import re
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine

COMMON = "--debug --help -h"
RUN = "--verbose -v"
ENGINE = """
    --allowed-local-media-path --allowed-media-domains --limit-mm-per-prompt
    --mm-processor-cache-gb --mm-processor-kwargs
    --enable-lora --tensor-parallel-size -tp --data-parallel-size -dp
    --enable-expert-parallel -ep
    --batch-invariant --block-size --device --download-dir --dtype --enable-prefix-caching
    --enforce-eager --engine-seed --generation-config --gpu-memory-utilization --hf-overrides
    --hf-token --kv-cache-dtype --kv-cache-memory --kv-cache-memory-bytes --load-format
    --long-prefill-token-threshold --max-model-len --max-num-batched-tokens --max-num-seqs
    --no-enable-prefix-caching
    --no-enforce-eager --num-gpu-blocks-override --num-kv-blocks --num-state-checkpoints
    --override-generation-config --quantization --revision --threads --tokenizer -q
"""
DRAFTER = """
    --drafter --drafter-quantization --no-speculation --num-speculative-tokens --spec-method
    --spec-model --spec-tokens --speculative-config -k -sc
"""
REQUEST_SAMPLING = """
    --frequency-penalty --ignore-eos --max-tokens --min-p --presence-penalty --repetition-penalty
    --seed --temperature --top-k --top-p -t
"""
SAMPLING = f"""
    {REQUEST_SAMPLING} --allowed-token-ids --bad-words --include-stop-str-in-output --logit-bias
    --min-tokens --no-skip-special-tokens --skip-special-tokens --stop --stop-token-ids
"""
DATASET = """
    --category --dataset --dataset-name --dataset-path --input-len --num-prompts --output-len
    --prompts --random-input-len --random-output-len --random-prefix-len --random-range-ratio
    --random-vocab-size
"""
BENCH = f"{COMMON} {REQUEST_SAMPLING} {DATASET} --output --output-json --profile"
OFFLINE = f"{BENCH} {ENGINE} {RUN} --profile-steps"
DATA = f"""
    {COMMON} --data --device --dtype --generate --generate-batch --generate-minutes
    --generate-prompt-tokens --generate-tokens --lora --max-length --out --revision --seed
    --temperatures
"""
TRAIN = f"""
    {DATA} --accumulate --argmax-weight --aux-layers --batch-size --checkpoint-every --clip
    --draft-vocab-size --drop-rate --features --head-dim --hidden-size --init --intermediate-size
    --learning-rate --log-every --mask-token --max-feature-gb --minutes --norm-before-fc
    --norm-before-residual --norm-output --num-heads --num-kv-heads --num-layers
    --num-speculative-tokens --place-decay --share-embedding --share-head --steps --validate-every
    --validation --warmup --weight-decay -k
"""
SERVE = f"""
    {COMMON} {ENGINE} {DRAFTER}
    --lora-modules --allow-synthetic --allowed-origins --api-key --chat-template --cors-origin
    --default-chat-template-kwargs --drain-timeout --enable-profiling
    --host --keep-alive-timeout --log-json --log-level --log-prompts --max-body-bytes
    --metrics-prefix
    --max-connections --max-header-bytes --max-json-values --max-queue
    --max-stored-bytes --max-stored-responses --max-waiting --port
    --receive-timeout --request-timeout --root-path --send-timeout --served-model-name
    --ssl-certfile --ssl-keyfile --tool-call-parser --reasoning-parser --uds
"""
FLAGS = {
    "generate": f"""
        {COMMON} {RUN} {ENGINE} {DRAFTER} {SAMPLING} --choice --grammar --json --json-object
        --json-schema --logprobs --n --prompt --prompt-file --prompt-logprobs --regex -n
    """,
    "chat": f"{COMMON} {RUN} {ENGINE} {DRAFTER} {SAMPLING} --chat-template --image --system",
    "serve": f"{SERVE} {RUN}",
    "deploy": f"""
        {SERVE} --image --manifest --max-replicas --name --replica-cpus --replica-gpus --replicas
        --routing --target-queue-time --wait-timeout
    """,
    "inspect": f"{COMMON} {ENGINE} {DRAFTER} --costs --json --target",
    "list": f"{COMMON} --download-dir --json",
    "doctor": f"{COMMON} --json",
    "bench serve": f"""
        {BENCH} --api-key --backend --base-url --burstiness --compare-texts --endpoint --extra-body
        --goodput --header --host --max-concurrency --metric-percentiles --model
        --no-return-speculation --num-speculative-tokens --num-warmups --percentile-metrics --plot
        --port --ready-timeout --request-rate --request-timeout --result-dir --result-filename
        --return-speculation --save-detailed --save-result --save-texts --tokenizer --turns -k
    """,
    "bench latency": f"{OFFLINE} {DRAFTER} --batch-size --num-iters --num-iters-warmup",
    "bench throughput": f"{OFFLINE} {DRAFTER} --save-texts",
    "bench sweep": f"""
        {OFFLINE} --batch-sizes --concurrency --drafter --num-speculative-tokens --plot -k
    """,
    "train data": DATA,
    "train eagle3": TRAIN,
    "train draft": TRAIN,
}


@pytest.mark.parametrize("command", FLAGS)
def test_the_list_of_flags_is_frozen(slipstream: CommandLine, command: str) -> None:
    ran = slipstream(*command.split(), "--help")
    assert ran.code == 0
    assert flags_in(ran.out) == set(FLAGS[command].split())


@pytest.mark.parametrize("command", [name for name in FLAGS if name.startswith("bench ")])
def test_the_flags_of_benchmarks_are_documented(command: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
    of_the_engine = {*f"{COMMON} {RUN} {ENGINE} {DRAFTER}".split(), "--return-speculation"}
    own = set(FLAGS[command].split()) - of_the_engine
    missing = [flag for flag in sorted(own) if not re.search(rf"`[^`]*{flag}\b", text)]
    assert missing == []


def flags_in(page: str) -> set[str]:
    """The flags that a help page declares: they begin the lines below its headings."""
    sections = re.split(r"^\S.*:$", page, flags=re.MULTILINE)[1:]
    lines = [line for section in sections for line in section.splitlines()]
    declared = [line.split("<")[0] for line in lines if line.startswith("  -")]
    words = [word.strip(",") for line in declared for word in line.split("   ")[0].split()]
    return {word for word in words if word.startswith("-")}
