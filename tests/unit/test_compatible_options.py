"""Options of other engines: each has its effect, or is refused with what to do instead."""

from typing import Any

import pytest

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.core.flags import parse_count
from slipstream.core.step_form import CapturedForm


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_chunked_prefill": False}, "must be true, not False; raise max_num_batched"),
        ({"tokenizer_mode": "slow"}, "one of auto, hf, not 'slow'; make a tokenizer.json"),
        ({"config_format": "mistral"}, "use the checkpoint in its Hugging Face form"),
        ({"load_format": "pt"}, "convert other weights to safetensors"),
        ({"safetensors_load_strategy": "lazy"}, "never mapped"),
        ({"prefix_caching_hash_algo": "xxhash"}, "faster digests may collide"),
        ({"attention_backend": "FLASHINFER"}, "leave this out to take the device's own"),
        ({"logprobs_mode": "processed_logprobs"}, "after temperature and penalties"),
        ({"max_cudagraph_capture_size": 8}, "must be at least max_num_seqs"),
        ({"cudagraph_capture_sizes": (0,)}, r"positive integers, not \(0,\)"),
        ({"compilation_config": {"cudagraph_capture_sizes": "x"}}, "positive integers, not x"),
        ({"compilation_config": [3]}, "compilation_config must be a mapping"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a mapping"),
        ({"compilation_config": {"pass_config": {}}}, "pass_config is not supported"),
        ({"hf_overrides": {"rope_theta": 1}, "rope_theta": 2.0}, "rope_theta is given by itself"),
        ({"hf_overrides": "x"}, "hf_overrides must be a mapping"),
    ],
    ids=str,
)
def test_what_is_not_so_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        EngineConfig(**options)


def test_older_spellings_join_hf_overrides() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    config = EngineConfig(rope_scaling=rope, rope_theta=5e5, hf_overrides={"tie": True})
    assert config.hf_overrides == {"tie": True, "rope_scaling": rope, "rope_theta": 5e5}


def test_compilation_says_what_is_captured() -> None:
    assert EngineConfig().enforce_eager is None
    assert EngineConfig(optimization_level=3).enforce_eager is None
    assert EngineConfig(optimization_level=0).enforce_eager
    assert EngineConfig(compilation_config={"mode": 3, "cudagraph_mode": "NONE"}).enforce_eager
    config = EngineConfig(compilation_config={"cudagraph_capture_sizes": [8, 2, 99]})
    assert config.cudagraph_capture_sizes == (8, 2, 99)
    form = CapturedForm(20, (0,), False, sizes=config.cudagraph_capture_sizes)
    assert form.buckets == [2, 8, 20]


def test_counts_are_read_as_people_write_them() -> None:
    texts = ("8192", "8k", "8K", "1.5k", "auto", "-1")
    read = [parse_count("--max-model-len", text) for text in texts]
    assert read == [8192, 8000, 8192, 1500, None, None]
    with pytest.raises(UsageError, match="--max-model-len must be a number such as"):
        parse_count("--max-model-len", "8x")
