"""Prefill in one process, decoding in another: a long prompt then never stands in the way of somebody's next token.

The prefill process computes all of a prompt but its last token and stores what it leaves behind (keys, values, states)
in a folder in shared memory. This process is told, takes it from there into its own caches, computes the last token
and goes on. The folder is a disk tier like any other: a prompt that begins like an earlier one is computed only from
where they part, and whatever is missing is computed here.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Unpack

from hybrid_engine.errors import ConfigError, EngineDeadError
from hybrid_engine.inputs import PromptLike, as_prompts, as_sampling
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import OutputCollector, RequestOutput
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.startup import EngineSettings
from hybrid_engine.stream import DeltaStream

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
OWN_SETTINGS = ("disk_cache", "disk_cache_bytes")
HANDED_OVER = ("prompt_token_ids", "cache_salt", "message_boundaries", "priority")
"""What the prefill process is told of a prompt."""


class DisaggregatedLLM:
    """A model in two processes: one computes prompts, this one the answers."""

    def __init__(
        self, model: str | Path, *, handoff_bytes: int | str = "2GiB", **settings: Unpack[EngineSettings]
    ) -> None:
        """Start the prefill process and load the model in both.

        handoff_bytes: shared memory for what is handed over. settings: of both processes, see EngineSettings.
        Raises ConfigError or CheckpointError as LLM does.
        """
        given = [name for name in OWN_SETTINGS if name in settings]
        if given:
            raise ConfigError(f"{given[0]} is set: the two processes share a folder of their own, see handoff_bytes")
        has_shared_memory = os.access(SHARED_MEMORY, os.W_OK)
        self._folder = tempfile.mkdtemp(prefix="hybrid-engine-", dir=SHARED_MEMORY if has_shared_memory else None)
        self._worker: PrefillProcess | None = None
        try:
            shared: Any = {**settings, "disk_cache": self._folder, "disk_cache_bytes": handoff_bytes}
            self._worker = PrefillProcess(model, shared, temporary_folder=self._folder)
            self.llm = LLM(model, **shared)
            self._worker.wait_until_ready()
        except BaseException:
            self._end()
            raise

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, as `LLM.generate`: each is decoded here as soon as it was computed there."""
        assert self._worker is not None, "it was closed"
        inputs = as_prompts(prompts)
        sampling = as_sampling(sampling_params, len(inputs))
        requests = [self.llm.as_tokens(prompt) for prompt in inputs]
        waiting = {self._worker.send(request): index for index, request in enumerate(requests)}
        streams: dict[int, tuple[DeltaStream, OutputCollector]] = {}
        finished: dict[int, RequestOutput] = {}
        try:
            while waiting or streams:
                for prompt_id in self._worker.receive(waits=not streams):
                    index = waiting.pop(prompt_id, None)
                    if index is not None:  # else of a call that was interrupted
                        streams[index] = self.llm.stream(requests[index], sampling[index]), OutputCollector()
                for index in _advance(streams):
                    stream, collector = streams.pop(index)
                    finished[index] = collector.output()
        finally:
            for stream, _ in streams.values():
                stream.close()
        return [finished[index] for index in range(len(inputs))]

    def close(self) -> None:
        """End both processes and give the shared memory back."""
        if self._worker is not None:
            with suppress(EngineDeadError):
                self.llm.reset_prefix_cache()  # or it would be flushed to a folder that goes
            self.llm.close()
        self._end()

    def __enter__(self) -> DisaggregatedLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _advance(streams: Mapping[int, tuple[DeltaStream, OutputCollector]]) -> list[int]:
    """Take one delta of each stream, which runs a step of all of them; return those that have ended."""
    ended = []
    for index, (stream, collector) in streams.items():
        delta = next(stream)
        collector.add(delta)
        if delta.finished:
            ended.append(index)
    return ended


class PrefillProcess:
    """The other process, as this one sees it. Should it die, its prompts count as done and are computed here."""

    def __init__(self, model: str | Path, settings: Mapping[str, Any], *, temporary_folder: str) -> None:
        """temporary_folder: removed by the process when it ends, also when this one was killed."""
        command = [sys.executable, "-m", "hybrid_engine.prefill_worker", str(model), json.dumps(settings, default=str)]
        self._process = subprocess.Popen(
            [*command, temporary_folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process: it ends the other one in good order
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ids = count()
        self._unanswered: set[int] = set()
        self._is_ready = False
        self._is_dead = False
        threading.Thread(target=self._read, name="prefill-answers", daemon=True).start()

    @property
    def process_id(self) -> int:
        """The operating system's number of the process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the model is loaded there. Raises ConfigError when it can't be."""
        answer = self._answers.get()
        if answer is None or not answer["ready"]:
            reason = answer["error"] if answer else f"it ended with {self._process.wait()}"
            raise ConfigError(f"the prefill process did not start: {reason}")
        self._is_ready = True

    def send(self, prompt: Mapping[str, Any]) -> int:
        """Ask for a prompt to be computed; return the id under which `receive` names it."""
        prompt_id = next(self._ids)
        self._unanswered.add(prompt_id)
        line = {"id": prompt_id} | {name: prompt[name] for name in HANDED_OVER}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            self._answers.put(None)
        return prompt_id

    def receive(self, *, waits: bool) -> Iterator[int]:
        """Iterate over the prompts that are done; waits: until there is one."""
        while self._unanswered and (waits or not self._answers.empty()):
            answer = self._answers.get()
            if answer is None:
                self._report_death()
                yield from sorted(self._unanswered)
                self._unanswered.clear()
                return
            if answer["error"]:
                logger.warning(
                    "the prefill process could not compute a prompt: %s; it is computed here", answer["error"]
                )
            self._unanswered.discard(answer["id"])
            waits = False
            yield answer["id"]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with suppress(OSError):  # it had died with something unread
                self._process.stdin.close()
        if not self._is_ready:
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _report_death(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            logger.error("the prefill process has ended with %s: prompts are computed here", self._process.poll())
        # Whoever asks next must learn of it too.
        self._answers.put(None)
