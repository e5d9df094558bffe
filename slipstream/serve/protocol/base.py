"""What all bodies of requests and responses share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_INT = 2**31 - 1  # counts and token ids live in 32-bit tensors

TokenId = Annotated[int, Field(ge=0, le=MOST_INT)]
Count = Annotated[int, Field(ge=0, le=MOST_INT)]
JsonSchema = dict[str, Any]


class RequestBody(BaseModel):
    """Fields are taken as they are, never converted; unknown ones are refused by name."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ResponseBody(BaseModel):
    """What the server says; the OpenAPI document describes it exactly."""

    model_config = ConfigDict(extra="forbid")
