from dataclasses import replace

import pytest

from hybrid_engine.engine import Prompt
from hybrid_engine.errors import EngineDeadError, PromptTooLongError, RequestError
from hybrid_engine.invariants import check_invariants
from hybrid_engine.outputs import OutputCollector
from hybrid_engine.sampling_params import SamplingParams

EOS = 1
LONG = SamplingParams(max_tokens=64)


def run(engine):
    """Step until nothing is left; the joined output of each request."""
    collectors = {}
    while engine.has_unfinished_requests():
        for delta in engine.step():
            collectors.setdefault(delta.request_id, OutputCollector()).add(delta)
    return {request_id: collector.output() for request_id, collector in collectors.items()}


def answer(engine, prompt="a question", sampling=LONG):
    engine.add_request("r", prompt, sampling)
    return run(engine)["r"]


# What comes out


def test_an_answer_ends_before_the_end_of_text_token(scripted):
    output = answer(scripted("hello"))
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "hello",
        "stop",
        None,
    )
    assert output.outputs[0].token_ids[-1] == EOS
    assert output.finished


def test_an_answer_ends_at_max_tokens(scripted):
    completion = answer(scripted("hello"), sampling=SamplingParams(max_tokens=3)).outputs[0]
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("hel", "length", 3)


def test_a_stop_token_is_reported_and_not_shown(scripted, ids):
    completion = answer(scripted("a.b"), sampling=SamplingParams(max_tokens=64, stop_token_ids=ids("."))).outputs[0]
    assert (completion.text, completion.stop_reason) == ("a", ids(".")[0])
    assert completion.token_ids == ids("a.")


def test_a_stop_token_is_shown_where_asked(scripted, ids):
    sampling = SamplingParams(max_tokens=64, stop_token_ids=ids("."), include_stop_str_in_output=True)
    assert answer(scripted("a.b"), sampling=sampling).outputs[0].text == "a."


def test_a_stop_string_ends_the_request_in_the_scheduler_too(scripted, ids):
    engine = scripted("one\n\nQ: two")
    completion = answer(engine, sampling=SamplingParams(max_tokens=64, stop="\nQ")).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one\n", "stop", "\nQ")
    assert completion.token_ids == ids("one\n\nQ")
    assert not engine.scheduler.has_unfinished_requests()


def test_a_stop_string_complete_in_the_last_token_allowed_is_the_reason(scripted):
    completion = answer(scripted("ab"), sampling=SamplingParams(max_tokens=2, stop="b")).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "b")


def test_text_held_for_a_stop_string_comes_out_when_the_answer_ends(scripted):
    assert answer(scripted("abEN"), sampling=SamplingParams(max_tokens=64, stop="END")).outputs[0].text == "abEN"


def test_characters_of_several_tokens_stream_whole(scripted):
    engine = scripted("a€b")
    engine.add_request("r", "q", LONG)
    texts = []
    while engine.has_unfinished_requests():
        texts += [delta.outputs[0].text for delta in engine.step()]
    assert texts == ["a", "", "", "€", "b", ""]


def test_an_output_carries_its_prompt_and_the_times(scripted, ids):
    output = answer(scripted("x"), prompt="a question")
    assert (output.prompt, output.prompt_token_ids) == ("a question", ids("a question"))
    metrics = output.metrics
    assert 0 <= metrics.ttft_seconds <= metrics.total_seconds
    assert metrics.num_preemptions == 0


def test_a_prompt_of_token_ids_has_no_text(scripted, ids):
    output = answer(scripted("x"), prompt=ids("abc"))
    assert (output.prompt, output.prompt_token_ids) == (None, ids("abc"))


# The cache


def test_the_second_of_two_equal_prompts_hits_and_says_so(scripted):
    engine = scripted("x")
    cold, warm = answer(engine, prompt="0123456789"), answer(engine, prompt="0123456789")
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 8)
    assert (cold.cache.never_seen, warm.cache.hit, warm.cache.num_computed) == (9, 8, 2)


def test_a_prefix_cached_under_one_salt_is_not_found_under_another(scripted):
    engine = scripted("x")
    for request_id, salt in [("a", "alice"), ("b", "bob"), ("c", "alice")]:
        engine.add_request(request_id, "0123456789", LONG, cache_salt=salt)
        hit = run(engine)[request_id].num_cached_tokens
        assert hit == (8 if request_id == "c" else 0)


def test_reset_prefix_cache_forgets_all(scripted):
    engine = scripted("x")
    answer(engine, prompt="0123456789")
    engine.reset_prefix_cache()
    assert answer(engine, prompt="0123456789").num_cached_tokens == 0


def test_a_preempted_request_streams_as_if_it_had_not_been(scripted):
    engine = scripted("x" * 30, num_blocks=12)
    for request_id in "ab":
        engine.add_request(request_id, "0123456789" + request_id, LONG)
    outputs = run(engine)
    assert [output.outputs[0].text for output in outputs.values()] == ["x" * 30] * 2
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0


# n answers


def by_index(request):
    """A script that answers with the letter of the request's index among its siblings."""
    index = int(request.request_id.partition("#")[2] or 0)
    return [100 + index, EOS]


def test_n_answers_come_by_index_in_one_output(scripted):
    completions = answer(scripted(by_index), sampling=SamplingParams(n=3, max_tokens=8)).outputs
    assert [(completion.index, completion.token_ids) for completion in completions] == [
        (0, [100, EOS]),
        (1, [101, EOS]),
        (2, [102, EOS]),
    ]


def test_siblings_wait_for_the_first_answers_prompt_and_hit_it(scripted):
    engine = scripted("xyz")
    answer(engine, prompt="0123456789", sampling=SamplingParams(n=3, max_tokens=8))
    started = [[r.num_computed_tokens for r in plan.started] for plan in engine.runner.plans]
    assert started[:2] == [[0], [8, 8]]


def test_siblings_start_at_once_where_nothing_can_be_found(scripted):
    engine = scripted("xyz", enable_prefix_caching=False)
    answer(engine, prompt="0123456789", sampling=SamplingParams(n=3, max_tokens=8))
    assert len(engine.runner.plans[0].started) == 3


def test_siblings_start_even_if_the_first_answer_is_one_token_long(scripted):
    assert len(answer(scripted("xyz"), sampling=SamplingParams(n=2, max_tokens=1)).outputs) == 2


def seeds(engine):
    return [request.seed for plan in engine.runner.plans for request in plan.started]


def test_each_answer_draws_from_its_own_seed_and_the_first_from_the_one_asked(scripted):
    many, one = scripted("x"), scripted("x")
    answer(many, sampling=SamplingParams(n=3, seed=7))
    answer(one, sampling=SamplingParams(n=1, seed=7))
    assert len(set(seeds(many))) == 3
    assert seeds(many)[0] == seeds(one)[0] == 7


def test_requests_without_a_seed_draw_different_ones_that_a_second_engine_repeats(scripted):
    first, second = scripted("x"), scripted("x")
    for engine in (first, second):
        answer(engine)
        answer(engine)
    assert seeds(first) == seeds(second)
    assert len(set(seeds(first))) == 2


# Log-probabilities


def test_logprobs_list_the_chosen_token_then_the_likeliest(scripted, ids):
    completion = answer(scripted("ab"), sampling=SamplingParams(max_tokens=2, logprobs=2)).outputs[0]
    (a,) = ids("a")
    assert list(completion.logprobs[0]) == [a, a + 1]
    assert (completion.logprobs[0][a].decoded_token, completion.logprobs[0][a].rank) == ("a", 2)
    assert completion.logprobs[0][a + 1].rank == 1
    assert (len(completion.logprobs), completion.cumulative_logprob) == (2, -1.0)


def test_logprobs_are_none_unless_asked_for(scripted):
    completion = answer(scripted("ab")).outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


@pytest.mark.parametrize("num_prompt_tokens", [10, 100], ids=["one step", "several chunks"])
def test_prompt_logprobs_stand_at_their_tokens_also_when_the_prompt_was_cached(scripted, num_prompt_tokens):
    engine = scripted("x")
    prompt = list(range(3, 3 + num_prompt_tokens))
    answer(engine, prompt=prompt)
    positions = answer(engine, prompt=prompt, sampling=SamplingParams(prompt_logprobs=0)).prompt_logprobs
    assert positions[0] is None
    assert [next(iter(position)) for position in positions[1:]] == prompt[1:]


def test_of_n_answers_only_the_first_computes_prompt_logprobs(scripted):
    engine = scripted("x")
    output = answer(engine, prompt="0123456789", sampling=SamplingParams(n=2, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == 10
    assert engine.runner.plans[1].started[0].num_computed_tokens == 8


# What is refused


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", RequestError, "empty string"),
        ([], RequestError, "no tokens"),
        ([5, 999], RequestError, r"prompt_token_ids\[1\] is 999, must be from 0 to 258"),
        ([5, -1], RequestError, r"prompt_token_ids\[1\] is -1"),
        ([5, 1.5], RequestError, "must be integers"),
        ([5] * 101, PromptTooLongError, "101 tokens, max_model_len is 100"),
        ([5] * 50, PromptTooLongError, "50 tokens, the cache memory .* holds 40"),
    ],
    ids=["no text", "no ids", "beyond the vocabulary", "negative", "fraction", "beyond the model", "beyond the memory"],
)
def test_a_prompt_that_cant_run_takes_the_whole_batch_with_it_and_is_named(scripted, prompt, error, message):
    engine = scripted("x", max_model_len=100, num_blocks=10)
    with pytest.raises(error, match=f"prompt 1 of 2: .*{message}"):
        engine.add_requests([Prompt("good", "fine"), Prompt("bad", prompt)])
    assert not engine.has_unfinished_requests()
    assert not engine.scheduler.has_unfinished_requests()


def test_a_refused_request_changes_no_later_seed(scripted):
    refused, untouched = scripted("x"), scripted("x")
    with pytest.raises(RequestError):
        refused.add_request("r", "", LONG)
    answer(refused)
    answer(untouched)
    assert seeds(refused) == seeds(untouched)


def test_a_batch_is_taken_whole_or_not_at_all_also_when_making_a_request_fails(scripted, monkeypatch):
    engine, untouched = scripted("x"), scripted("x")
    make, made = engine._make_answer, []

    def fail_at_the_third(caller, index):
        made.append(caller.request_id)
        if len(made) == 3:
            raise MemoryError
        return make(caller, index)

    monkeypatch.setattr(engine, "_make_answer", fail_at_the_third)
    with pytest.raises(MemoryError):
        engine.add_requests([Prompt(request_id, "a prompt") for request_id in "abc"])
    assert (made, engine.has_unfinished_requests()) == (["a", "b", "c"], False)
    assert not engine.scheduler.has_unfinished_requests()
    answer(engine)
    answer(untouched)
    assert seeds(engine) == seeds(untouched)


def test_stop_tokens_that_leave_none_to_begin_with_are_refused(scripted):
    engine = scripted("x")
    all_but_eos = tuple(token for token in range(engine.vocab_size) if token != EOS)
    covering = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=all_but_eos)
    with pytest.raises(RequestError, match="min_tokens is 2 and stop_token_ids cover all 259 tokens"):
        engine.add_request("r", "q", covering)
    engine.add_request("r", "q", replace(covering, ignore_eos=True))  # the end of text itself is left
    engine.add_request("s", "q", replace(covering, min_tokens=0))


def test_of_n_answers_the_explanation_is_the_first_ones(scripted):
    output = answer(scripted("xyz"), prompt="0123456789", sampling=SamplingParams(n=3, max_tokens=8))
    assert (output.cache.hit, output.num_cached_tokens) == (0, 0)  # the siblings hit 8 tokens each


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(scripted):
    engine = scripted("x")
    engine.add_request("r", "q", LONG)
    with pytest.raises(RequestError, match="'r' is in use"):
        engine.add_request("r", "q", LONG)
    run(engine)
    engine.add_request("r", "q", LONG)


def test_a_request_id_twice_in_a_batch_is_refused(scripted):
    with pytest.raises(RequestError, match="twice"):
        scripted("x").add_requests([Prompt("r", "a"), Prompt("r", "b")])


@pytest.mark.parametrize("num_tokens", [20, 100], ids=["in one step", "in two steps"])
def test_a_prompt_as_long_as_the_model_reaches_yields_one_token(scripted, num_tokens):
    output = answer(scripted("xyz", max_model_len=num_tokens), prompt=[5] * num_tokens)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("x", "length")


def test_a_prompt_as_long_as_the_model_reaches_yields_one_token_also_in_several_chunks(scripted):
    output = answer(scripted("xyz", max_model_len=100), prompt=[5] * 100)  # a step computes 64 tokens
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("x", "length")


# What ends early


def test_an_abort_during_a_step_waits_for_its_end(scripted):
    engine = scripted("a long answer", before_step=lambda plan: engine.abort("dropped"))
    engine.add_request("dropped", "a prompt", SamplingParams(max_tokens=5))
    engine.add_request("kept", "another prompt", SamplingParams(max_tokens=5))
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["kept"]
    while engine.has_unfinished_requests():
        assert {output.request_id for output in engine.step()} == {"kept"}
    check_invariants(engine.scheduler.coordinator, [])


def test_abort_frees_all_answers_at_once_and_reports_nothing_more(scripted):
    engine = scripted("x" * 50)
    engine.add_request("gone", "0123456789", SamplingParams(n=3, max_tokens=64))
    engine.add_request("stays", "other", LONG)
    engine.step()
    engine.step()
    engine.abort("gone")
    assert set(run(engine)) == {"stays"}
    assert all(usage.num_held == 0 for usage in engine.scheduler.coordinator.usage())


def test_abort_before_the_siblings_start_drops_them(scripted):
    engine = scripted("xyz")
    engine.add_request("r", "0123456789", SamplingParams(n=3))
    engine.abort("r")
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_aborting_an_unknown_request_does_nothing(scripted):
    scripted("x").abort("nobody")


def test_a_failed_step_ends_all_requests_and_every_later_call(scripted):
    def fail(plan):
        raise RuntimeError("no more memory")

    engine = scripted("x", before_step=fail)
    engine.add_request("r", "q", LONG)
    with pytest.raises(EngineDeadError, match="RuntimeError: no more memory") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not engine.has_unfinished_requests()
    for call in (engine.step, engine.reset_prefix_cache, lambda: engine.add_request("s", "q", LONG)):
        with pytest.raises(EngineDeadError, match="no more memory"):
            call()


def test_an_interrupt_inside_a_step_is_raised_as_it_is_and_ends_the_engine(scripted):
    def interrupt(plan):
        raise KeyboardInterrupt

    engine = scripted("x", before_step=interrupt)
    engine.add_request("r", "q", LONG)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()


def test_two_engines_in_one_process_know_nothing_of_each_other(scripted):
    first, second = scripted("first"), scripted("second")
    first.add_request("r", "q", LONG)
    second.add_request("r", "q", LONG)
    assert [run(engine)["r"].outputs[0].text for engine in (first, second)] == ["first", "second"]


def test_a_prompt_of_more_importance_is_answered_first(scripted):
    engine = scripted("ab", max_num_seqs=1, policy="priority")
    engine.add_requests([Prompt(name, "q", LONG, priority=priority) for name, priority in (("low", 5), ("high", -1))])
    assert list(run(engine)) == ["high", "low"]
