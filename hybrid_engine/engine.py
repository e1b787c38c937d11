"""The core: requests come in, `step` takes in one step of all of them, and what is new comes out.

One scheduler, one runner, one tokenizer. Nothing here knows tensors: a StepPlan goes to the runner, a StepResult comes
back. A step that fails ends the engine: what the runner and the caches hold is then unknown, so every request in
flight and every later call raises EngineDeadError instead of waiting for a step that never comes.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from hybrid_engine.connectors.tiered import TieredConnector, TierStats
from hybrid_engine.detokenizer import Detokenizer, StopStrings, TextStream, fast_tokenizer
from hybrid_engine.errors import EngineDeadError, PromptTooLongError, RequestError
from hybrid_engine.in_flight import Answer, CallerRequest
from hybrid_engine.inputs import Prompt, as_token_ids, check_text
from hybrid_engine.outputs import CompletionOutput, RequestOutput
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import RequestUpdate, Scheduler
from hybrid_engine.step_pipeline import Runner, StepPipeline
from hybrid_engine.step_plan import StepPlan, StepResult
from hybrid_engine.structured import Grammars

WAIT_FOR_LOADS_SECONDS = 0.005
"""A step that finds nothing to run, since all requests wait for a connector, ends after so long at the latest."""


class Engine:
    """Runs requests step by step. Not safe to call from two threads at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        grammars: Grammars | None = None,
        tiers: TieredConnector | None = None,
    ) -> None:
        """seed: what requests that name no seed draw theirs from. grammars, tiers: the runner's, if it has any."""
        self.scheduler = scheduler
        self.runner = runner
        self._pipeline = StepPipeline(runner, depth=scheduler.config.async_depth)
        self._tiers = tiers
        # Also when nobody closes it: what a disk tier was to keep is not lost with the engine, or with the process.
        self._end_tiers = weakref.finalize(self, tiers.end, self._pipeline.transfer) if tiers is not None else None
        self.tokenizer = tokenizer
        self._fast_tokenizer = fast_tokenizer(tokenizer)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._seeds = random.Random(seed)
        self._callers: dict[str, CallerRequest] = {}
        self._answers: dict[str, Answer] = {}
        self._failure: BaseException | None = None
        self._is_stepping = False
        self._aborts_asked: list[str] = []
        self._wall_offset = time.time() - time.monotonic()
        self._decode_token = lru_cache(maxsize=65_536)(self._decode_one)

    # Requests come and go

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], sampling: SamplingParams, *, cache_salt: str = ""
    ) -> None:
        """Accept a request. Raises RequestError, having changed nothing, when it can't be run."""
        self.raise_if_dead()
        self._submit([self._check(Prompt(request_id, prompt, sampling, cache_salt))])

    def add_requests(self, prompts: Sequence[Prompt]) -> None:
        """Accept all requests or none. Raises RequestError that names the first one that can't be run."""
        self.raise_if_dead()
        callers: dict[str, CallerRequest] = {}
        for index, prompt in enumerate(prompts):
            try:
                if prompt.request_id in callers:
                    raise RequestError(f"request id {prompt.request_id!r} is in the batch twice: give each its own")
                callers[prompt.request_id] = self._check(prompt)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index} of {len(prompts)}: {error}. None of them was accepted") from error
        self._submit(list(callers.values()))

    def abort(self, request_id: str) -> None:
        """End a request at once and free all it holds; nothing more is reported of it. An unknown id is ignored.

        Asked while a step runs (the garbage collector may drop a stream at any moment), it takes effect when the step
        has ended: until then the step writes what the request holds.
        """
        if self._is_stepping:
            self._aborts_asked.append(request_id)
            return
        caller = self._callers.pop(request_id, None)
        if caller is None:
            return
        for answer in caller.answers:
            self.scheduler.abort_request(answer.request.request_id)
            self._answers.pop(answer.request.request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has anything to do."""
        return bool(self._callers)

    def reset_prefix_cache(self) -> None:
        """Make nothing findable any more; requests that run keep what they hold."""
        self.raise_if_dead()
        self._pipeline.wait()  # or what launched steps save would come to the tiers after they were cleared
        self.scheduler.coordinator.reset_prefix_cache()
        if self._tiers is not None:
            self._tiers.reset()

    def flush_cache(self) -> None:
        """Store all that the caches could go on from where it outlives them; nothing where there is no disk tier."""
        self.raise_if_dead()
        if self._tiers is not None:
            self._tiers.flush(self._pipeline.transfer)

    def tier_stats(self) -> TierStats | None:
        """Return what host memory and disk hold and what was moved; None where there is neither."""
        return self._tiers.stats() if self._tiers is not None else None

    def close(self) -> None:
        """End: requests in flight are dropped, what is cached is flushed. Every later call but this one is refused."""
        if self._failure is None:
            for request_id in list(self._callers):
                self.abort(request_id)
            self._drain()
            self._failure = EngineDeadError("it was closed")
            if self._end_tiers is not None:
                self._end_tiers()
            self._pipeline.close()

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError when a step has failed before."""
        if self._failure is not None:
            raise EngineDeadError(_death_message(self._failure)) from self._failure

    # A step

    def step(self) -> list[RequestOutput]:
        """Take in one step and return, for each request that got a token, what is new of it.

        Up to `async_depth` further steps are planned and launched before, so that they run while this one's tokens
        become text. Raises EngineDeadError when a step fails, with its cause; every later call then does too.
        """
        self.raise_if_dead()
        if not self.has_unfinished_requests():
            return []
        self._is_stepping = True
        try:
            self._launch()
            if self._pipeline.num_launched == 0:
                self._wait_for_loads()
                return []
            plan, result = self._pipeline.take()
            if self._tiers is not None:
                self._tiers.note_step(plan.num_tokens, result.seconds)
            outputs = self._report(plan, result, self.scheduler.update(plan, result))
            if not self.has_unfinished_requests():
                self._drain()
            return outputs
        except BaseException as error:
            self._failure = error
            if self._end_tiers is not None:
                self._end_tiers.detach()
            self._pipeline.close()
            self._callers.clear()
            self._answers.clear()
            if isinstance(error, Exception):
                raise EngineDeadError(_death_message(error)) from error
            raise
        finally:
            self._is_stepping = False
            while self._aborts_asked:
                self.abort(self._aborts_asked.pop())

    def _launch(self) -> None:
        """Launch steps until there are enough, or until what is in flight must come back before more can be planned."""
        while not self._pipeline.is_full:
            plan = self.scheduler.schedule()
            if not plan.request_ids:
                if plan.transfers is not None or plan.block_copies:
                    self._pipeline.carry_out(plan)
                return
            self._pipeline.launch(plan)

    def _wait_for_loads(self) -> None:
        """Let a step pass in which nothing can be computed before something has been loaded."""
        assert self.scheduler.loads, f"{len(self._answers)} requests are unfinished and none can run"
        wait = time.sleep if self._tiers is None else self._tiers.wait
        wait(WAIT_FOR_LOADS_SECONDS)

    def _drain(self) -> None:
        """Take in what was launched before the last request ended: nobody waits for it, but it holds blocks."""
        while self._pipeline.num_launched:
            plan, result = self._pipeline.take()
            updates = self.scheduler.update(plan, result)
            assert not updates, f"{len(updates)} requests got tokens, all had ended"

    def _report(self, plan: StepPlan, result: StepResult, updates: list[RequestUpdate]) -> list[RequestOutput]:
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(plan, result)
        now = self._now()
        news: dict[str, list[CompletionOutput]] = {}
        for update in updates:
            answer = self._answers[update.request.request_id]
            news.setdefault(answer.caller.request_id, []).append(self._advance(answer, update, result, now))
        return [self._output(self._callers[request_id], outputs, now) for request_id, outputs in news.items()]

    def _advance(self, answer: Answer, update: RequestUpdate, result: StepResult, now: float) -> CompletionOutput:
        request_id = update.request.request_id
        logprobs = result.logprobs.get(request_id, ())
        output = answer.advance(update.new_token_ids, update.finish_reason, logprobs, self._decode_token)
        caller = answer.caller
        if caller.first_token_time is None:
            caller.first_token_time = now
        if answer.is_finished:
            del self._answers[request_id]
            if update.finish_reason is None:
                self.scheduler.finish_request(request_id, output.stop_reason)
        if len(caller.answers) < caller.sampling.n:
            self._hand_over(caller, self._make_answers(caller, caller.sampling.n))
        return output

    def _output(self, caller: CallerRequest, outputs: list[CompletionOutput], now: float) -> RequestOutput:
        if caller.is_finished:
            caller.finish_time = now
            del self._callers[caller.request_id]
        return caller.output(outputs)

    def _keep_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for request_id, start in zip(plan.request_ids, plan.num_computed_tokens, strict=True):
            answer = self._answers.get(request_id)
            positions = result.prompt_logprobs.get(request_id)
            # A step that was launched before may have had another request of that id, aborted meanwhile.
            if answer is not None and positions and plan.step_id >= answer.first_step_id:
                answer.caller.take_prompt_logprobs(start, positions, self._decode_token)

    # A request is checked and handed to the scheduler

    def _check(self, prompt: Prompt) -> CallerRequest:
        """Return the request ready to be run; nothing has changed when this raises."""
        text = prompt.prompt if isinstance(prompt.prompt, str) else prompt.text
        check_text("cache_salt", prompt.cache_salt)
        token_ids = self.tokenize(prompt.prompt)
        self._check_token_ids(token_ids)
        self._check_stops(prompt.sampling)
        self._check_structured_outputs(prompt.sampling)
        self._check_logit_bias(prompt.sampling)
        caller = CallerRequest(
            request_id=prompt.request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            sampling=prompt.sampling,
            cache_salt=prompt.cache_salt,
            message_boundaries=tuple(prompt.message_boundaries),
            priority=prompt.priority,
            arrival_time=self._now(),
        )
        if prompt.request_id in self._callers or any(answer_id in self._answers for answer_id in caller.answer_ids):
            raise RequestError(f"request id {prompt.request_id!r} is in use: give each request in flight its own")
        return caller

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt's tokens; token ids are taken as they are. Raises RequestError for what is neither."""
        return self._encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

    def _encode(self, text: str) -> list[int]:
        if not text:
            raise RequestError("the prompt is an empty string: give some text, or the token ids to start from")
        check_text("the prompt", text)
        return self.tokenizer(text)["input_ids"]

    def _check_token_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt has no tokens: give at least one to start from")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < self.vocab_size)
            raise RequestError(
                f"prompt_token_ids[{index}] is {token_ids[index]}, must be from 0 to {self.vocab_size - 1} "
                f"(the vocabulary)"
            )
        if len(token_ids) > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids):,} tokens, max_model_len is {self.max_model_len:,}: shorten the "
                f"prompt, or raise max_model_len if the model reaches further"
            )
        self.scheduler.coordinator.check_prompt(len(token_ids))

    def _check_stops(self, sampling: SamplingParams) -> None:
        if sampling.min_tokens == 0:
            return
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
        if len([token_id for token_id in ends if 0 <= token_id < self.vocab_size]) == self.vocab_size:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens} and stop_token_ids cover all {self.vocab_size:,} tokens: none is "
                f"left to begin with; leave one out, or set min_tokens to 0"
            )

    def _check_structured_outputs(self, sampling: SamplingParams) -> None:
        if sampling.structured_outputs is None:
            return
        if self._grammars is None:
            raise RequestError("structured_outputs can't be used: this engine was put together without grammars")
        self._grammars.check(sampling.structured_outputs)

    def _check_logit_bias(self, sampling: SamplingParams) -> None:
        wrong = [token_id for token_id, _ in sampling.logit_bias if not 0 <= token_id < self.vocab_size]
        if wrong:
            raise RequestError(
                f"logit_bias has token id {wrong[0]}, must be from 0 to {self.vocab_size - 1} (the vocabulary)"
            )

    def _submit(self, callers: Sequence[CallerRequest]) -> None:
        """Take in requests that were checked: all of them, or none when making one of them fails."""
        # Drawn only now: a request that was refused changes nothing for the next one.
        seeds_before = self._seeds.getstate()
        try:
            answers = [self._make_first_answers(caller) for caller in callers]
        except BaseException:
            self._seeds.setstate(seeds_before)
            raise
        for caller, first in zip(callers, answers, strict=True):
            self._callers[caller.request_id] = caller
            self._hand_over(caller, first)

    def _make_first_answers(self, caller: CallerRequest) -> list[Answer]:
        seed = caller.sampling.seed
        caller.seed = self._seeds.getrandbits(63) if seed is None else seed
        return self._make_answers(caller, 1 if self._siblings_can_hit(caller) else caller.sampling.n)

    def _siblings_can_hit(self, caller: CallerRequest) -> bool:
        """Return whether the other answers find the prompt in the cache once the first one has computed it."""
        coordinator = self.scheduler.coordinator
        return (
            coordinator.config.enable_prefix_caching
            and not caller.sampling.skip_reading_prefix_cache
            and len(caller.prompt_token_ids) > coordinator.alignment_tokens
        )

    def _make_answers(self, caller: CallerRequest, count: int) -> list[Answer]:
        """Make the caller's answers below `count`, those that the scheduler has excepted."""
        return [self._make_answer(caller, index) for index in range(len(caller.answers), count)]

    def _hand_over(self, caller: CallerRequest, answers: Sequence[Answer]) -> None:
        """Give answers to the scheduler."""
        for answer in answers:
            caller.answers.append(answer)
            self._answers[answer.request.request_id] = answer
            self.scheduler.add_request(answer.request)

    def _make_answer(self, caller: CallerRequest, index: int) -> Answer:
        sampling = caller.answer_sampling(index)
        request = Request(
            caller.answer_ids[index],
            caller.prompt_token_ids,
            sampling,
            hasher=self.scheduler.coordinator.hasher,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            cache_salt=caller.cache_salt,
            seed=caller.answer_seed(index),
            message_boundaries=caller.message_boundaries,
            priority=caller.priority,
        )
        stream = TextStream(
            self._fast_tokenizer, caller.prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        stops = StopStrings(sampling.stop, include_in_text=sampling.include_stop_str_in_output)
        detokenizer = Detokenizer(stream, stops, min_tokens=sampling.min_tokens)
        return Answer(caller, index, request, detokenizer, first_step_id=self.scheduler.stats.num_steps)

    def _decode_one(self, token_id: int) -> str:
        return self._fast_tokenizer.decode([token_id], skip_special_tokens=False)

    def _now(self) -> float:
        # Seconds since the epoch that never run backwards while the process lives.
        return self._wall_offset + time.monotonic()


def _death_message(failure: BaseException) -> str:
    if isinstance(failure, EngineDeadError):
        return f"the engine can't be used any more: {failure}; make a new one"
    return (
        f"a step failed ({type(failure).__name__}: {failure}) and the engine can't go on: every request in flight "
        f"is lost; make a new one"
    )
