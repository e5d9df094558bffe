"""Nothing is left behind by requests that ended, however they ended."""

import gc
import random
from pathlib import Path

from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import EncodedPrompt

NUM_REQUESTS = 600


def test_no_block_slot_or_memory_leaks(tiny_target: str, tiny_draft: str) -> None:
    config = {"model": tiny_draft, "num_speculative_tokens": 3}
    llm = LLM(
        tiny_target,
        speculative_config=config,
        skip_tokenizer_init=True,
        num_kv_blocks=40,
        block_size=8,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=128,
    )
    engine, scheduler = llm.engine, llm.engine.scheduler
    chance = random.Random(0)
    live: set[str] = set()
    resident: list[int] = []
    for number in range(NUM_REQUESTS):
        engine.add(str(number), random_prompt(chance), random_params(chance))
        live.add(str(number))
        while len(live) > 12:
            live -= {s.request_id for s in engine.step() if s.finished}
            if chance.random() < 0.15:
                victim = chance.choice(sorted(live)) if live else ""
                engine.abort(victim)
                live.discard(victim)
        if number % 100 == 0:
            scheduler.check_invariants()
        if number % 150 == 149:
            gc.collect()
            resident.append(resident_bytes())
    while engine.has_unfinished:
        engine.step()
    scheduler.check_invariants()
    blocks = scheduler.block_manager
    assert blocks.num_available == blocks.num_blocks
    assert not scheduler.num_running
    assert not scheduler.num_waiting
    assert resident[-1] - resident[1] < 8 << 20, resident


def random_prompt(chance: random.Random) -> EncodedPrompt:
    shared = [3, 1, 4, 1, 5, 9, 2, 6] * chance.randint(0, 4)
    own = [chance.randint(1, 95) for _ in range(chance.randint(1, 30))]
    return EncodedPrompt(None, shared + own, ())


def random_params(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        n=chance.choice([1, 1, 1, 2]),
        temperature=chance.choice([0.0, 1.0]),
        top_k=chance.choice([0, 5]),
        presence_penalty=chance.choice([0.0, 0.5]),
        max_tokens=chance.randint(1, 30),
        logprobs=chance.choice([None, None, 1]),
        num_speculative_tokens=chance.choice([None, 0, 1]),
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
