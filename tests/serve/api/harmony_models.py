"""The demo with a vocabulary and a chat template of harmony."""

import json
from pathlib import Path

import slipstream

# Special tokens by their ids; those from 4091 on take the place of the demo's last words.
MARKS = {
    0: "<|endoftext|>",
    1: "<|start|>",
    2: "<|return|>",
    4091: "<|message|>",
    4092: "<|channel|>",
    4093: "<|constrain|>",
    4094: "<|end|>",
    4095: "<|call|>",
}
# Written for these tests, by the rules of the format: instructions are the developer's; thoughts
# before the last final message are dropped; calls go to the channel commentary.
TEMPLATE = """
{%- macro say(role, text, channel='', ending='<|end|>') -%}
<|start|>{{ role }}{% if channel %}<|channel|>{{ channel }}{% endif -%}
<|message|>{{ text }}{{ ending }}
{%- endmacro -%}
{%- set turn = namespace(last_final=-1, tool='') -%}
{%- for message in messages if message.role == 'assistant' and not message.tool_calls -%}
{%- set turn.last_final = loop.index -%}
{%- endfor -%}
{{- say('system', 'Reasoning: ' ~ (reasoning_effort or 'medium')) -}}
{%- if tools -%}
{{- say('developer', tools | map(attribute='function') | map('tojson') | join('\n')) -}}
{%- endif -%}
{%- set finals = namespace(seen=0) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if message.tool_calls -%}
{%- if message.content and message.thinking -%}
{{- raise_exception('a message with calls has content or thinking, not both') -}}
{%- endif -%}
{%- set thought = message.thinking or message.content -%}
{%- if thought and finals.seen >= turn.last_final -%}
{{- say('assistant', thought, 'analysis') -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{%- set turn.tool = call.name -%}
{{- say('assistant to=functions.' ~ call.name, call.arguments | tojson,
        'commentary <|constrain|>json', '<|call|>') -}}
{%- else -%}
{%- set finals.seen = finals.seen + 1 -%}
{{- say('assistant', message.content, 'final') -}}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- say('functions.' ~ turn.tool ~ ' to=assistant', message.content, 'commentary') -}}
{%- else -%}
{{- say('developer' if message.role == 'system' else 'user', message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


def write_without_end_tokens(folder: Path) -> Path:
    """The demo without generation_config.json, which names its end tokens."""
    source = Path(slipstream.__file__).parent / "demo" / "target"
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    return folder


def write_harmony_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    """The demo's tokenizer with the marks of harmony among its tokens."""
    source = Path(slipstream.__file__).parent / "demo" / "target"
    folder.mkdir(exist_ok=True)
    content = json.loads((source / "tokenizer.json").read_text("utf-8"))
    model, first = content["model"], content["added_tokens"][0]
    gone = {token for token, index in model["vocab"].items() if index in MARKS}
    model["vocab"] = {MARKS.get(index, token): index for token, index in model["vocab"].items()}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [merge for merge in merges if not gone & {*merge, "".join(merge)}]
    content["added_tokens"] = [{**first, "id": id, "content": it} for id, it in MARKS.items()]
    settings = {"eos_token": "<|return|>", "chat_template": template}
    for name, value in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value), "utf-8")
    return folder
