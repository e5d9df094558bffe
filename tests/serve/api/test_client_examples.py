"""The examples of clients whose packages the tests have; `scripts/clients` runs all of them."""

import runpy
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
def test_example_prints_what_it_should(
    name: str, live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_URL", live.url)
    monkeypatch.setenv("SLIPSTREAM_MODEL", "demo")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")["client"].close()
    printed = capsys.readouterr().out
    for text in SEEN[name]:
        assert text in printed
