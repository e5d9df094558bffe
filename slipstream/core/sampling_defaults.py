"""What requests are sampled with where they leave parameters out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields of `SamplingParams` that a request does not give.

    Attributes:
        values: by field; `SamplingParams` has the default of every other field.
        most_tokens: no served request gets more output tokens; None: no limit.
        source: where they come from, in words.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    most_tokens: int | None = None
    source: str = ""

    def params(self, given: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request that gives these fields.

        Raises:
            UsageError: values that do not fit together.
        """
        return SamplingParams(**{**self.values, **given})

    def limited(self, params: SamplingParams) -> SamplingParams:
        """With at most `most_tokens` output tokens."""
        if self.most_tokens is None:
            return params
        asked = self.most_tokens if params.max_tokens is None else params.max_tokens
        return replace(params, max_tokens=min(asked, self.most_tokens))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())
