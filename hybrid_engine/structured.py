"""Structured outputs: which tokens may come next, so that the whole answer matches a schema, a regex or a grammar.

llguidance knows how; it is asked for one thing only, the set of tokens allowed after those chosen so far. That set is
found as soon as a token is chosen, not when the next one is due: so the answer's end is known with its last token, and
a request whose grammar allows nothing more takes no further step and needs no end-of-text token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders

from hybrid_engine.errors import SamplingParamsError
from hybrid_engine.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

DEFAULT_WHITESPACE = r"[ \t\n\r]{0,32}"
MAX_COMPILED = 128
"""Grammars kept ready for the next request that asks for the same."""
MAX_EXPRESSIONS = 200_000
"""Of one grammar, as llguidance counts them before the first token: some sixty tools with schemas of their own, or the
regex `a{50000}`. What a token may cost grows with it: that regex, the worst known, takes 10 ms for each."""

TOO_LARGE = ("too many expressions constructed", "grammar) too big")
"""What llguidance says of a grammar that has more."""


class GrammarState:
    """Where one answer stands in its grammar. Advances token by token; nobody else's."""

    def __init__(
        self,
        matcher: LLMatcher,
        output_token_ids: Sequence[int] = (),
        *,
        vocab_size: int,
        end_marker: int,
        eos_token_ids: Sequence[int],
        ignore_eos: bool = False,
    ) -> None:
        """matcher: at the answer's start, and from now on ours. output_token_ids: what the answer has already.

        end_marker: a token that the matcher allows exactly where the answer may end. ignore_eos: the model may not
        choose to end there; the answer goes on as long as anything can be added.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_marker = end_marker
        self._eos_token_ids = eos_token_ids
        self._ignores_eos = ignore_eos
        self.finish_reason: str | None = None
        """'stop' once nothing can be added to the answer, 'error' when the grammar grew too complex, None before."""
        self.failure = ""
        """What went wrong where it is 'error'."""
        self.forbidden_V: np.ndarray | None = None
        """bool, tokens that may not come next. None once the answer has ended: what is sampled then is dropped."""
        if self._matcher.consume_tokens(list(output_token_ids)):
            self._find_forbidden()
        else:
            self._fail()
        if self.finish_reason == "error" and self._eos_token_ids:
            # A step samples a token all the same, and it is reported: let it be one without a text.
            self.forbidden_V = np.ones(vocab_size, bool)
            self.forbidden_V[self._eos_token_ids] = False

    def advance(self, token_id: int) -> None:
        """Take in the token that was chosen; a draft that was turned down is none. After the end: does nothing."""
        if self.finish_reason is not None:
            return
        if token_id in self._eos_token_ids:
            self._end("stop")
        elif self._matcher.consume_token(token_id):
            self._find_forbidden()
        else:
            self._fail()

    def _find_forbidden(self) -> None:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._fail()
            return
        is_forbidden = np.unpackbits(~mask, bitorder="little").view(bool)
        can_end = not is_forbidden[self._end_marker]
        is_forbidden[[self._end_marker, *self._eos_token_ids]] = True
        forbidden_V = is_forbidden[: self._vocab_size]
        if not forbidden_V.all():
            forbidden_V[self._eos_token_ids] = self._ignores_eos or not can_end
            self.forbidden_V = forbidden_V
        elif can_end:
            self._end("stop")
        else:
            self._fail("no token of this vocabulary goes on from here")

    def _fail(self, why: str = "") -> None:
        # The rest of llguidance's message shows the answer, which doesn't belong in a log.
        self.failure = why or self._matcher.get_error().partition("\n")[0]
        self._end("error")

    def _end(self, finish_reason: str) -> None:
        self.finish_reason = finish_reason
        self.forbidden_V = None


class Grammars:
    """Makes grammars ready for one tokenizer. The vocabulary is prepared at the first that is asked for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        limits: LLParserLimits | None = None,
    ) -> None:
        """vocab_size: of the model; the tokenizer may know fewer tokens, or more. limits: of one grammar's size."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        self._limits = limits
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled = lru_cache(MAX_COMPILED)(self._compile)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise SamplingParamsError when no answer can be made to match, or llguidance isn't installed."""
        self._compiled(params)

    def start(
        self, params: StructuredOutputsParams, output_token_ids: Sequence[int], *, ignore_eos: bool = False
    ) -> GrammarState:
        """Return the state of an answer that has these tokens already (those from before a preemption)."""
        state = self._state(self._compiled(params), output_token_ids, ignore_eos=ignore_eos)
        if state.finish_reason == "error":
            # Copies share what they work out, and the limit on it: other answers may have used it up.
            state = self._state(self._compile(params), output_token_ids, ignore_eos=ignore_eos)
        return state

    def _state(
        self, compiled: LLMatcher, output_token_ids: Sequence[int] = (), *, ignore_eos: bool = False
    ) -> GrammarState:
        return GrammarState(
            compiled.deep_copy(),
            output_token_ids,
            vocab_size=self.vocab_size,
            end_marker=self._prepared().eos_token,
            eos_token_ids=self._eos_token_ids,
            ignore_eos=ignore_eos,
        )

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        vocabulary = self._prepared()
        from llguidance import LLMatcher, LLParserLimits

        limits = self._limits or LLParserLimits(initial_lexer_fuel=MAX_EXPRESSIONS)
        matcher = LLMatcher(vocabulary, _as_llguidance(params), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(params, matcher.get_error())
        # Twice: what is forced is worked out far ahead, and a grammar too large for that fails from then on.
        for state in (self._state(matcher), self._state(matcher)):
            if state.finish_reason is not None:
                raise _refused(params, state.failure or "it allows no answer but the empty one")
        return matcher

    def _prepared(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._prepare()
            return self._vocabulary

    def _prepare(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise SamplingParamsError(
                "structured_outputs needs the package llguidance, which isn't installed here: "
                "pip install 'hybrid-engine[structured]'"
            ) from error
        num_known = 1 + max(self._tokenizer.get_vocab().values())
        # llguidance wants one that the tokenizer knows, also where the model has none: then it gets one of our own.
        known = [token_id for token_id in self._eos_token_ids if token_id < num_known]
        ends = known or [num_known]
        described = _described(self._tokenizer, new_special_ids=[] if known else ends)
        try:
            return LLTokenizer(described, n_vocab=max(self.vocab_size, num_known, ends[0] + 1), eos_token=ends)
        except ValueError as error:
            raise SamplingParamsError(
                f"structured_outputs can't be used with this model: llguidance can't tell the bytes of its tokenizer's "
                f"tokens: {error}"
            ) from error


def _described(tokenizer: Tokenizer, *, new_special_ids: Sequence[int]) -> str:
    """Return a tokenizer as JSON, with new special tokens, that llguidance reads.

    That is, nothing is padded or cut, and no decoder is one that it doesn't know.
    """
    text = tokenizer.to_str()
    has_metaspace = isinstance(tokenizer.decoder, decoders.Metaspace)
    if not (new_special_ids or has_metaspace or tokenizer.padding or tokenizer.truncation):
        return text  # as a rule; reading a vocabulary of 262,144 tokens as JSON would take a second
    parts = json.loads(text) | {"padding": None, "truncation": None}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for token_id in new_special_ids:
        parts["added_tokens"].append({"id": token_id, "content": f"<|special {token_id}|>"} | flags)
    if has_metaspace:
        # The same but for the text's first space, and a token of an answer never stands there.
        sign = parts["decoder"]["replacement"]
        replace = {"type": "Replace", "pattern": {"String": sign}, "content": " "}
        parts["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return json.dumps(parts)


def _as_llguidance(params: StructuredOutputsParams) -> str:
    """Return what is asked in llguidance's own form. Raises SamplingParamsError where that shows it to be wrong."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return grammar_from("choice", json.dumps(params.choice))
    whitespace = params.whitespace_pattern or DEFAULT_WHITESPACE
    try:
        if params.grammar is not None:
            return grammar_from("grammar", params.grammar)
        return LLMatcher.grammar_from_json_schema(
            '{"type": "object"}' if params.json_object else str(params.json),
            overrides={
                "whitespace_flexible": not params.disable_any_whitespace,
                "whitespace_pattern": None if params.disable_any_whitespace else whitespace,
            },
        )
    except ValueError as error:
        raise _refused(params, str(error)) from error


def _refused(params: StructuredOutputsParams, why: str) -> SamplingParamsError:
    name, why = params.constraint, why.strip()
    if any(sign in why for sign in TOO_LARGE):
        why = f"it is too large ({why}): let it repeat less, or list less"
    return SamplingParamsError(f"structured_outputs.{name} is {getattr(params, name)!r:.200}, refused: {why}")
