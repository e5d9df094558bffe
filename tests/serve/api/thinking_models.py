"""The demo's tokenizer with marks of thoughts, and a chat template that writes and reads them."""

import json
from pathlib import Path

import slipstream

# In place of the demo's last words; not special, as in the vocabularies of the families. As text,
# the marks of thoughts are missing.
MARKS = {4092: "<tool_call>", 4093: "</tool_call>", 4094: "<think>", 4095: "</think>"}
# Written for these tests, by the rules of Qwen3: thoughts before the last message of the user are
# dropped; `enable_thinking` false closes the thought in the prompt; `opens` opens it there.
TEMPLATE = """
{%- if tools %}# tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}
{%- set last = namespace(user=-1) -%}
{%- for message in messages if message.role == 'user' -%}
{%- set last.user = loop.index -%}
{%- endfor -%}
{%- set seen = namespace(users=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and message.reasoning_content and seen.users == last.user -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% elif opens -%}
<think>
{% endif -%}
{%- endif -%}
"""


def write_thinking_tokenizer(folder: Path, template: str = TEMPLATE, as_text: bool = False) -> Path:
    """The demo's tokenizer with this template.

    Args:
        as_text: the marks are no tokens.
    """
    source = Path(slipstream.__file__).parent / "demo" / "target"
    folder.mkdir()
    content = json.loads((source / "tokenizer.json").read_text("utf-8"))
    if not as_text:
        model, first = content["model"], content["added_tokens"][0]
        gone = {token for token, index in model["vocab"].items() if index in MARKS}
        model["vocab"] = {MARKS.get(id, token): id for token, id in model["vocab"].items()}
        pairs = [
            merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]
        ]
        model["merges"] = [pair for pair in pairs if not gone & {*pair, "".join(pair)}]
        content["added_tokens"] += [
            {**first, "id": id, "content": mark, "special": False} for id, mark in MARKS.items()
        ]
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = template
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder
