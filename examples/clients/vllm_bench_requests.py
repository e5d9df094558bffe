"""The requests of `vllm bench serve`, by its own module; vLLM's other modules are not imported.

Needs vLLM's files on the path (`pip install --no-deps vllm`), and aiohttp, regex and tqdm.
"""

import asyncio
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import aiohttp

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

vllm = find_spec("vllm")  # found, not imported: that would load torch and all of vLLM
if vllm is None or not vllm.submodule_search_locations:
    print("vLLM's files are not installed")
    sys.exit(77)  # scripts/clients counts it as skipped
file = Path(vllm.submodule_search_locations[0]) / "benchmarks/lib/endpoint_request_func.py"
spec = spec_from_file_location("endpoint_request_func", file)
requests = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(requests)


async def ask(session: aiohttp.ClientSession, backend: str, path: str) -> None:
    """Send four requests at once and print what the benchmark would count."""
    given = requests.RequestFuncInput(
        prompt="def add(a, b):",
        api_url=f"{URL}/v1/{path}",
        prompt_len=7,
        output_len=32,
        model=MODEL,
        ignore_eos=True,
        extra_body={"temperature": 0},
    )
    send = requests.ASYNC_REQUEST_FUNCS[backend]
    for answer in await asyncio.gather(*(send(given, session) for _ in range(4))):
        assert answer.success, answer.error
        print(f"{backend}: {answer.output_tokens} tokens, first {1000 * answer.ttft:.1f} ms")


async def main() -> None:
    """Ask by both protocols."""
    async with aiohttp.ClientSession() as session:
        await ask(session, "openai", "completions")
        await ask(session, "openai-chat", "chat/completions")


asyncio.run(main())
