"""Limits on the lists, free JSON values and texts of a request.

Entries are counted before they are validated, since a validator would write an error for each of a
million wrong entries and hold the GIL for seconds. docs/protocol.md lists the limits.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, to_json

MOST_MESSAGES: Final = 4096
MOST_PARTS: Final = 1024  # of a message: parts of its content, tool calls
MOST_TOOLS: Final = 1024
MOST_PROMPTS: Final = 2048
MOST_TOKEN_IDS: Final = 1 << 20
MOST_BIASES: Final = 1 << 14
MOST_STOP_STRINGS: Final = 64
MOST_STOP_TOKENS: Final = 1024
MOST_BAD_WORDS: Final = 1024
MOST_CHOICES: Final = 1 << 14  # of a structured output
MOST_LOGPROB_TOKENS: Final = 128
MOST_TEMPLATE_CHARACTERS: Final = 1 << 17
MOST_DOCUMENTS: Final = 1024
MOST_LABELS: Final = 1024  # metadata, modalities, variables of the chat template
MOST_OPTIONS: Final = 16  # of the image processor
MOST_WORD_CHARACTERS: Final = 1000  # a stop string, a bad word
MOST_GRAMMAR_CHARACTERS: Final = 1 << 15  # a regular expression, a grammar
MOST_SPELLED_TOKENS: Final = 1 << 14  # each is tokenized by itself
MOST_TEXT_BYTES: Final = 1 << 20  # a text for /tokenize, in UTF-8
MOST_SCHEMA_VALUES: Final = 1 << 15  # JSON that is not validated: schemas, tools, arguments

_NO_MARKS = bytes(set(range(256)) - set(b'[{,:"'))


def count_values(document: bytes) -> int:
    """The size of a JSON document: commas and strings count 1, colons and opening brackets 2.

    So a number in a list counts 1, a string 2, an object 3, and a field of an object at least 4.
    Counting takes milliseconds for megabytes, and mostly without the GIL.
    """
    unescaped = document.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(unescaped.translate(None, _NO_MARKS), np.uint8)
    quotes = marks == ord('"')
    in_string = (np.cumsum(quotes, dtype=np.int32) & 1).astype(bool)
    counted = ~(quotes | in_string)
    costly = counted & (marks != ord(","))
    return int(quotes.sum() // 2 + counted.sum() + costly.sum())


def _require_few_values(value: Any) -> Any:
    document = value.encode(errors="replace") if isinstance(value, str) else to_json(value)
    if 2 * len(document) > MOST_SCHEMA_VALUES and count_values(document) > MOST_SCHEMA_VALUES:
        raise PydanticCustomError(
            "too_many",
            "holds more than {most} values; send a smaller one",
            {"most": MOST_SCHEMA_VALUES},
        )
    return value


FEW_VALUES: Final = BeforeValidator(_require_few_values)


@dataclass(frozen=True)
class AtMost:
    """Annotation that limits the size of a list or dict. Entries are counted before any of them is
    validated, and validation of a list stops at the first wrong one.

    Attributes:
        remedy: advice at the end of the error message.
        entries: the word for entries in the error message.
    """

    most: int
    remedy: str = "send fewer"
    entries: str = "entries"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        counted: Any = schema
        while counted["type"] == "function-before":
            counted = counted["schema"]
        counted["max_length"] = self.most
        if counted["type"] == "list":
            counted["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._count, schema)

    def _count(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.most:
            raise PydanticCustomError(
                "too_many",
                "has {number} {entries}, more than {most}; {remedy}",
                {"number": len(value), **vars(self)},
            )
        return value
