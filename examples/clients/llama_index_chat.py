"""LlamaIndex's OpenAILike: completions, chat, a stream, structured output."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")


class Weather(BaseModel):
    """What one is told of a city."""

    city: Literal["Rome", "Oslo"]
    sky: Literal["clear", "grey"]


given = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "context_window": 2048,
    "max_tokens": 48,
    "temperature": 0.0,
}
print(OpenAILike(**given).complete("def add(a, b):").text)

model = OpenAILike(**given, is_chat_model=True, is_function_calling_model=True)
messages = [ChatMessage(role="user", content="Write a function that subtracts.")]
print(model.chat(messages).message.content)
for chunk in model.stream_chat(messages):
    print(chunk.delta, end="", flush=True)
print()
prompt = PromptTemplate("Weather in {city}?")
print(model.structured_predict(Weather, prompt, city="Oslo"))
