"""llama.cpp as a peer, where its Python module is installed: driven by its own batches, so that no server is timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_engine.errors import CheckpointError, ConfigError

BATCH_TOKENS = 2048
"""Most tokens of one call, llama.cpp's own default."""
SEQUENCE_ROUNDING = 256
"""llama.cpp gives each sequence a multiple of so many tokens."""

Row = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether the next token is wanted."""


class LlamaCpp:
    """Greedy answers by llama.cpp on a GGUF file, all prompts in one batch; nothing stays from call to call."""

    name = "llama.cpp"

    def __init__(self, gguf_file: Path, *, num_threads: int, num_requests: int, num_tokens: int) -> None:
        """num_requests: most prompts of a call. num_tokens: most tokens of one, its answer counted.

        Raises ConfigError when llama_cpp can't be imported, CheckpointError when it can't load the file.
        """
        if not gguf_file.is_file():
            raise CheckpointError(f"llama.cpp's model is {gguf_file}, which is no file: give a GGUF file")
        try:
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as error:  # its library may be missing, or not load
            raise ConfigError(
                f"llama.cpp can't be compared with: import llama_cpp failed ({error}); pip install llama-cpp-python"
            ) from error
        self._api: Any = llama_cpp
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(
            str(gguf_file).encode(), self._api.llama_model_default_params()
        )
        if not self._model:
            raise CheckpointError(f"llama.cpp can't load {gguf_file}; it has said why on the error output")
        params = self._api.llama_context_default_params()
        params.n_ctx = num_requests * -(-num_tokens // SEQUENCE_ROUNDING) * SEQUENCE_ROUNDING
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = num_requests
        params.n_threads = params.n_threads_batch = num_threads
        params.swa_full = False  # as its own programs have it
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise ConfigError(f"llama.cpp can't make a context of {params.n_ctx} tokens for {num_requests} sequences")
        self._vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(BATCH_TOKENS, 0, 1)

    @property
    def facts(self) -> str:
        """What it says of itself: the instruction sets that it was built with."""
        return str(self._api.llama_print_system_info().decode()).strip()

    def generate(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
        """Return num_new_tokens greedy tokens for each prompt, end-of-text tokens ignored."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        answers: list[list[int]] = [[token] for token in self._next_tokens(rows)]
        for step in range(num_new_tokens - 1):
            rows = [
                (answer[-1], len(prompt) + step, sequence, True)
                for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            for answer, token in zip(answers, self._next_tokens(rows), strict=True):
                answer.append(token)
        return answers

    def _next_tokens(self, rows: Sequence[Row]) -> list[int]:
        """Compute the rows, and return the likeliest token behind each that wants one."""
        found: list[int] = []
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            self._fill(part)
            status = self._api.llama_decode(self._context, self._batch)
            assert status == 0, f"llama_decode of {len(part)} tokens ended with {status}"
            found += [self._likeliest(index) for index, (*_, is_wanted) in enumerate(part) if is_wanted]
        return found

    def _fill(self, rows: Sequence[Row]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_wanted

    def _likeliest(self, index: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
