"""Fields of the OpenAI protocol that this server refuses, and what to do instead."""

from typing import Final

REFUSALS: Final = {
    "audio": "this server reads and writes text only; leave it out",
    "function_call": "it is the older form of tool calls; use tools and tool_choice",
    "file": "this server reads and writes text only; leave it out",
    "functions": "it is the older form of tools; use tools",
    "image_url": "this server reads and writes text only; leave it out",
    "input_audio": "this server reads and writes text only; leave it out",
    "moderation": "this server moderates nothing; leave it out",
    "prediction": "the server drafts by itself; use speculative to set how much",
    "prompt_cache_options": "the prefix cache has no options of a request; leave it out",
    "reasoning_effort": "use chat_template_kwargs with the variables of the model's template",
    "refusal": "this server's messages have none; leave it out",
    "suffix": "nothing is filled in between two texts; put what the model needs into prompt",
    "verbosity": "say in a message how long the answer should be",
    "web_search_options": "this server searches nothing; leave it out",
}
