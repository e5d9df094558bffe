"""The examples of clients whose packages the tests have; `scripts/clients` runs all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.api.live import Live

EXAMPLES = Path(__file__).parents[3] / "examples" / "clients"
SEEN = {
    "openai_chat": ("the stream is equal: True", """{"city": "Rome"}', name='get_weather'"""),
    "openai_completions": ("def add(a, b):", "def reverse(items):", "('def', None), (' add', -"),
    "openai_responses": ("completed", "input_tokens=86", '"language"'),
    "anthropic_messages": ("end_turn", "tool_use get_weather {'city': '", "input_tokens=20"),
}


@pytest.mark.parametrize("name", SEEN)
def test_example_prints_what_it_should(name: str, live: Live) -> None:
    environment = {**os.environ, "SLIPSTREAM_URL": live.url, "SLIPSTREAM_MODEL": "demo"}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    for text in SEEN[name]:
        assert text in ran.stdout
