"""The demo with tokenizers whose templates know tools."""

import json
import shutil
from pathlib import Path

import slipstream

_TOOLS = "{% if tools %}# tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
_MESSAGES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}MARK{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def write_tool_tokenizer(folder: Path, mark: str, special: bool) -> Path:
    """The demo's tokenizer with a template that writes tools.

    Args:
        mark: of a call, in the template.
        special: the token that opens messages gets the name of the mark, so that it is special.
    """
    source = Path(slipstream.__file__).parent / "demo" / "target"
    folder.mkdir()
    template = (_TOOLS + _MESSAGES + _OPENING).replace("MARK", mark)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (source / name).read_text("utf-8")
        (folder / name).write_text(text.replace("<|im_start|>", mark) if special else text, "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = template.replace("<|im_start|>", mark) if special else template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def copy_without_template(folder: Path) -> Path:
    """The demo's tokenizer as of a base model."""
    source = Path(slipstream.__file__).parent / "demo" / "target"
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder
