"""Computes prompts for other processes: `python -m hybrid_engine.prefill_worker MODEL SETTINGS [TEMPORARY]`.

SETTINGS are those of `LLM`, as JSON, with a `disk_cache`. Each line on stdin is one prompt, {"id": …} and what
`LLM.prefill` takes as a dict; each line on stdout says that one is stored, {"id": …, "error": null}, or why it isn't.
The first line, {"ready": true}, says that the model is loaded. The end of stdin ends the worker, which then removes the
folder TEMPORARY if it is given.
"""

from __future__ import annotations

import json
import queue
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from hybrid_engine.errors import HybridEngineError, RequestError
from hybrid_engine.llm import LLM


def serve_prefills(llm: LLM, lines: Iterable[str], out: TextIO) -> None:
    """Compute and store prompts until there are no more lines; those that wait are computed together."""
    _answer(out, ready=True)
    for batch in _batches(lines):
        prompt_ids = [prompt.pop("id") for prompt in batch]
        try:
            llm.prefill(batch)
            errors: list[str | None] = [None] * len(batch)
        except RequestError:
            # None of them was accepted: one by one, the others don't suffer.
            errors = [_error_of(llm, prompt) for prompt in batch]
        for prompt_id, error in zip(prompt_ids, errors, strict=True):
            _answer(out, id=prompt_id, error=error)


def _error_of(llm: LLM, prompt: dict[str, Any]) -> str | None:
    try:
        llm.prefill([prompt])
    except RequestError as error:
        return str(error)
    return None


def _batches(lines: Iterable[str]) -> Iterator[list[dict[str, Any]]]:
    """Wait for a prompt, then take all that have come by then."""
    arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            if line.strip():
                arrived.put(json.loads(line))
        arrived.put(None)

    threading.Thread(target=read, name="prefill-reader", daemon=True).start()
    while (first := arrived.get()) is not None:
        batch = [first]
        while not arrived.empty():
            prompt = arrived.get()
            if prompt is None:
                arrived.put(None)
                break
            batch.append(prompt)
        yield batch


def _answer(out: TextIO, **facts: Any) -> None:
    print(json.dumps(facts), file=out, flush=True)


def main(arguments: list[str]) -> int:
    """Run the worker; returns the exit status."""
    model, settings, *temporary = arguments
    try:
        with LLM(model, **json.loads(settings)) as llm:
            serve_prefills(llm, sys.stdin, sys.stdout)
    except HybridEngineError as error:
        _answer(sys.stdout, ready=False, error=f"{type(error).__name__}: {error}")
        return 1
    finally:
        for folder in temporary:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
