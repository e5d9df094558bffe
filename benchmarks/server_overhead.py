"""What the server costs: the same prompts through `LLM.generate` and through HTTP, in turn.

    python -m benchmarks.server_overhead [--concurrency 32] [--prompts 96] [--max-tokens 128] [-k 4]

One process holds one engine, which is used offline and served in turn, so that both meet the same
machine; the client streams every delta from a process of its own. Prints output tokens/s of both
and their ratio for every round, the medians, and the CPU seconds of each, which tell the cost also
where other work shares the machine. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any

import uvicorn
import uvloop

from slipstream import LLM, SamplingParams
from slipstream.core.config import EngineConfig
from slipstream.serve.app import create_app
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.listening import bind, connection_class
from slipstream.serve.memory import freeze_garbage_collection
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.model_service import ModelService
from slipstream.serve.observers import ActivityLog
from slipstream.serve.options import ServerOptions
from slipstream.serve.run import guarded

HELD_OUT = Path(__file__).parent.parent / "slipstream" / "demo" / "prompts" / "held_out.jsonl"


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--concurrency", type=int, default=32)
    cli.add_argument("--prompts", type=int, default=96)
    cli.add_argument("--max-tokens", type=int, default=128)
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--threads", type=int, default=1)
    cli.add_argument("--device", default="auto")
    cli.add_argument("--dtype", default="float32")
    cli.add_argument("--switch-interval", type=float, default=sys.getswitchinterval())
    cli.add_argument("-k", type=int, default=4)
    options = cli.parse_args()
    sys.setswitchinterval(options.switch_interval)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Comparison(options).run())


class _Comparison:
    """One engine, offline and served."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        drafter = {"model": "demo/draft", "num_speculative_tokens": options.k}
        self._engine_options: dict[str, Any] = {
            "speculative_config": drafter if options.k else None,
            "dtype": options.dtype,
            "device": options.device,
            "threads": options.threads,
            "max_num_seqs": options.concurrency,
        }
        self._llm = LLM("demo", **self._engine_options)
        texts = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
        prompts = [it.get("prompt") or it["messages"][0]["content"] for it in texts]
        self._prompts = (prompts * options.prompts)[: options.prompts]
        self._params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
        self._num_tokens = options.prompts * options.max_tokens
        self._folder = Path(tempfile.mkdtemp())

    async def run(self) -> None:
        """Measure both in turn, this number of times."""
        sock = bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        thread, model, server = self._server()
        thread.start()
        serving = asyncio.create_task(server.serve([sock]))
        self._llm.generate(self._prompts[: self._options.concurrency], self._params)  # warm-up
        freeze_garbage_collection()  # as the server does; offline gains by it too
        rounds = []
        for number in range(self._options.rounds):
            offline, served = self._offline(), await self._served(port)
            same = offline.pop("texts") == served.pop("texts")
            ratio = served["tokens_per_second"] / offline["tokens_per_second"]
            cpu = offline["cpu_seconds"] / served["cpu_seconds"]
            rounds.append({"offline": offline, "served": served, "ratio": ratio, "cpu_ratio": cpu})
            print(
                f"round {number}: offline {offline['tokens_per_second']:.0f} tokens/s, served "
                f"{served['tokens_per_second']:.0f}, ratio {ratio:.3f}; CPU "
                f"{offline['cpu_seconds']:.2f} and {served['cpu_seconds']:.2f} s, of which the "
                f"event loop {served['loop_seconds']:.2f}; texts {'equal' if same else 'DIFFER'}",
                flush=True,
            )
        server.should_exit = True
        await serving
        await thread.stop()
        model.close()
        self._report(rounds)

    def _report(self, rounds: list[dict[str, Any]]) -> None:
        medians = {
            "offline_tokens_per_second": median(
                it["offline"]["tokens_per_second"] for it in rounds
            ),
            "served_tokens_per_second": median(it["served"]["tokens_per_second"] for it in rounds),
            "ratio": median(it["ratio"] for it in rounds),
            "cpu_ratio": median(it["cpu_ratio"] for it in rounds),
        }
        print("medians: " + ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
        print(json.dumps({"options": vars(self._options), "medians": medians, "rounds": rounds}))

    def _offline(self) -> dict[str, Any]:
        began, cpu = perf_counter(), process_time()
        outputs = self._llm.generate(self._prompts, self._params)
        seconds = perf_counter() - began
        return {
            "tokens_per_second": self._num_tokens / seconds,
            "cpu_seconds": process_time() - cpu,
            "texts": [output.outputs[0].text for output in outputs],
        }

    async def _served(self, port: int) -> dict[str, Any]:
        bodies, result = self._folder / "bodies.json", self._folder / "result.json"
        common = {
            "max_tokens": self._options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        bodies.write_text(json.dumps([{"prompt": prompt, **common} for prompt in self._prompts]))
        cpu, loop = process_time(), thread_time()
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.lean_client", str(port), str(self._options.concurrency)),
            *(str(bodies), str(result)),
        )
        if await client.wait():
            raise SystemExit("the client failed")
        measured = json.loads(result.read_text())
        return {
            "tokens_per_second": self._num_tokens / measured["seconds"],
            "cpu_seconds": process_time() - cpu,
            "loop_seconds": thread_time() - loop,
            "client_seconds": measured["cpu_seconds"],
            "chunks": measured["chunks"],
            "texts": measured["texts"],
        }

    def _server(self) -> tuple[EngineThread, ModelService, uvicorn.Server]:
        """The server of `slipstream serve`, on this process's event loop."""
        engine, options = self._llm.engine, ServerOptions(served_model_name=("demo",))
        metrics = ServerMetrics(engine, "demo")
        thread = EngineThread(engine, options.limits, [metrics, ActivityLog()])
        config = EngineConfig(model="demo", **self._engine_options)
        model = ModelService(options=options, config=config, engine=engine, thread=thread)
        app, _ = guarded(create_app(model, metrics), options)
        server = _Server(
            uvicorn.Config(
                app,
                http=connection_class(options.limits),
                ws="none",
                log_config=None,
                access_log=False,
            )
        )
        return thread, model, server


class _Server(uvicorn.Server):
    """Leaves the signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


if __name__ == "__main__":
    main()
