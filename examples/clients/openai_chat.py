"""Chat with the openai package: a whole answer, a stream, and a forced tool call."""

import os

from openai import OpenAI

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
given = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 48}

answer = client.chat.completions.create(**given)
print(answer.choices[0].message.content)

parts = []
for chunk in client.chat.completions.create(
    **given,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"return_speculation": True},  # beyond the protocol
):
    if chunk.choices:
        parts.append(chunk.choices[0].delta.content or "")
    else:
        print("usage:", chunk.usage)
print("the stream is equal:", "".join(parts) == answer.choices[0].message.content)

city = {"enum": ["Rome", "Oslo"]}
schema = {
    "type": "object",
    "properties": {"city": city},
    "required": ["city"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
called = client.chat.completions.create(**given, tools=[tool], tool_choice="required")
print(called.choices[0].message.tool_calls[0].function)
