"""Messages to prompts, with transformers' apply_chat_template as the oracle."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models import chat_environment
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer

CHATML = """\
{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- set found = namespace(system=false) %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'system'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'system' %}{% set found.system = true %}{% endif %}
    {{- '<|start|>' + message.role + '<|stop|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{{- '[' ~ date_string ~ ' ' ~ found.system ~ ']' }}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{%- endif %}
"""
TOOLS = """\
{%- if tools %}
    {{- 'Functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' }}
        {{- tool | tojson(indent=4) }}{{ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- call.function.name }}({{ call.function.arguments | tojson }})
        {%- endfor %}
    {%- elif 'content' in message %}
        {%- generation %}
        {{- message.role }}: {{ message.content }}
        {%- endgeneration %}
    {%- endif %}
{% endfor %}
{{- documents is none }} {{ enable_thinking | default('unset') }} {{ eos_token }}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "tools": TOOLS}

TOOL = {
    "type": "function",
    "function": {
        "name": "look <up> & 'find'",
        "description": "naïve “café”",
        "parameters": {"type": "object", "properties": {"b": {}, "a": {"type": "string"}}},
    },
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "  Be <b>brief</b> & 'kind'.\n"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "{{ 1 + 1 }} {% if %} <|im_end|>"},
        {"role": "assistant", "content": "2 🙂", "name": None},
        {"role": "user", "content": "and\n\nthen?"},
    ],
]
TOOL_CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "find it"},
    {"role": "skip", "content": "never seen"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"q": "<é>", "n": [1, None]}}}],
    },
    {"role": "tool", "content": "found"},
    {"role": "stop", "content": "never seen"},
    {"role": "user", "content": "never seen"},
]


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"],
    )
    result.train_from_iterator(["some text to train on, some more text"], trainer)
    return result


@pytest.fixture
def folder(tmp_path: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_settings(folder: Path, chat_template: Any = None) -> None:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
    }
    if chat_template is not None:
        content["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def template(folder: Path, source: str | None = None) -> ChatTemplate:
    return ChatTemplate(Tokenizer(folder), source)


# Against the oracle


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(
    folder: Path, name: str, add_generation_prompt: bool, messages: list[dict[str, Any]]
) -> None:
    write_settings(folder, TEMPLATES[name])
    tokenizer = Tokenizer(folder)
    prompt = ChatTemplate(tokenizer).render(messages, add_generation_prompt, date_string="today")
    oracle = AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": add_generation_prompt, "date_string": "today"}
    assert prompt == oracle.apply_chat_template(messages, tokenize=False, **options)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids == oracle.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize("tools", [None, [], [TOOL], [TOOL, TOOL]])
def test_tools_are_those_of_transformers(folder: Path, tools: list[Any] | None) -> None:
    write_settings(folder, TOOLS)
    prompt = template(folder).render(TOOL_CONVERSATION, tools=tools, enable_thinking=False)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TOOL_CONVERSATION, tools=tools, tokenize=False, enable_thinking=False
    )
    assert prompt == expected
    assert "never seen" not in prompt
    assert ("<up> & 'find'" in prompt) == bool(tools)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("in_files", [False, True])
def test_named_templates(folder: Path, in_files: bool, with_tools: bool) -> None:
    named = {"default": CHATML, "tool_use": TOOLS, "rag": "x"}
    if in_files:
        write_settings(folder, "not this one")
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    else:
        write_settings(folder, [{"name": name, "template": text} for name, text in named.items()])
    tools = [TOOL] if with_tools else None
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATIONS[0], tools=tools, tokenize=False, add_generation_prompt=True
    )
    prompt = template(folder).render(CONVERSATIONS[0], tools=tools)
    assert prompt == expected
    assert ("Functions" in prompt) == with_tools


# Where it comes from


def test_a_file_counts_before_the_settings(folder: Path) -> None:
    write_settings(folder, "from the settings")
    (folder / "chat_template.jinja").write_text("from the file")
    assert template(folder).render(CONVERSATIONS[0]) == "from the file"
    assert template(folder, "given").render(CONVERSATIONS[0]) == "given"


def test_without_a_template(folder: Path) -> None:
    found = template(folder)
    assert not found.exists
    with pytest.raises(UsageError, match=r"has no chat template: .* chat_template\.jinja"):
        found.render(CONVERSATIONS[0])


def test_without_a_default(folder: Path) -> None:
    write_settings(folder, [{"name": "rag", "template": "x"}, {"name": "a", "template": "y"}])
    with pytest.raises(UsageError, match="named a, rag but no default"):
        template(folder).render(CONVERSATIONS[0])


@pytest.mark.parametrize("value", [3, ["x"], [{"name": "x"}], {"default": "x"}])
def test_settings_that_are_no_template(folder: Path, value: Any) -> None:
    write_settings(folder, value)
    with pytest.raises(CheckpointError, match='"chat_template" must be a text or a list'):
        template(folder)


def test_an_unreadable_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"cannot read .*chat_template\.jinja"):
        template(folder)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | no_such_filter }}", "a\n{% endfor %}"])
def test_a_template_that_does_not_parse(folder: Path, source: str) -> None:
    with pytest.raises(CheckpointError, match=r"'default' of .* is not valid: line \d"):
        template(folder, source).render(CONVERSATIONS[0])


# What it does


def test_it_may_refuse_messages(folder: Path) -> None:
    write_settings(folder, LLAMA3)
    with pytest.raises(UsageError, match="refuses these messages: unknown role judge"):
        template(folder).render([{"role": "judge", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ messages[7].content }}", "{{ 'a' + 1 }}", "{{ none.x.y }}", "{{ 1 // 0 }}"]
)
def test_errors_within_a_template(folder: Path, source: str) -> None:
    with pytest.raises(UsageError, match=r"^the chat template refuses these messages: .+"):
        template(folder, source).render(CONVERSATIONS[0])


def test_special_tokens_and_options(folder: Path) -> None:
    write_settings(folder)
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ more.a }}"
    prompt = template(folder, source).render(CONVERSATIONS[0], more={"a": 1}, eos_token="stop")
    assert prompt == "<|begin|>|stop||1"


def test_the_date(folder: Path) -> None:
    prompt = template(folder, "{{ strftime_now('%Y') }}").render(CONVERSATIONS[0])
    assert int(prompt) in range(datetime.now().year - 1, datetime.now().year + 1)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ messages[0].get.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ ('' | attr('format'))('{0.__class__}', 1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__class__}'.format_map({'0': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ self.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{% include 'tokenizer.json' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_the_sandbox_holds(folder: Path, source: str) -> None:
    """Python's inside is undefined within a template: it prints as nothing, and using it fails."""
    try:
        prompt = template(folder, source).render(CONVERSATIONS[0])
    except UsageError:
        return
    assert prompt in ("", "[Undefined]")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ (messages * 10**9) | length }}",
        "{{ 9 ** (10**9) }}",
        "{% set ns = namespace(a=10**9) %}{% for _ in range(60) %}{% set ns.a = ns.a * ns.a %}"
        "{% endfor %}",
        "{% set ns = namespace(a='x' * 999) %}{% for _ in range(60) %}{% set ns.a = ns.a ~ ns.a %}"
        "{% endfor %}",
        "{% set ns = namespace(a=['x']) %}{% for _ in range(60) %}{% set ns.a = ns.a + ns.a %}"
        "{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.*f' % (10**9, 1.5) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ '%(a)99999999d' % {'a': 1} }}",
        "{{ '%(a)99999999d' | format(a=1) }}",
        "{{ 1 | round(-10**9) }}",
        "{{ '\t'.expandtabs(tabsize=10**9) }}",
        "{% set x = 'x' * 65536 %}{{ x.replace('x', x) }}",
        "{% set x = 'x' * 65536 %}{{ x | replace('x', x) }}",
        "{% set x = 'x' * 65536 %}{{ x.join(x) }}",
        "{% set x = 'x' * 65536 %}{{ range(99999) | join(x) }}",
        "{% set x = 'x' * 65536 %}{{ ([x] * 65536) | join }}",
        "{% set x = 'x' * 65536 %}{{ ('\n' * 65536) | indent(x, blank=true) }}",
        "{{ ('\n' * 65536) | indent(65536) }}",
        "{% set x = 'x' * 65536 %}{{ x | wordwrap(1, wrapstring=x) }}",
        *(
            "{% set ns = namespace(x=['x' * 60000]) %}{% for _ in range(16) %}"
            f"{{% set ns.x = [ns.x, {{'x': ns.x}}] %}}{{% endfor %}}{{{{ {written} }}}}"
            for written in (
                *(
                    "ns.x",
                    "ns.x ~ 1",
                    "ns.x | upper",
                    "ns.x | tojson",
                    "[ns.x] | join",
                    "'%s' % ns.x",
                ),
                *("'{}'.format(ns.x)", "[ns.x] | map('string') | list", "'%s' | format(ns.x)"),
            )
        ),
        "{% set x = 'x' * 65536 %}{{ [1] | tojson(separators=(x, x)) }}",
        "{% set x = 'x' * 65536 %}{% for _ in range(99999) %}{{ x }}{% endfor %}",
        "{% set x = 'x' * 65536 %}{% macro m() %}{% for _ in range(9999) %}{{ x }}{% endfor %}"
        "{% endmacro %}{{ m() | length }}",
    ],
)
def test_results_have_a_size(folder: Path, source: str) -> None:
    with pytest.raises(UsageError, match=r"too (large|long) for a chat template|Range too big"):
        template(folder, source).render(CONVERSATIONS[0])


@pytest.mark.parametrize("call", ["'x'.encode()", "'x'.translate({})", "(1).to_bytes(10**9)"])
def test_what_nothing_bounds_is_not_there(folder: Path, call: str) -> None:
    source = f"{{{{ {call} }}}}"
    with pytest.raises(UsageError, match="is unsafe"):
        template(folder, source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
        "{{ range(99999) | map('string') | list | length }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(40) }}",
    ],
)
def test_templates_have_an_end(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = template(folder, "{% for it in messages %}{{ it.content | upper }}{% endfor %}")
    monkeypatch.setattr(chat_environment, "_MOST_SECONDS", 0.01)
    with pytest.raises(UsageError, match="takes too long"):
        template(folder, source).render(CONVERSATIONS[0])
    assert usual.render(CONVERSATIONS[0])  # which has a time of its own


def test_usual_texts_are_written(folder: Path) -> None:
    source = (
        "{{ '%5.1f' % 3.14 }}{{ 70000 % 9 }}{{ 'a' ~ none ~ 1 ~ nothing }}{{ '{:>8}'.format(123456)"
        " }}{{ '%s%%' | format(123456) }}{{ [1] + [2] }}{{ 'x'.rjust(3) }}{{ [1] | tojson(indent=1)"
        " }}{{ 'a\nb' | indent(2) }}{{ ['a', 'b'] | map('center', 3) | join }}"
        "{{ 'aa' | replace('a', 'b', 1) }}{{ 'aba'.replace('b', '-') }}{{ ', '.join(['a', 'b']) }}"
        "{{ messages |"
        " join('/', 'role') }}{{ 2.25 | round(1) }}{{ '%(a)d' % {'a': 70000} }}"
    )
    text = "  3.17aNone1  123456123456%[1, 2]  x[\n 1\n]a\n  b a  b baa-aa, b"
    text += "/".join(it["role"] for it in CONVERSATIONS[0]) + "2.270000"
    assert template(folder, source).render(CONVERSATIONS[0]) == text


def test_small_products(folder: Path) -> None:
    source = "{{ '-' * 20 }}{{ 3 * '=' }}{{ 6 * 7 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 'x' * -1 }}"
    assert template(folder, source).render(CONVERSATIONS[0]) == "-" * 20 + "===4210243.0"


def test_using_what_the_sandbox_hides_fails(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"access to attribute '__class__' .* is unsafe"):
        template(folder, "{{ messages.__class__.__name__ }}").render(CONVERSATIONS[0])


def test_the_caller_keeps_its_messages(folder: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}]
    before = json.dumps(messages)
    template(folder, CHATML).render(messages)
    assert json.dumps(messages) == before


# Messages


def test_text_parts_are_one_text(folder: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    prompt = template(folder, "{{ messages[0].content }}").render(
        [{"role": "user", "content": parts}]
    )
    assert prompt == "a\nb"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "at least one"),
        ({"role": "user", "content": "x"}, "at least one"),
        (None, "at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": "", "content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": "user"}], r"messages\[0\] must have a content"),
        ([{"role": "user", "content": None}], r"messages\[0\] must have a content"),
        ([{"role": "assistant", "tool_calls": []}], r"messages\[0\] must have a content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a text or a list"),
        ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\]\.content must be a text"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\] must be .*text only"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            ],
            r"messages\[1\]\.content\[0\] must be",
        ),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], "messages must be plain JSON data"),
    ],
)
def test_messages_are_checked(folder: Path, messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        template(folder, "x").render(messages)


@pytest.mark.parametrize("tools", ["x", [print], {"type": "function"}, 3])
def test_tools_are_checked(folder: Path, tools: Any) -> None:
    with pytest.raises(UsageError, match="tools must be a list of JSON schemas"):
        template(folder, "x").render(CONVERSATIONS[0], tools=tools)


def test_options_are_checked(folder: Path) -> None:
    with pytest.raises(UsageError, match="chat template options must be plain JSON data"):
        template(folder, "x").render(CONVERSATIONS[0], helper=print)
