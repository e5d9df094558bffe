"""Harmony, the format in which gpt-oss models write whole answers: its grammars, and its parser."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.structured import StructuredOutput
from slipstream.models.harmony import HarmonyTokens
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request
from slipstream.serve.output.harmony_parser import HarmonyParser
from slipstream.serve.output.parts import Reading, Wanted
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.call_format import Schemas, long_id
from slipstream.serve.tools.call_rules import ANY_ARGUMENTS, json_value

_FREE = ["body: TEXT"]


@dataclass(frozen=True)
class Harmony:
    """An `OutputFormat`, whose calls are messages to functions.

    Its grammars hold for an answer that begins behind the assistant's role. Reasoning is free text
    in all of them; the text of a grammar is that of the last message.
    """

    tokens: HarmonyTokens
    tokenizer: Tokenizer
    name = "openai_gptoss"

    @property
    def calls(self) -> "HarmonyCalls":
        return HarmonyCalls(self.tokens)

    @property
    def marks(self) -> Sequence[int]:
        return self.tokens.marks

    def parser(self, texts: TokenTexts, reading: Reading) -> HarmonyParser:
        return HarmonyParser(self.tokens, texts, reading)

    def framed(
        self, wanted: Wanted, prompt: Sequence[int], continues: bool
    ) -> StructuredOutput | None:
        if wanted.budget is not None:
            raise bad_request(
                "the format of this model's answers knows no thinking_token_budget; leave it out, "
                "or give reasoning_effort",
                "thinking_token_budget",
            )
        if wanted.content is None and wanted.calls is None:
            return None
        if not self.parser(TokenTexts(self.tokenizer), Reading(prompt)).begins_anew:
            raise bad_request(
                "structured output and tools that are strict, required or named begin with a new "
                "message; leave continue_final_message and add_generation_prompt out",
                "messages",
            )
        if wanted.content is None:
            return StructuredOutput(grammar=wanted.calls)
        # Text of the channel commentary would stand before what the structure asks for.
        answers = _answers(self.tokens, wanted.functions, asides='"analysis"', final=True)
        return replace(wanted.content, frame="\n".join(answers))

    def remember(self, message: dict[str, Any], reasoning: str) -> str:
        content = message.get("content")
        if content and message.get("tool_calls"):
            # Templates of gpt-oss take content beside calls for reasoning, and refuse to have both.
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
            reasoning, message["content"] = f"{reasoning}\n{content}", None
        message["thinking"] = reasoning
        return "thinking"


@dataclass(frozen=True)
class HarmonyCalls:
    """Calls in the harmony format, as a `CallFormat`: one ends the answer."""

    tokens: HarmonyTokens
    name = "openai"

    def call_id(self) -> str:
        return long_id()

    def only_calls(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        return "\n".join(_answers(self.tokens, functions, _ANY_ASIDE, final=False))

    def calls_amid_text(self, functions: Schemas, tokenizer: Tokenizer) -> str:
        return "\n".join([*_answers(self.tokens, functions, _ANY_ASIDE, final=True), *_FREE])


_ANY_ASIDE = '("analysis" | "commentary")'


def _answers(tokens: HarmonyTokens, functions: Schemas, asides: str, final: bool) -> list[str]:
    """Lark rules of messages aside, and then a call or the final message, whose text is `body`."""
    channel, message = f"<[{tokens.channel}]>", f"<[{tokens.message}]>"
    calls = [f"call_{index}" for index in range(len(functions))]
    rules = [
        f"start: aside* ({' | '.join([*(['final'] if final else []), *calls])})",
        f'aside: {channel} {asides} {message} TEXT <[{tokens.end}]> <[{tokens.start}]> "assistant"',
        "TEXT: /(.|\\n)*/",
    ]
    if final:
        rules.append(f'final: {channel} "final" {message} body')
    for call, (name, schema) in zip(calls, functions.items(), strict=True):
        recipient = f"to=functions.{name}"
        behind_channel = f"{channel} {json.dumps(f'commentary {recipient} ')}"
        behind_role = f'{json.dumps(f" {recipient}")} {channel} "commentary "'
        rules.append(
            f"{call}: ({behind_channel} | {behind_role}) <[{tokens.constrain}]> "
            f'"json" {message} {json_value(schema or ANY_ARGUMENTS)}'
        )
    return rules
