"""The one test to run before every commit: a drafted request gives the plain output."""

from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import Prompt


def test_a_drafted_request_gives_the_plain_output(tiny_target: str, tiny_draft: str) -> None:
    prompt: Prompt = {"prompt_token_ids": [5, 9, 14, 5, 9]}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=16).generate(prompt, params)
    config = {"model": tiny_draft, "num_speculative_tokens": 3}
    llm = LLM(tiny_target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=16)
    drafted = llm.generate(prompt, params)
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert drafted[0].metrics.num_accepted_tokens > 0
