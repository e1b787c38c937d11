"""The Python API: `LLM(model).generate / chat / stream / score`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from hybrid_engine import tiny_hybrid
from hybrid_engine.chat_template import ChatTemplate, Messages, read_template
from hybrid_engine.connectors.tiered import TierStats
from hybrid_engine.engine import Engine, Prompt
from hybrid_engine.errors import RequestError
from hybrid_engine.inputs import PromptInput, PromptLike, as_conversations, as_prompts, as_sampling, is_conversation
from hybrid_engine.interrupts import interrupts_deferred
from hybrid_engine.models.base import ModelInfo
from hybrid_engine.outputs import OutputCollector, RequestOutput
from hybrid_engine.pinning import Pin, pin_prefix
from hybrid_engine.plan import MemoryPlan
from hybrid_engine.progress_bar import progress_bar
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scoring import Continuation, ContinuationScore, scoring_request
from hybrid_engine.startup import (
    EnginePlan,
    EngineSettings,
    make_config,
    plan_engine,
    read_model_config,
    start_engine,
)
from hybrid_engine.stream import DeltaStream
from hybrid_engine.turns import EngineTurns


class LLM:
    """A model ready to answer. Several can live in one process, and several threads may ask one.

    Threads take turns: each step that one of them runs takes along the requests of all.
    """

    def __init__(
        self,
        model: str | Path = tiny_hybrid.NAME,
        *,
        chat_template: str | Path | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Load a model.

        model: a folder with safetensors or one GGUF file, or a .gguf file; by default the small one that comes along.
        chat_template: a Jinja template, or the Path of a file that holds one, used instead of the checkpoint's own.
        settings: see EngineSettings.
        Raises ConfigError, also for a setting that doesn't exist, or CheckpointError.
        """
        self._template = read_template(chat_template) if isinstance(chat_template, Path) else chat_template
        engine, plan = start_engine(make_config(tiny_hybrid.find_model(model), **settings))
        self._set_up(engine, plan)

    @classmethod
    def from_engine(cls, engine: Engine, plan: EnginePlan, *, chat_template: str | None = None) -> LLM:
        """Wrap an engine that was put together by hand."""
        llm = cls.__new__(cls)
        llm._template = chat_template
        llm._set_up(engine, plan)
        return llm

    @staticmethod
    def plan(model: str | Path = tiny_hybrid.NAME, **settings: Unpack[EngineSettings]) -> EnginePlan:
        """Return what `LLM(model, …)` would set up, from the model's config alone: no weights are read.

        model: as for LLM, or a config.json. settings: see EngineSettings.
        """
        path = tiny_hybrid.find_model(model)
        return plan_engine(read_model_config(path), make_config(path, **settings))

    def _set_up(self, engine: Engine, plan: EnginePlan) -> None:
        self._engine = engine
        self._plan = plan
        self._ids = map(str, itertools.count())
        self._receivers: dict[str, Callable[[RequestOutput], None]] = {}
        self._pins: dict[str, Pin] = {}
        self._turns = EngineTurns(engine)
        self._chat_template = ChatTemplate(engine.tokenizer, self._template)

    def close(self) -> None:
        """Flush the disk cache and end; the model can't be asked any more. Also at the end of a `with` block."""
        with self._turns.take() as engine:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What it is

    @property
    def engine_plan(self) -> EnginePlan:
        """All that was found out at the start: `model_info`, `memory_plan` and `max_model_len` are parts of it."""
        return self._plan

    @property
    def model_info(self) -> ModelInfo:
        """The model's layers and sizes."""
        return self._plan.info

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the cache memory is shared out."""
        return self._plan.memory

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._plan.max_model_len

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        return self._engine.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, pinned ones and those in host memory and on disk too."""
        with self._turns.take() as engine:
            engine.reset_prefix_cache()
            self._pins.clear()

    def pin(self, prompt: PromptLike, *, name: str | None = None) -> Pin:
        """Keep a prompt cached, computing it if need be: a system prompt, a document that many will ask about.

        It stays until `unpin` or `reset_prefix_cache`. name: to tell pins apart; None: a number.
        Raises RequestError when the name is taken, when the prompt can't be run, or when a request of max_model_len
        tokens would not fit beside all that is pinned.
        """
        inputs = as_prompts(prompt)
        if len(inputs) != 1:
            raise RequestError(f"{len(inputs)} prompts were given, pin takes one: call it for each")
        with self._turns.take() as engine:
            return self._pin(engine.tokenize(inputs[0].content), inputs[0].cache_salt, name)

    def fork(self, output: RequestOutput, *, name: str | None = None, cache_salt: str = "") -> Pin:
        """Pin the end of an answer, so that several continuations start there: prompts that begin with its token_ids.

        output: of a request that has finished, its first answer counts. cache_salt: the one of its prompt.
        Raises RequestError as `pin` does.
        """
        if not output.finished:
            raise RequestError(f"request {output.request_id} has not finished: fork what generate or chat returned")
        with self._turns.take():
            return self._pin([*output.prompt_token_ids, *output.outputs[0].token_ids], cache_salt, name)

    def unpin(self, pin: Pin) -> None:
        """Let a pinned prefix go the way of all others; one that is not pinned any more is ignored."""
        with self._turns.take() as engine:
            engine.scheduler.coordinator.pins.release(pin.prefix)
            if self._pins.get(pin.name) is pin:
                del self._pins[pin.name]

    @property
    def pins(self) -> Mapping[str, Pin]:
        """What is pinned, by name."""
        return dict(self._pins)

    def _pin(self, token_ids: Sequence[int], cache_salt: str, name: str | None) -> Pin:
        chosen = next(self._ids) if name is None else name
        if chosen in self._pins:
            raise RequestError(f"name is {chosen!r}, which is pinned already: unpin it, or choose another name")
        pin_it = partial(
            pin_prefix,
            self._engine.scheduler,
            token_ids,
            name=chosen,
            cache_salt=cache_salt,
            max_model_len=self.max_model_len,
        )
        # The last token of an answer was never computed.
        pin = pin_it(min_tokens=len(token_ids) - 1)
        if pin is None:
            once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            self.generate({"prompt_token_ids": list(token_ids), "cache_salt": cache_salt}, once, progress=False)
            pin = pin_it()
        if pin is None:
            raise RequestError(
                f"nothing of the prompt's {len(token_ids)} tokens could be cached: it is shorter than a block, prefix "
                f"caching is off, or the cache memory is full of running requests"
            )
        self._pins[chosen] = pin
        return pin

    def prefill(self, prompts: PromptLike | Sequence[PromptLike]) -> None:
        """Compute prompts, all but the last token of each, and flush the cache: other processes go on from there.

        They find them in the same `disk_cache`. Raises RequestError, having accepted none, when one can't be run.
        """
        known = [self.as_tokens(prompt) for prompt in as_prompts(prompts)]
        # The state that whoever goes on needs is the one before the last token, which it computes for its logits.
        shorter = [{**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:-1], "prompt": None} for prompt in known]
        self.generate(
            [prompt for prompt in shorter if prompt["prompt_token_ids"]],
            SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
            progress=False,
        )
        self.flush_cache()

    def as_tokens(self, prompt: PromptInput) -> dict[str, Any]:
        """Return a prompt as a dict that `generate` and `stream` take, its text as token ids."""
        with self._turns.take() as engine:
            token_ids = engine.tokenize(prompt.content)
        return {
            "prompt": prompt.text,
            "prompt_token_ids": token_ids,
            "cache_salt": prompt.cache_salt,
            "message_boundaries": [int(position) for position in prompt.message_boundaries],
            "priority": prompt.priority,
        }

    def tier_stats(self) -> TierStats | None:
        """Return what the host and disk cache hold and what was moved; None where there is neither."""
        with self._turns.take() as engine:
            return engine.tier_stats()

    def flush_cache(self) -> None:
        """Have the disk cache keep all that is cached now, whatever becomes of this process."""
        with self._turns.take() as engine:
            engine.flush_cache()

    # What it does

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts and return the outputs in their order.

        prompts: a text, token ids, a dict with 'prompt' or 'prompt_token_ids' and 'cache_salt', or a list of these.
        sampling_params: one for all or one for each; None: SamplingParams().
        progress: show a progress bar on stderr; None: when that is a terminal.
        Raises RequestError, having accepted none of them, when one prompt can't be run; EngineDeadError when a step
        fails. Ctrl-C lets the step in flight end, then aborts the prompts of this call.
        """
        found = dict(self.as_completed(prompts, sampling_params, progress=progress))
        return [found[index] for index in range(len(found))]

    def as_completed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answer all prompts; yield the index and the output of each as soon as it is finished.

        For the arguments and what is raised, at the first output, see `generate`. Closing the iterator aborts the rest.
        """
        requests = self._requests(prompts, sampling_params)
        collectors = [OutputCollector() for _ in requests]
        finished: deque[int] = deque()
        bar = progress_bar(progress)
        try:
            with self._turns.take() as engine:
                engine.add_requests(requests)
                for index, request in enumerate(requests):
                    self._receivers[request.request_id] = partial(_collect, collectors[index], finished, index)
            with bar:
                task = bar.add_task("prompts", total=len(requests))
                for num_finished in range(1, len(requests) + 1):
                    while not finished:
                        self._step()
                    index = finished.popleft()
                    bar.update(task, completed=num_finished)
                    yield index, collectors[index].output()
        finally:
            for request in requests:
                self._end(request.request_id)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; see `apply_chat_template` and `generate`."""
        prompts = [
            self.apply_chat_template(
                conversation, chat_template=chat_template, add_generation_prompt=add_generation_prompt
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: PromptLike, sampling_params: SamplingParams | None = None) -> DeltaStream:
        """Answer one prompt; iterate over what is new of it, step by step. Closing the iterator aborts the request.

        Raises RequestError at once when the prompt can't be run.
        """
        requests = self._requests(prompt, sampling_params)
        if len(requests) != 1:
            raise RequestError(f"{len(requests)} prompts were given, stream answers one: call it for each, or generate")
        (request,) = requests
        # Only the deltas' inbox is known here, not the stream: one that its reader dropped must go, and abort.
        inbox: deque[RequestOutput] = deque()
        with self._turns.take() as engine:
            engine.add_requests(requests)
            self._receivers[request.request_id] = inbox.append
        return DeltaStream(inbox, step=self._step, abort=partial(self._end, request.request_id))

    def score(
        self, context: PromptLike, continuations: Sequence[Continuation], *, progress: bool | None = None
    ) -> list[ContinuationScore]:
        """Return how likely each continuation of a context is; the context is computed once.

        context: as for `generate`. continuations: texts, or token ids that are taken as they are.
        Raises RequestError, having accepted none of them, when one has no tokens or doesn't fit.
        """
        (scores,) = self.score_batch([(context, continuations)], progress=progress)
        return scores

    def score_batch(
        self, contexts: Sequence[tuple[PromptLike, Sequence[Continuation]]], *, progress: bool | None = None
    ) -> list[list[ContinuationScore]]:
        """Score several contexts, each with its continuations, all at once; see `score`."""
        requests = []
        for context, continuations in contexts:
            (prompt,) = as_prompts(context)
            known = self.as_tokens(prompt)
            requests += [scoring_request(self._engine.tokenizer, known, each) for each in continuations]
        outputs = self.generate(
            [request.prompt for request in requests], [request.sampling for request in requests], progress=progress
        )
        scores = iter([request.score(output) for request, output in zip(requests, outputs, strict=True)])
        return [list(itertools.islice(scores, len(continuations))) for _, continuations in contexts]

    def apply_chat_template(
        self, messages: Messages, *, chat_template: str | None = None, add_generation_prompt: bool = True
    ) -> dict[str, Any]:
        """Render a conversation to a prompt that `generate` and `stream` take: text, token ids, where messages end.

        Raises ChatTemplateError when there is no template, or it refuses the messages.
        """
        if not is_conversation(messages):
            raise RequestError(
                f"messages is {messages!r:.60}, must be a list like [{{'role': 'user', 'content': '…'}}]"
            )
        with self._turns.take():
            return self._chat_template.render(
                messages, chat_template=chat_template, add_generation_prompt=add_generation_prompt
            )

    # How

    def _requests(
        self, prompts: PromptLike | Sequence[PromptLike], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Prompt]:
        inputs = as_prompts(prompts)
        return [
            Prompt(
                next(self._ids),
                prompt.content,
                params,
                cache_salt=prompt.cache_salt,
                text=prompt.text,
                message_boundaries=prompt.message_boundaries,
                priority=prompt.priority,
            )
            for prompt, params in zip(inputs, as_sampling(sampling, len(inputs)), strict=True)
        ]

    def _step(self) -> None:
        """Run one step of all requests in flight and hand each delta to whoever waits for it."""
        with self._turns.take() as engine, interrupts_deferred():
            for delta in engine.step():
                # A stream may have been dropped while the step ran; nobody wants its delta any more.
                receiver = self._receivers.get(delta.request_id)
                if receiver is not None:
                    receiver(delta)
                if delta.finished:
                    self._receivers.pop(delta.request_id, None)

    def _end(self, request_id: str) -> None:
        self._receivers.pop(request_id, None)
        self._turns.abort(request_id)


def _collect(collector: OutputCollector, finished: deque[int], index: int, delta: RequestOutput) -> None:
    collector.add(delta)
    if delta.finished:
        finished.append(index)
