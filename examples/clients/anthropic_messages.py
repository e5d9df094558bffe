"""The Messages protocol with the anthropic package: an answer, a stream, a forced tool call."""

import os

from anthropic import Anthropic

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

client = Anthropic(base_url=URL, api_key="none")  # without /v1: the package adds it
messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
given = {"model": MODEL, "messages": messages, "max_tokens": 128}
greedy = {"temperature": 0}  # newer versions of the package do not name it

answer = client.messages.create(**given, system="Be brief.", extra_body=greedy)
print(answer.content[0].text, answer.stop_reason, answer.usage.output_tokens, sep="\n")

with client.messages.stream(**given, extra_body=greedy) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()

city = {"enum": ["Rome", "Oslo"]}
schema = {
    "type": "object",
    "properties": {"city": city},
    "required": ["city"],
    "additionalProperties": False,
}
tool = {"name": "get_weather", "description": "Weather.", "input_schema": schema}
choice = {"type": "any", "disable_parallel_tool_use": True}
called = client.messages.create(**given, tools=[tool], tool_choice=choice)
print(called.stop_reason, called.content[0].name, called.content[0].input)

print(client.messages.count_tokens(model=MODEL, messages=messages))
