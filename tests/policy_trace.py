"""Steps of the demo with K "auto" that were recorded: what was drafted and accepted, and costs.

    python -m tests.policy_trace

records them anew, in some seconds.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.core.batch import StepReport

FILE = Path(__file__).with_suffix(".json")
MOST = 4  # requests, and draft tokens of each
_PROMPTS = Path(__file__).parents[1] / "slipstream" / "demo" / "prompts" / "held_out.jsonl"
_NUM_STEPS, _NUM_PROMPTS = 80, 12


class Trace(NamedTuple):
    """What was recorded.

    Attributes:
        costs: `CostModel.state`, as measured when the engine started.
        steps: for each step (number of the request, tokens drafted, tokens accepted) of each
            request that decoded.
    """

    costs: dict[str, Any]
    steps: list[list[tuple[int, int, int]]]


def read() -> Trace:
    """The recorded trace."""
    found = json.loads(FILE.read_text("utf-8"))
    return Trace(found["costs"], [[(*it,) for it in step] for step in found["steps"]])


def record() -> None:
    """Run the demo, and write the steps with the most drafts."""
    from slipstream import LLM, SamplingParams

    options = {"model": "demo/draft", "num_speculative_tokens": "auto"}
    llm = LLM("demo", speculative_config=options, max_num_seqs=MOST, threads=1)
    policy, steps = llm.engine.scheduler.policy, list[list[tuple[int, int, int]]]()
    costs, observe, numbers = llm.engine._costs.state(), policy.observe, dict[str, int]()

    def noted(report: StepReport) -> None:
        pairs = zip(report.batch.requests, report.committed, strict=True)
        found = [
            (
                numbers.setdefault(item.request.request_id, len(numbers)),
                gain.num_draft_tokens,
                gain.num_accepted,
            )
            for item, gain in pairs
            if not (item.admitted or item.is_prompt_chunk)
        ]
        if found:
            steps.append(found)
        observe(report)

    policy.observe = noted  # type: ignore[method-assign]
    lines = _PROMPTS.read_text("utf-8").splitlines()
    prompts = [json.loads(line) for line in lines if "prompt" in json.loads(line)]
    texts = [it["prompt"] for it in prompts[:_NUM_PROMPTS]]
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
        for _, temperature, length in zip(texts, 4 * (0.0, 0.3, 1.0), 6 * (48, 96), strict=True)
    ]
    llm.generate(texts, params)
    first = max(range(len(steps) - _NUM_STEPS), key=lambda it: _drafted(steps[it:]))
    text = json.dumps({"costs": costs, "steps": steps[first : first + _NUM_STEPS]})
    state = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
    FILE.write_text(json.dumps(state, separators=(",", ":")) + "\n")


def _drafted(steps: list[list[tuple[int, int, int]]]) -> int:
    """The number of tokens that were drafted in the first steps."""
    return sum(drafted for step in steps[:_NUM_STEPS] for _, drafted, _ in step)


if __name__ == "__main__":
    record()
