"""From the fields of a request to `SamplingParams`."""

from collections.abc import Mapping
from typing import Any

from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import StructuredOutput
from slipstream.serve.errors import bad_request
from slipstream.serve.protocol.response_format import JsonSchemaFormat, ResponseFormat, TextFormat
from slipstream.serve.protocol.sampling import SamplingFields

# Fields with the same name and meaning on both sides; what is not given keeps the default.
_SAME = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
    "prompt_logprobs",
)
_NO_SHAPE: Mapping[str, Any] = {}


def sampling_params(
    body: SamplingFields,
    max_tokens: int | None,
    logprobs: int | None,
    shape: Mapping[str, Any] = _NO_SHAPE,
    **overrides: Any,
) -> SamplingParams:
    """How to sample.

    Args:
        max_tokens: resolved, as the two protocols have different names and defaults.
        logprobs: likewise.
        shape: what `wanted_shape` found.
        overrides: go before the request's own.

    Raises:
        UsageError: values that do not fit together.
    """
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.speculative is not None:
        given["num_speculative_tokens"] = body.speculative.num_speculative_tokens
    if shape:
        given["structured"] = StructuredOutput(**shape)
    return SamplingParams(**{**given, "max_tokens": max_tokens, "logprobs": logprobs, **overrides})


def wanted_shape(body: SamplingFields, response_format: ResponseFormat | None) -> Mapping[str, Any]:
    """What the text must be, as a field of `StructuredOutput` and its value; empty if anything.

    Raises ApiError where it is said twice.
    """
    wishes = {
        "response_format": _of_format(response_format),
        "structured_outputs": _of_structured_outputs(body),
        "guided_json": _if_given("json_schema", body.guided_json),
        "guided_regex": _if_given("regex", body.guided_regex),
        "guided_choice": _if_given("choice", body.guided_choice),
        "guided_grammar": _if_given("grammar", body.guided_grammar),
    }
    given = {name: wish for name, wish in wishes.items() if wish}
    if len(given) > 1:
        names = " and ".join(given)
        raise bad_request(f"{names} contradict each other; give one of them", next(iter(given)))
    return next(iter(given.values()), _NO_SHAPE)


def _of_format(wanted: ResponseFormat | None) -> Mapping[str, Any]:
    if wanted is None or isinstance(wanted, TextFormat):
        return _NO_SHAPE
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema_
        if schema is None:
            raise bad_request("response_format.json_schema.schema is missing", "response_format")
        return {"json_schema": schema}
    return {"json_object": True}


def _of_structured_outputs(body: SamplingFields) -> Mapping[str, Any]:
    wanted = body.structured_outputs
    if wanted is None:
        return _NO_SHAPE
    given = {
        "json_schema": wanted.json_,
        "json_object": wanted.json_object,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise bad_request(
            "structured_outputs takes exactly one of json, json_object, regex, choice and grammar",
            "structured_outputs",
        )
    return given


def _if_given(name: str, value: object) -> Mapping[str, Any]:
    return _NO_SHAPE if value is None else {name: value}
