"""docs/protocol.md has every field of requests, as they are read."""

import re

from scripts.protocol_fields import PAGE, page, table
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.protocol.completions import CompletionRequest


def test_the_table_of_fields_is_that_of_the_types() -> None:
    """`python -m scripts.protocol_fields` writes it."""
    assert PAGE.read_text() == page()
    named = {*re.findall(r"^\| `(\w+)`", table(), re.MULTILINE)}
    assert named == ChatRequest.field_names() | CompletionRequest.field_names()
    for row in (
        "| `seed` | both | integer | random",
        "| `temperature` | both | number from 0",
        "| `max_tokens` | both | completions: integer of at least 0; chats: integer of at least 1",
    ):
        assert row in table()
