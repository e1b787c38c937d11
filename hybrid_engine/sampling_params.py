"""What a caller may ask of the sampler, checked when it is made."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.errors import SamplingParamsError


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an answer must match, whole: give exactly one of json, json_object, regex, choice and grammar.

    The names are vLLM's. Raises SamplingParamsError for none or two of them and for values of the wrong kind; whether a
    schema, regex or grammar makes sense is checked when a request that carries it is submitted.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a dict or as JSON; kept as JSON."""
    regex: str | None = None
    """A regular expression in Rust's syntax: no look-around, no back-references."""
    choice: tuple[str, ...] | None = None
    """The answer is one of these; a list is accepted too."""
    grammar: str | None = None
    """A context-free grammar, in Lark's syntax (its rule is `start`) or as GBNF (`root ::= …`)."""
    json_object: bool = False
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without any whitespace between its parts."""
    whitespace_pattern: str | None = None
    """A regex of what may stand between the parts of JSON; None: at most 32 spaces, tabs and line ends in a row, since
    some models never stop once they have begun."""

    def __post_init__(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and value != ""), name, value, "a text, or None")
        for name in ("json_object", "disable_any_whitespace"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        if self.choice is not None:
            _require(not isinstance(self.choice, str), "choice", self.choice, "a list of texts, or None")
            object.__setattr__(self, "choice", _tuple("choice", self.choice, str))
            is_right = self.choice and all(self.choice)
            _require(bool(is_right), "choice", self.choice, "at least one text, none of them empty")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        _require(len(given) == 1, "structured_outputs", given or None, f"exactly one of {', '.join(CONSTRAINTS)}")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            is_used = getattr(self, name) in (None, False) or given[0] in ("json", "json_object")
            _require(is_used, name, getattr(self, name), f"left out with {given[0]}: it is about JSON")

    @property
    def constraint(self) -> str:
        """The name of the one that was given."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it stops.

    The names and meanings are vLLM's. Raises SamplingParamsError for a value outside its range.
    """

    n: int = 1
    """Answers to the same prompt, each a request of its own."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as far as the model's context and the memory reach."""
    min_tokens: int = 0
    """Tokens before which neither an end-of-text token nor a stop string ends the answer."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest token's probability."""
    seed: int | None = None
    """The same seed gives the same text whatever else is in the batch; None draws one."""
    repetition_penalty: float = 1.0
    """Divides positive logits (multiplies negative ones) of tokens seen in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the answer has it."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these; a single string or a list is accepted too."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends after one of these (its text is not part of the answer)."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on past the model's end-of-text tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to the logit of each, -100 to 100; a dict is accepted too."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and those of this many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. The prefix cache is not read for such a request, unless
    prompt_logprob_start says from where on they are wanted."""
    prompt_logprob_start: int | None = None
    """The first prompt token, counted from 0, to report with prompt_logprobs: those before it get None, and all of them
    but the last may be found in the prefix cache. None: from the second token on, and the cache is not read."""
    skip_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt even if a prefix is cached (it is cached afterwards all the same)."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the answer must match; it ends when nothing can be added, also before min_tokens."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple("stop", stop, str))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, int))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        for name in _INTEGERS:
            _require(_is_integer(getattr(self, name)), name, getattr(self, name), "an integer")
        for name in _SWITCHES:
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name in _OPTIONAL_INTEGERS:
            value = getattr(self, name)
            _require(value is None or _is_integer(value), name, value, "an integer, or None")
        for name in _NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            _require(is_number, name, value, "a number")
        self._check()

    def _check(self) -> None:
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "at least 1, or None",
        )
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "finite and at least 0",
        )
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            self.repetition_penalty,
            f"from {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"from 0 to {MAX_LOGPROBS}, or None")
        start = self.prompt_logprob_start
        _require(start is None or start >= 1, "prompt_logprob_start", start, "at least 1, or None")
        if start is not None:
            _require(self.prompt_logprobs is not None, "prompt_logprobs", None, "a number: prompt_logprob_start is set")
        _require(all(self.stop), "stop", self.stop, "strings that are not empty")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2**63 - 1, or None")
        structured = self.structured_outputs
        is_right = structured is None or isinstance(structured, StructuredOutputsParams)
        _require(is_right, "structured_outputs", structured, "a StructuredOutputsParams, or None")


MAX_LOGPROBS = 1000
MAX_LOGIT_BIAS = 100
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond these a finite logit may become infinite."""
_INTEGERS = ("n", "min_tokens", "top_k")
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "skip_reading_prefix_cache")
_OPTIONAL_INTEGERS = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "prompt_logprob_start")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _tuple(name: str, values: object, kind: type) -> tuple:
    """Return the values as a tuple, None as an empty one. Raises SamplingParamsError for values of another kind."""
    found = () if values is None else tuple(values) if isinstance(values, Iterable) else (values,)
    is_right = isinstance(values, Iterable | None) and all(
        isinstance(value, str) if kind is str else _is_integer(value) for value in found
    )
    _require(is_right, name, values, f"a sequence of {'strings' if kind is str else 'integers'}")
    return found


def _logit_bias(bias: object) -> tuple[tuple[int, float], ...]:
    """Return the pairs of a dict, ascending. Raises SamplingParamsError for what is neither that nor pairs."""
    wanted = f"token ids with a number from {-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS} each"
    pairs: list[tuple[Any, Any]]
    try:
        given: Any = bias.items() if isinstance(bias, Mapping) else bias or ()
        pairs = sorted((key, value) for key, value in given)
    except (TypeError, ValueError) as error:
        raise SamplingParamsError(f"logit_bias is {bias!r:.60}, must be {wanted}") from error
    for token_id, value in pairs:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        is_right = _is_integer(token_id) and is_number and abs(value) <= MAX_LOGIT_BIAS
        _require(is_right, "logit_bias", {token_id: value}, wanted)
    _require(len(dict(pairs)) == len(pairs), "logit_bias", bias, f"{wanted}, no id twice")
    return tuple((int(token_id), float(value)) for token_id, value in pairs)


def _schema(schema: object) -> str:
    """Return a JSON schema as JSON. Raises SamplingParamsError for what is none."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingParamsError(f"json is {schema!r:.60}, must be a JSON schema: {error}") from error
    _require(isinstance(found, dict), "json", schema, "a JSON schema: an object, as a dict or as JSON")
    return text


def _require(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise SamplingParamsError(f"{name} is {value!r}, must be {wanted}")
