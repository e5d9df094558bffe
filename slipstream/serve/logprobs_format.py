"""Formats of logprobs and of speculation in the answers of the endpoints."""

from collections.abc import Iterable, Sequence
from math import isfinite, isnan
from typing import Any, NamedTuple

from slipstream.core.outputs import Logprob
from slipstream.serve.errors import generation_failed
from slipstream.serve.protocol.sampling import SamplingFields
from slipstream.serve.token_texts import TokenReader, TokenTexts
from slipstream.serve.updates import Candidates, Delta

_IMPOSSIBLE = -9999.0  # in place of minus infinity, as in OpenAI's API
_WEIGHT_VERSION = "default"  # weights are loaded once


class Token(NamedTuple):
    """A token and its position in the text.

    Attributes:
        offset: number of characters before it.
        added: the text that it adds; may be empty.
    """

    token_id: int
    offset: int
    added: str


def read_tokens(reader: TokenReader, token_ids: Iterable[int]) -> list[Token]:
    return [Token(token_id, reader.offset, reader.take(token_id)) for token_id in token_ids]


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON cannot hold; raises ApiError for NaN."""
    if isnan(logprob):
        raise generation_failed("the model gave log probabilities that are not a number")
    return logprob if isfinite(logprob) else _IMPOSSIBLE


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[Token], rows: Sequence[Candidates | None], num_top: int
) -> dict[str, Any]:
    """The format of /v1/completions: parallel lists. The row of a prompt's first token is None."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [
            None if row is None else finite(row[token.token_id].logprob)
            for token, row in zip(tokens, rows, strict=True)
        ],
        "tokens": [texts.name(token.token_id) for token in tokens],
        "top_logprobs": [
            None
            if row is None
            else {texts.name(rival): finite(it.logprob) for rival, it in _top(row, num_top, token)}
            for token, row in zip(tokens, rows, strict=True)
        ],
    }


def _top(row: Candidates, num_top: int, token: Token) -> list[tuple[int, Logprob]]:
    """The `num_top` most probable candidates, and the token itself."""
    return [
        (rival, it) for rival, it in row.items() if it.rank <= num_top or rival == token.token_id
    ]


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], rows: Sequence[Candidates], num_top: int
) -> dict[str, Any]:
    """The format of /v1/chat/completions: an object for each token."""
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        best = sorted(row.items(), key=lambda item: item[1].rank)
        top = [_chat_token(texts, rival, it) for rival, it in best if it.rank <= num_top]
        content.append({**_chat_token(texts, token_id, row[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, it: Logprob) -> dict[str, Any]:
    return {
        "token": texts.name(token_id),
        "logprob": finite(it.logprob),
        "bytes": list(texts.content(token_id)),
    }


def prompt_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], rows: Sequence[Candidates | None], num_top: int
) -> list[dict[str, Any] | None]:
    """The format of `prompt_logprobs`: candidates by token id."""
    return [
        None
        if row is None
        else {
            str(rival): {
                "logprob": finite(it.logprob),
                "rank": it.rank,
                "decoded_token": texts.text(rival),
            }
            for rival, it in _top(row, num_top, Token(token_id, 0, ""))
        }
        for token_id, row in zip(token_ids, rows, strict=True)
    ]


class TokenFields:
    """Makes the fields that `return_token_ids` and `return_weight_versions` add to a choice."""

    def __init__(self, body: SamplingFields) -> None:
        self._body, self._num_tokens = body, 0

    def of(self, delta: Delta, is_last: bool) -> dict[str, Any]:
        """The fields for the next delta of the choice."""
        fields: dict[str, Any] = {}
        self._num_tokens += len(delta.token_ids)
        if self._body.return_token_ids:
            fields["token_ids"] = [*delta.token_ids]
        if self._body.return_weight_versions and is_last:
            span = {"version": _WEIGHT_VERSION, "start": 0, "end": self._num_tokens}
            fields["weight_versions"] = [span]
        return fields


def speculation(delta: Delta, tokens: Sequence[Token]) -> dict[str, Any]:
    """The format of `return_speculation`."""
    rows: Sequence[Candidates | None] = delta.logprobs or [None] * len(tokens)
    return {
        "tokens": [
            {
                "text": token.added,
                "kind": origin.kind,
                "position": origin.position,
                "logprob": None if row is None else finite(row[token.token_id].logprob),
            }
            for token, origin, row in zip(tokens, delta.origins, rows, strict=True)
        ]
    }
