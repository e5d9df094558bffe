"""Bodies under the size limit that are meant to keep a server busy, and a canary that notices.

A server that does not count before it reads takes seconds for each of them: for millions of
values, for an error about each of them, for one long text, for words that are tokenized one by one.
"""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection

from slipstream.serve.limits import ServeLimits
from slipstream.serve.protocol import bounds

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPOND = "/v1/responses"
_USER = '{"role":"user","content":"hi"}'
_CHAT_REST = f'"messages":[{_USER}],"max_tokens":1'
_SCHEMA = '{"type":"object","properties":{'
_TOOL = '{"type":"function","function":{"name":"f%d","strict":true,"parameters":'
_MESSAGES_TOOL = '{"name":"f%d","strict":true,"input_schema":'
_RESPOND_TOOL = '{"type":"function","name":"f%d","strict":true,"parameters":'
# Responses are not stored, so that memory can be compared.
_RESPOND_REST = '"input":"hi","max_output_tokens":1,"store":false'
_CALL_ITEM = '{"type":"function_call","call_id":"1","name":"f","arguments":'

# Path, what stands before the entries, one entry (%d is a number), what stands after them.
_LISTS = [
    *(
        (CHAT, '{"messages":[', message, "]}")
        for message in ("{}", _USER, '{"role":"assistant","tool_calls":[]}', '""', "[]")
    ),
    *(
        (CHAT, f'{{{_CHAT_REST},"{name}":[', entry, "]}")
        for name, entry in (
            ("tools", "{}"),
            ("tools", f"{_TOOL}{{}}}}}}"),
            ("stop", '"a"'),
            ("stop_token_ids", "%d"),
            ("bad_words", '"a %d"'),
            ("bad_words", "1"),
            ("allowed_token_ids", "%d"),
            ("modalities", '"text"'),
            ("documents", '{"text":"a"}'),
            ("documents", "{}"),
            ("logprob_token_ids", "%d"),
            ("guided_choice", '"a%d"'),
        )
    ),
    *(
        (CHAT, f'{{{_CHAT_REST},"{name}":{{', entry, "}}")
        for name, entry in (
            ("metadata", '"k%d":"v"'),
            ("metadata", '"k%d":1'),
            ("logit_bias", '"%d":1'),
            ("logit_bias", '"x%d":1'),
            ("chat_template_kwargs", '"k%d":1'),
            ("guided_json", '"k%d":1'),
        )
    ),
    (CHAT, f'{{{_CHAT_REST},"guided_json":{_SCHEMA}', '"p%d":{}', "}}}"),
    (CHAT, f'{{{_CHAT_REST},"tools":[{_TOOL}{_SCHEMA}', '"p%d":{}', "}}}}]}"),
    (CHAT, '{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"),
    (CHAT, '{"messages":[{"role":"user","content":[', "{}", "]}]}"),
    (
        CHAT,
        '{"messages":[{"role":"assistant","tool_calls":[',
        '{"id":"1","function":{"name":"f","arguments":"{}"}}',
        "]}]}",
    ),
    (CHAT, "{", '"f%d":1', "}"),
    (CHAT, '{"messages":[{', '"f%d":1', "}]}"),
    *((COMPLETE, '{"prompt":[', entry, "]}") for entry in ("5", "[5]", '"a"', "{}", '""', "[[]]")),
    *(
        (path, f'{{{most}"messages":[{start}', entry, f"{end}]}}")
        for path, most in ((MESSAGES, '"max_tokens":1,'), (COUNT_TOKENS, ""))
        for start, entry, end in (
            ("", "{}", ""),
            ("", _USER, ""),
            ('{"role":"user","content":[', '{"type":"text","text":"a"}', "]}"),
            ('{"role":"user","content":[', '{"type":"tool_result"}', "]}"),
            ('{"role":"assistant","content":[', '{"type":"tool_use","input":{}}', "]}"),
            (
                '{"role":"assistant","content":[',
                '{"type":"tool_use","id":"%d","name":"f","input":{"a":[]}}',
                "]}",
            ),
        )
    ),
    *(
        (MESSAGES, f'{{{_CHAT_REST},"{name}":[', entry, "]}")
        for name, entry in (
            ("system", "{}"),
            ("system", '{"type":"text","text":"a"}'),
            ("stop_sequences", '"a"'),
            ("tools", "{}"),
            ("tools", f"{_MESSAGES_TOOL}{{}}}}"),
        )
    ),
    (MESSAGES, f'{{{_CHAT_REST},"tools":[{_MESSAGES_TOOL}{_SCHEMA}', '"p%d":{}', "}}}]}"),
    (MESSAGES, f'{{{_CHAT_REST},"metadata":{{', '"k%d":1', "}}"),
    *(
        (RESPOND, f'{{"max_output_tokens":1,"store":false,"input":[{start}', entry, f"{end}]}}")
        for start, entry, end in (
            ("", "{}", ""),
            ("", _USER, ""),
            ("", f'{_CALL_ITEM}"{{}}"}}', ""),
            ("", '{"type":"function_call_output","call_id":"%d","output":""}', ""),
            ("", '{"type":"reasoning","content":[]}', ""),
            ('{"role":"user","content":[', '{"type":"input_text","text":"a"}', "]}"),
            ('{"role":"user","content":[', "{}", "]}"),
            ('{"type":"reasoning","summary":[', "{}", "]}"),
        )
    ),
    *(
        (RESPOND, f'{{{_RESPOND_REST},"{name}":[', entry, "]}")
        for name, entry in (
            ("tools", "{}"),
            ("tools", f"{_RESPOND_TOOL}{{}}}}"),
            ("tools", '{"type":"web_search"}'),
            ("include", '"reasoning.encrypted_content"'),
            ("stop", '"a"'),
        )
    ),
    (RESPOND, f'{{{_RESPOND_REST},"metadata":{{', '"k%d":"v"', "}}"),
    (
        RESPOND,
        f'{{{_RESPOND_REST},"text":{{"format":{{"type":"json_schema","name":"a","schema":{_SCHEMA}',
        '"p%d":{}',
        "}}}}}",
    ),
    (TOKENIZE, '{"messages":[', _USER, "]}"),
    (DETOKENIZE, '{"tokens":[', "5", "]}"),
]
# Path, and a body with one text in the place of %s.
_TEXTS = [
    *(
        (path, '{"prompt":"%s"}', text)
        for path in (TOKENIZE, COMPLETE)
        for text in ("a", "a ", "é", "\\u00e9", "\\\\", "x = [\\n", "1,{")
    ),
    *(
        (COMPLETE, f'{{"prompt":"a","max_tokens":1,"{name}":"%s"}}', text)
        for name, text in (
            ("guided_regex", "(a|b)*"),
            ("guided_regex", "a{9}"),
            ("guided_grammar", "start: /a/\\n"),
            ("guided_json", "[{},"),
            ("guided_json", "["),
            ("model", "a"),
            ("seed", "9"),
            ("stop", "a"),
        )
    ),
    *(
        (path, f'{{"{name}":"%s",{rest}}}', text)
        for path, name, rest in (
            (MESSAGES, "system", _CHAT_REST),
            (COUNT_TOKENS, "system", f'"messages":[{_USER}]'),
            (RESPOND, "input", '"max_output_tokens":1,"store":false'),
            (RESPOND, "previous_response_id", '"input":"hi"'),
        )
        for text in ("a ", "\\u00e9")
    ),
    (RESPOND, f'{{"store":false,"input":[{_CALL_ITEM}"%s"}}]}}', "[{},"),
    (COMPLETE, '{"prompt":"a","%s":1}', "a"),
    (COMPLETE, '{"prompt":"a","bad_words":["%s"]}', "a "),
    (COMPLETE, '{"prompt":"a","seed":%s}', "9"),
    (COMPLETE, "%s", "["),
    (COMPLETE, "%s", '{"a":'),
    (COMPLETE, "%s", "[[],"),
    (COMPLETE, "%s", '"'),
    (
        CHAT,
        '{"messages":[{"role":"assistant","tool_calls":'
        '[{"id":"1","function":{"name":"f","arguments":"%s"}}]}]}',
        "[{},",
    ),
]


@dataclass(frozen=True)
class HostileBody:
    """A request; `name` tells which part is repeated, and how often."""

    name: str
    path: str
    content: bytes


def hostile_bodies() -> Iterator[HostileBody]:
    """Bodies of the maximum size, and bodies at each of the bounds."""
    size = ServeLimits.max_body_bytes - 1024
    values = ServeLimits.max_json_values - 1024
    for path, start, entry, end in _LISTS:
        cost = 1 + bounds.count_values(entry.encode())
        whole = size // (len(entry) + 6)
        for count in sorted({whole, values // cost, *_LIST_BOUNDS}):
            if count <= whole:
                head, number, tail = entry.partition("%d")
                numbers = map(str, range(count)) if number else [""] * count
                entries = head + f"{tail},{head}".join(numbers) + tail
                name = f"{count} x {entry} in {start[-24:]}"
                yield HostileBody(name, path, (start + entries + end).encode())
    for path, around, text in _TEXTS:
        whole = size // len(text.encode())
        for count in sorted({whole, *(most // len(text) for most in _TEXT_BOUNDS)}):
            name = f"{count} x {text} in {around[:24]}"
            yield HostileBody(name, path, around.replace("%s", text * count).encode())
    many = json.dumps({"prompt": ["a"] * bounds.MOST_PROMPTS, "n": 128})
    yield HostileBody("many samples", COMPLETE, many.encode())


_LIST_BOUNDS = {
    bounds.MOST_MESSAGES,
    bounds.MOST_PARTS,
    bounds.MOST_PROMPTS,
    bounds.MOST_BIASES,
    bounds.MOST_SCHEMA_VALUES // 4,
}
_TEXT_BOUNDS = {
    bounds.MOST_WORD_CHARACTERS,
    bounds.MOST_GRAMMAR_CHARACTERS,
    bounds.MOST_SCHEMA_VALUES,
    bounds.MOST_TEXT_BYTES,
}


class Canary:
    """Asks for /health every few milliseconds, in another thread.

    Attributes:
        longest: seconds of its longest answer; set it to 0 to begin again.
    """

    def __init__(self, host: str, port: int) -> None:
        self.longest = 0.0
        self._connection = HTTPConnection(host, port)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> "Canary":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()

    def _ask(self) -> None:
        while not self._over.wait(0.003):
            asked = time.perf_counter()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - asked)
