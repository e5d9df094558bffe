"""LangChain's ChatOpenAI: an answer, a stream, a tool, and structured output."""

import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")


class Weather(BaseModel):
    """What one is told of a city."""

    city: Literal["Rome", "Oslo"]
    sky: Literal["clear", "grey"]


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"The sky of {city} is clear."


given = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0}
model = ChatOpenAI(**given, max_completion_tokens=64)
answer = model.invoke([("system", "Be brief."), ("user", "Write a function that adds.")])
print(answer.content, answer.usage_metadata, sep="\n")
for chunk in model.stream("Write a function that subtracts."):
    print(chunk.text, end="", flush=True)
print()
caller = model.bind_tools([get_weather], tool_choice="any", strict=True)
print(caller.invoke("Weather in Rome?").tool_calls)
print(model.with_structured_output(Weather).invoke("Weather in Oslo?"))
print(ChatOpenAI(**given, use_responses_api=True).invoke("def add(a, b):").text)
