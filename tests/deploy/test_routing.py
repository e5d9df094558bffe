"""Which replica answers, and what of a prompt decides it."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from slipstream.deploy.prompts import BLOCK, Prompt, read_prompt
from slipstream.deploy.routing import Replica, ReplicaRouting
from slipstream.deploy.scaling import wanted_replicas

A, B, C = (Replica(id=letter * 12, host="127.0.0.1", port=1) for letter in "abc")


def routing(*replicas: Replica, method: str = "prefix") -> ReplicaRouting:
    made = ReplicaRouting(method)
    made.update(replicas or (A, B, C))
    return made


def prompt_of(path: str = "/v1/chat/completions", **fields: Any) -> Prompt:
    return read_prompt(path, json.dumps(fields).encode())


def chat(*texts: str) -> Prompt:
    """A conversation of the user and the model by turns, after a system message."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return prompt_of(messages=[{"role": "system", "content": "s" * 3 * BLOCK}, *messages])


def sent(made: ReplicaRouting, prompt: Prompt, *, ended: bool = True) -> Replica:
    replica = made.choose(prompt)
    assert replica is not None
    made.begin(replica, prompt)
    if ended:
        made.end(replica)
    return replica


def test_a_turn_has_all_keys_of_the_one_before() -> None:
    first, second = chat("hello"), chat("hello", "x" * 4000, "and then")
    assert first.keys == second.keys[: len(first.keys)]
    assert second.opening == len(first.keys)
    assert first.opening == 0


def test_texts_and_parts_of_text_are_one_prompt() -> None:
    parts = [{"type": "text", "text": "hello"}]
    plain = prompt_of(messages=[{"role": "user", "content": "hello"}])
    assert plain.keys == prompt_of(messages=[{"role": "user", "content": parts}], n=2).keys
    assert plain.keys == prompt_of("/v1/responses", input="hello").keys


def test_other_texts_and_roles_have_other_keys() -> None:
    assert not {*prompt_of(prompt="a" * 300).keys} & {*prompt_of(prompt="b" * 300).keys}
    assert prompt_of(prompt="a").keys != prompt_of(messages="a").keys
    assert len(prompt_of(prompt=[1, 2, 3]).keys) == 1


def test_bodies_that_nobody_can_read_route_anywhere() -> None:
    hostile = [b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": [1, null]}', b'{"prompt": null}']
    assert all(not read_prompt("/v1/completions", body).keys for body in hostile)


def test_a_stored_response_names_its_replica() -> None:
    name = f"resp_{'b' * 12}{'0' * 32}"
    assert prompt_of(previous_response_id=name, input="go on").replica == "b" * 12
    assert read_prompt(f"/v1/responses/{name}", b"").replica == "b" * 12
    assert prompt_of(previous_response_id=7, input="go on").replica is None
    made = routing()
    assert made.choose(prompt_of(previous_response_id=name, input="go on")) == B
    assert made.choose(prompt_of(previous_response_id=name, input="go on"), without={B.id}) != B


def test_conversations_stay_and_are_spread() -> None:
    made = routing()
    homes = [sent(made, chat(f"question {number}")) for number in range(30)]
    assert Counter(homes) == {A: 10, B: 10, C: 10}
    for number, home in enumerate(homes):
        assert sent(made, chat(f"question {number}", "y" * 5000, "more")) == home


def test_a_busy_replica_loses_its_conversations() -> None:
    made = routing()
    home = sent(made, chat("question"))
    others = 0
    for _ in range(12):
        others += sent(made, chat("question", "answer", "more"), ended=False) != home
    assert 0 < others < 12


def test_round_robin_and_load_do_not_look_at_prompts() -> None:
    turns = routing(method="round_robin")
    assert {sent(turns, chat("question")) for _ in range(3)} == {A, B, C}
    least = routing(method="load")
    assert {sent(least, chat("question"), ended=False) for _ in range(3)} == {A, B, C}


def test_a_cache_forgets_and_so_does_routing() -> None:
    small = Replica(id="d" * 12, host="127.0.0.1", port=1, cache_tokens=4 * BLOCK // 4)
    made = routing(small, A)
    first = Prompt(keys=(1, 2, 3))
    made.begin(small, first)
    made.end(small)
    made.begin(A, Prompt(keys=(9,)))
    made.end(A)
    assert made.choose(first) == small
    made.begin(small, Prompt(keys=(4, 5, 6)))
    made.end(small)
    made.begin(A, first)
    made.end(A)
    assert made.choose(first) == A


def test_replicas_that_leave_are_forgotten_when_their_requests_end() -> None:
    made = routing(A, B)
    prompt = chat("question")
    home = sent(made, prompt, ended=False)
    made.update([it for it in (A, B) if it != home])
    other = made.choose(prompt)
    assert other not in (home, None)
    made.end(home)
    back = replace(home, num_open=1)  # a little busier, which a known beginning would outweigh
    made.update([back, *(it for it in (A, B) if it != home)])
    assert made.choose(prompt) == other
    made.update([])
    assert made.choose(prompt) is None


def test_replicas_follow_the_queue() -> None:
    assert wanted_replicas(2, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, 0.5) == 4
    assert wanted_replicas(2, {"a": 0.6, "b": 0.6}, {"a": 1.0, "b": 1.0}, 0.5) == 3
    assert wanted_replicas(2, {"a": 0.2, "b": 0.2}, {"a": 0.1, "b": 0.1}, 0.5) == 2
    assert wanted_replicas(3, {"a": 0.0, "b": 0.0}, {"a": 0.1, "b": 0.1}, 0.5) == 2
    assert wanted_replicas(3, {"a": 0.0, "b": 0.0}, {"a": 0.9, "b": 0.9}, 0.5) == 3
    assert wanted_replicas(1, {"a": 0.0}, {"a": 0.0}, 0.5) == 1
    assert wanted_replicas(0, {}, {}, 0.5) == 1
