"""One server of the demo with its draft, for all these tests, and what it should say."""

from collections.abc import Iterator

import openai
import pytest

from slipstream import LLM
from tests.serve.api.live import DEMO, Live, serving


@pytest.fixture(scope="package")
def live() -> Iterator[Live]:
    with serving(names=("demo", "other-name")) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def offline() -> LLM:
    """An engine like the server's, used without one."""
    return LLM(DEMO)
