"""From token ids to text while they come, and the stop strings that end it.

Two things are held back: bytes that are not yet a whole character, which would show as a replacement character, and
text that may turn out to be the start of a stop string, because what was streamed can't be taken back. What was
released, joined, is the answer's text.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from hybrid_engine.errors import CheckpointError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

PRIMED_TOKENS = 8
"""Tokens of the prompt's end that the decoder sees: enough for one of them to have text, so that it knows
whether the answer's first token starts a text (its leading space goes) or continues one (it stays)."""

MAX_HELD_BYTES = 3
"""Bytes without a character that are held back: with a fourth it is whole, or it never will be."""


def fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return what decodes token by token. Raises CheckpointError for a tokenizer written in Python."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        raise CheckpointError(
            f"the tokenizer is a {type(tokenizer).__name__}, which can't decode a stream: put a tokenizer.json beside "
            f"the weights"
        )
    return fast


class TextStream:
    """Decodes one answer's tokens, releasing whole characters only."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._released_ids: list[int] = []  # the context in which the held tokens are decoded
        self._held_ids: list[int] = []
        self._prompt_tail = ""
        self._stream = self._prime(list(prompt_token_ids[-PRIMED_TOKENS:]))

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is complete with it, possibly none."""
        self._held_ids.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # Byte tokens that follow a valid run can make the whole run invalid, which the stream can't take back.
            if "Invalid prefix" not in str(error):
                raise
            return self.flush()
        if text is None:
            is_hopeless = self._decode(self._held_ids).endswith(REPLACEMENT * (MAX_HELD_BYTES + 1))
            return self.flush() if is_hopeless else ""
        self._released_ids, self._held_ids = self._held_ids, []
        return self._without_prompt(text)

    def flush(self) -> str:
        """Return what is held back as it is, broken characters included."""
        if not self._held_ids:
            return ""
        text = self._continuation(self._released_ids, self._held_ids)
        self._released_ids, self._held_ids = self._held_ids, []
        self._stream = self._new_stream(self._released_ids)
        return self._without_prompt(text)

    def _prime(self, prompt_ids: list[int]) -> DecodeStream:
        """Start after the prompt's last whole character; bytes that the answer may complete are held as if its own."""
        for _ in range(MAX_HELD_BYTES):
            # The tail may begin inside a character, which spoils the run of bytes behind it.
            if self._decode(prompt_ids).startswith(REPLACEMENT):
                prompt_ids = prompt_ids[1:]
        num_whole = next(
            (n for n in range(len(prompt_ids), 0, -1) if not self._decode(prompt_ids[:n]).endswith(REPLACEMENT)), 0
        )
        if len(prompt_ids) - num_whole > MAX_HELD_BYTES:
            num_whole = len(prompt_ids)  # not a character cut in two but garbage: leave all of it to the prompt
        self._released_ids, cut_ids = prompt_ids[:num_whole], prompt_ids[num_whole:]
        stream = self._new_stream(self._released_ids)
        if cut_ids:
            stream.step(self._tokenizer, cut_ids)
            self._held_ids = cut_ids
            self._prompt_tail = self._continuation(self._released_ids, cut_ids)
        return stream

    def _without_prompt(self, text: str) -> str:
        """Drop the prompt's own broken end from the first text released, unless the answer made it whole."""
        tail, self._prompt_tail = self._prompt_tail, ""
        return text.removeprefix(tail)

    def _new_stream(self, released_ids: list[int]) -> DecodeStream:
        # A stream primed with a broken character would give its text out a second time.
        is_broken = self._decode(released_ids).endswith(REPLACEMENT)
        return DecodeStream(ids=[] if is_broken else released_ids, skip_special_tokens=self._skip_special_tokens)

    def _continuation(self, before_ids: list[int], ids: list[int]) -> str:
        """Return the text that ids add to that of before_ids."""
        before, whole = self._decode(before_ids), self._decode(before_ids + ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, however it is cut."""

    def __init__(self, stops: Sequence[str], *, include_in_text: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_text = include_in_text
        self._held = ""
        self._max_held = max(map(len, self._stops), default=1) - 1

    def add(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text that is safe to release and the stop string found, if any.

        may_stop: False while the answer is too short to end; a stop string that is complete by now is then text.
        The first one to be complete wins; of two that end together, the longer.
        """
        buffer = self._held + text
        stop = self._find(buffer) if may_stop else None
        if stop is not None:
            self._held = ""
            end = buffer.index(stop) + (len(stop) if self._include_in_text else 0)
            return buffer[:end], stop
        num_held = self._num_held(buffer)
        released = buffer[: len(buffer) - num_held]
        self._held = buffer[len(released) :]
        return released, None

    def flush(self) -> str:
        """Return the text held back: the answer ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> str | None:
        ends = [(buffer.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in buffer]
        return min(ends)[2] if ends else None

    def _num_held(self, buffer: str) -> int:
        """Characters at the end of the buffer that some stop string starts with."""
        for num in range(min(self._max_held, len(buffer)), 0, -1):
            end = buffer[-num:]
            if any(len(stop) > num and stop.startswith(end) for stop in self._stops):
                return num
        return 0


class Detokenizer:
    """Turns one answer's tokens into released text and tells when a stop string ends it."""

    def __init__(self, stream: TextStream, stops: StopStrings, *, min_tokens: int = 0) -> None:
        self._stream = stream
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def add(self, token_id: int) -> tuple[str, str | None]:
        """Take the next token; return the text to release and the stop string that ends the answer, if any."""
        self._num_tokens += 1
        return self._stops.add(self._stream.add(token_id), may_stop=self._num_tokens >= self._min_tokens)

    def finish(self) -> tuple[str, str | None]:
        """Release all that is held back, for an answer that ended; a stop string may still turn up in it."""
        may_stop = self._num_tokens >= self._min_tokens
        text, stop = self._stops.add(self._stream.flush(), may_stop=may_stop)
        return text + self._stops.flush(), stop
