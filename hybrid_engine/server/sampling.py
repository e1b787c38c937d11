"""From the fields of a body to sampling parameters."""

from __future__ import annotations

from typing import Any

from hybrid_engine.errors import SamplingParamsError
from hybrid_engine.sampling_params import SamplingParams, StructuredOutputsParams
from hybrid_engine.server.api_errors import ApiError
from hybrid_engine.server.protocol import ResponseFormat, SamplingFields

SAME_NAMES = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
    "skip_reading_prefix_cache",
)


def sampling_params(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputsParams | None = None,
    **changes: Any,
) -> SamplingParams:
    """Return what the body asks of the sampler.

    structured: what the answer must match, if not what the body says. changes: parameters that the body has no say in.
    Raises SamplingParamsError for a value out of its range and ApiError for fields that contradict each other.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400,
            "stream_options is given and stream is not true: set both, or leave it out",
            code="invalid_value",
            param="stream_options",
        )
    given = {name: getattr(body, name) for name in SAME_NAMES if getattr(body, name) is not None}
    given |= {"max_tokens": max_tokens, "logprobs": logprobs}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    given["structured_outputs"] = structured or structured_outputs(body)
    return SamplingParams(**given | changes)


def structured_outputs(body: SamplingFields) -> StructuredOutputsParams | None:
    """Return what an answer must match; None: it may be anything."""
    wanted = body.structured_outputs
    from_format = None if body.response_format is None else _response_format(body.response_format)
    if wanted is None:
        return from_format
    if from_format is not None:
        raise ApiError(
            400,
            "response_format and structured_outputs are both given: an answer matches one of them",
            code="invalid_value",
            param="structured_outputs",
        )
    given = {name: value for name, value in wanted.model_dump(by_alias=True).items() if value is not None}
    return StructuredOutputsParams(**given)


def _response_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    value = getattr(wanted, wanted.type)
    if value is None:
        raise ApiError(
            400,
            f"response_format is of type {wanted.type!r} and has no {wanted.type!r}: give it",
            code="invalid_value",
            param=f"response_format.{wanted.type}",
        )
    if wanted.type == "json_schema":
        schema = value.schema_
        return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
    return StructuredOutputsParams(**{wanted.type: value})


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError as error:
        raise SamplingParamsError(f"logit_bias is keyed by token ids, written as text: {error}") from error
