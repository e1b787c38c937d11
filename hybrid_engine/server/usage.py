"""How many tokens a request took, and where those of its prompts came from."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hybrid_engine.outputs import RequestOutput
from hybrid_engine.server.conversations import Divergence


class Usage:
    """Adds up the deltas of all prompts of one request."""

    def __init__(self) -> None:
        self._prompts: set[str] = set()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_answer_tokens = 0
        self.num_reasoning_tokens = 0
        self.divergence: Divergence | None = None
        """Where the prompt parts from what the conversation's last turn left."""
        self._cache: Counter[str] = Counter()

    def add(self, delta: RequestOutput) -> None:
        """Count what is new."""
        if delta.request_id not in self._prompts:
            self._prompts.add(delta.request_id)
            self._num_prompt_tokens += len(delta.prompt_token_ids)
            self._num_cached_tokens += delta.num_cached_tokens
            if delta.cache is not None:
                self._cache.update({"hit": delta.cache.hit, "last": delta.cache.LAST} | delta.cache.reasons())
        for output in delta.outputs:
            self._num_answer_tokens += len(output.token_ids)

    def body(self, *, explains: bool = False, has_answer: bool = True) -> dict[str, Any]:
        """Return OpenAI's usage. explains: say where every prompt token came from, with parts that add up."""
        num_answer_tokens = self._num_answer_tokens if has_answer else 0
        details: dict[str, Any] = {"cached_tokens": self._num_cached_tokens}
        if explains:
            details["explanation"] = dict(self._cache)
            if self.divergence is not None:
                details["diverged"] = self.divergence.body()
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": self._num_prompt_tokens + num_answer_tokens,
            "prompt_tokens_details": details,
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }
