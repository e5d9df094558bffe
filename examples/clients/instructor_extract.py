"""Instructor: validated objects by a JSON schema, by a tool call, and streamed in parts."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")


class Function(BaseModel):
    """What is known of a function."""

    model_config = ConfigDict(extra="forbid")  # or a tiny model adds fields without end
    language: Literal["Python", "C++"]
    pure: bool
    arguments: Literal[1, 2, 3]


messages = [{"role": "user", "content": "Describe: def add(a, b): return a + b"}]
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    given = {"model": MODEL, "messages": messages, "temperature": 0, "max_retries": 0}
    print(mode, client.chat.completions.create(response_model=Function, **given))

parts = client.chat.completions.create_partial(response_model=Function, **given)
print("last of the parts:", [*parts][-1])
