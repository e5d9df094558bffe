"""Conversion of request fields to `SamplingParams`."""

from typing import Any

from slipstream.core.sampling_params import RepetitionDetection, SamplingDefaults, SamplingParams
from slipstream.core.structured import StructuredOutput
from slipstream.serve.errors import bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.base import MOST_INT
from slipstream.serve.protocol.sampling import (
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    TextFormat,
)

_LONGEST_ID = 10  # characters of a token id
# Fields with the same name and meaning on both sides; those not given keep the default.
_COMMON = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
    *("prompt_logprobs", "logprob_token_ids"),
)


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutput | None = None,
    **overrides: Any,
) -> SamplingParams:
    """Create the sampling parameters of a request.

    Args:
        defaults: values of fields that the request does not set.
        max_tokens, logprobs: resolved by the endpoint, as names and defaults differ.
        structured: from `structured_output`.
        overrides: replace the request's own; `logit_bias` is from the function of that name.

    Raises:
        UsageError: values that do not fit together.
    """
    given = {name: getattr(body, name) for name in _COMMON if getattr(body, name) is not None}
    if body.repetition_detection is not None:
        wanted = body.repetition_detection.model_dump(exclude_none=True)
        given["repetition_detection"] = RepetitionDetection(**wanted)
    drafts = None if body.speculative is None else body.speculative.num_speculative_tokens
    if drafts is not None:
        given["num_speculative_tokens"] = drafts
    if max_tokens is not None or "max_tokens" not in defaults.values:
        given["max_tokens"] = max_tokens
    given |= {"logprobs": logprobs, **overrides, "structured": structured}
    return defaults.limited(defaults.params(given))


def logit_bias(body: SamplingFields, service: ModelService) -> dict[int, float] | None:
    """The biases by token id; a key that is not a number is the text of a single token."""
    found: dict[int, float] = {}
    for name, bias in (body.logit_bias or {}).items():
        if name.isascii() and name.isdigit():
            token = int(name) if len(name) <= _LONGEST_ID else MOST_INT
        else:
            ids = service.tokenizer.encode(name, add_special_tokens=False)
            if len(ids) != 1:
                raise bad_request(
                    f"logit_bias: {name!r} is {len(ids)} tokens of this model, not one; give the "
                    "ids of tokens, or other texts",
                    "logit_bias",
                )
            [token] = ids
        if token in found:
            raise bad_request(f"logit_bias names token {token} twice", "logit_bias")
        found[token] = bias
    return found or None


def structured_output(
    body: SamplingFields, response_format: ResponseFormat | None
) -> StructuredOutput | None:
    """The constraint on the output, if any; raises ApiError if two fields set one."""
    wanted = {
        "response_format": _from_format(response_format),
        "structured_outputs": _from_structured_outputs(body),
        "guided_json": {"json_schema": body.guided_json},
        "guided_regex": {"regex": body.guided_regex},
        "guided_choice": {"choice": body.guided_choice},
        "guided_grammar": {"grammar": body.guided_grammar},
    }
    given = {
        name: kind for name, kind in wanted.items() if any(it is not None for it in kind.values())
    }
    if len(given) > 1:
        names = " and ".join(given)
        raise bad_request(f"{names} contradict each other; give one of them", next(iter(given)))
    return next((StructuredOutput(**kind) for kind in given.values()), None)


def _from_format(response_format: ResponseFormat | None) -> dict[str, Any]:
    if response_format is None or isinstance(response_format, TextFormat):
        return {}
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema_
        if schema is None:
            raise bad_request("response_format.json_schema.schema is missing", "response_format")
        return {"json_schema": schema}
    if response_format.schema_ is not None:
        return {"json_schema": response_format.schema_}
    return {"json_object": True}


def _from_structured_outputs(body: SamplingFields) -> dict[str, Any]:
    wanted = body.structured_outputs
    if wanted is None:
        return {}
    kinds = {
        "json_schema": wanted.json_,
        "json_object": wanted.json_object,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    given = {kind: value for kind, value in kinds.items() if value is not None}
    if len(given) != 1:
        raise bad_request(
            "structured_outputs takes exactly one of json, json_object, regex, choice and grammar",
            "structured_outputs",
        )
    return given
