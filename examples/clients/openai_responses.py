"""Responses with the openai package: one that continues another, streamed, and a JSON schema."""

import os

from openai import OpenAI

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
given = {"model": MODEL, "temperature": 0, "max_output_tokens": 128}

first = client.responses.create(**given, input="Write a function that adds two numbers.")
print(first.id, first.status, first.output_text, sep="\n")

with client.responses.stream(
    **given, input="Now one that subtracts.", previous_response_id=first.id
) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print("\nusage:", stream.get_final_response().usage)

schema = {
    "type": "object",
    "properties": {"language": {"enum": ["Python", "C++"]}, "lines": {"enum": [1, 2, 3]}},
    "required": ["language", "lines"],
    "additionalProperties": False,
}
text = {"format": {"type": "json_schema", "name": "facts", "schema": schema, "strict": True}}
print(client.responses.create(**given, input="def add(a, b):", text=text).output_text)
