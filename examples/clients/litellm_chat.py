"""litellm with the prefixes of three protocols: chat, completions, messages."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not load prices from the network

import litellm

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

litellm.suppress_debug_info = True
messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
openai = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 32}

answer = litellm.completion(f"hosted_vllm/{MODEL}", messages, **openai)
print(answer.choices[0].message.content, answer.usage.completion_tokens, sep="\n")
for chunk in litellm.completion(f"openai/{MODEL}", messages, stream=True, **openai):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
text = litellm.text_completion("def add(a, b):", f"text-completion-openai/{MODEL}", **openai)
print(text.choices[0].text)
block = litellm.completion(
    f"anthropic/{MODEL}", messages, api_base=URL, api_key="none", max_tokens=32
)
print(block.choices[0].message.content)
