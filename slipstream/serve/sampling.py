"""`SamplingParams` from the fields of a request."""

from typing import Any

from slipstream.core.sampling_defaults import SamplingDefaults
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import StructuredOutput
from slipstream.serve.errors import bad_request
from slipstream.serve.protocol.sampling import (
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    TextFormat,
)

# Fields with the same name and meaning on both sides; those not given keep the default.
_COMMON = (
    *("n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
    "prompt_logprobs",
)


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutput | None = None,
    **overrides: Any,
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        defaults: of fields that the request does not give.
        max_tokens, logprobs: resolved, as the two endpoints have different names and defaults.
        structured: from `structured_output`.
        overrides: replace the request's own.

    Raises:
        UsageError: values that do not fit together.
    """
    given = {name: getattr(body, name) for name in _COMMON if getattr(body, name) is not None}
    if body.logit_bias:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if body.speculative is not None:
        given["num_speculative_tokens"] = body.speculative.num_speculative_tokens
    if max_tokens is not None or "max_tokens" not in defaults.values:
        given["max_tokens"] = max_tokens
    given |= {"logprobs": logprobs, **overrides, "structured": structured}
    return defaults.limited(defaults.params(given))


def structured_output(
    body: SamplingFields, response_format: ResponseFormat | None
) -> StructuredOutput | None:
    """What the output must be; ApiError where two fields say so."""
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
