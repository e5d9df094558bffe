"""What a step costs by the number of its draft tokens, in one engine.

    python -m benchmarks.verification_cost --target gpt-oss-120b --draft gpt-oss-120b-eagle3

Steps are captured for every K from 0 to --most, so that a step of K drafts computes K + 1 rows of a
request. Columns are those of `gpu_decode`; the limit counts the experts that the rows touched. The
acceptance length is forced to 1 + 0.45 K, which changes how much text a step gives and not what it
costs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.decode_timing import Method, Setup, make_engine, measure_batch, prompt_maker
from benchmarks.geometries import geometry_named
from benchmarks.gpu_decode import HEADINGS, show
from slipstream.engine import assembly
from slipstream.engine.draft_policy import FixedPolicy


@dataclass(frozen=True)
class _EveryWidth(FixedPolicy):
    """A fixed number of drafts, with steps for every number up to it."""

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(range(self.num_speculative_tokens + 1))


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    setup = Setup(
        target=given.target,
        draft=given.draft,
        num_speculative_tokens=given.most,
        acceptance_length=1 + 0.45 * given.most,
        load_format=given.load_format,
        options={"device": given.device} if given.device else {},
    )
    sizes = tuple(int(size) for size in given.batch_sizes.split(","))
    method = Method(sizes, given.prompt, given.short, given.long, given.repeat)
    assembly.FixedPolicy = _EveryWidth  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        llm = make_engine(setup, method, Path(folder))
        prompts = prompt_maker(geometry_named(given.target)["vocab_size"], given.prompt)
        print(f"{given.target} + {given.draft}, prompt {given.prompt}\n{HEADINGS}", flush=True)
        for batch in sizes:
            for count in range(given.most + 1):
                own = replace(setup, num_speculative_tokens=count)
                show(measure_batch(llm, own, method, batch, prompts))
    return 0


def _parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--target", default="gpt-oss-120b")
    cli.add_argument("--draft", default="gpt-oss-120b-eagle3")
    cli.add_argument("--load-format", choices=["dummy", "twin"], default="twin")
    cli.add_argument("--most", type=int, default=7, help="draft tokens")
    cli.add_argument("--batch-sizes", default="1,8,32")
    cli.add_argument("--prompt", type=int, default=512)
    cli.add_argument("--short", type=int, default=16)
    cli.add_argument("--long", type=int, default=80)
    cli.add_argument("--repeat", type=int, default=1)
    cli.add_argument("--device", choices=["cpu", "cuda"])
    return cli


if __name__ == "__main__":
    sys.exit(main())
