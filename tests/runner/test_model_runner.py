import math

import pytest
from hand_plans import (
    BLOCK_SIZE,
    GREEDY,
    VOCAB_SIZE,
    DigestModel,
    Hand,
    digest_groups,
    expected_greedy,
    expected_logits,
)

from hybrid_engine.runner import model_runner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import BlockCopy, StepPlan

PROMPT = [5, 9, 2, 33, 60, 1, 1, 48, 20, 7, 13, 3, 0, 54, 22]


@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
def test_any_chunking_of_a_prompt_gives_the_same_answer(hand, chunk):
    hand.add("a", PROMPT)
    assert hand.run({"a": 12}, chunk=chunk) == {"a": expected_greedy(PROMPT, 12)}


def test_requests_of_different_lengths_run_packed_in_one_step(hand):
    prompts = {"a": PROMPT, "b": PROMPT[:1], "c": PROMPT[3:11]}
    for request_id, prompt in prompts.items():
        hand.add(request_id, prompt)
    answers = hand.run({"a": 3, "b": 9, "c": 6})
    assert answers == {r: expected_greedy(prompts[r], len(answer)) for r, answer in answers.items()}


def test_a_prefill_runs_in_the_same_step_as_a_decode(hand):
    hand.add("a", PROMPT)
    hand.step({"a": 15})
    hand.add("b", PROMPT[2:])
    hand.step({"b": 5, "a": 1})
    hand.step({"a": 1, "b": 8})
    assert hand.token_ids["a"][15:] == expected_greedy(PROMPT, 3)
    assert hand.token_ids["b"][13:] == expected_greedy(PROMPT[2:], 1)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(hand):
    hand.add("a", PROMPT)
    hand.add("b", PROMPT[4:])
    first = hand.run({"a": 4, "b": 4})["a"]
    hand.end("a")
    hand.run({"b": 2})
    hand.add("a", PROMPT + first, num_prompt_tokens=len(PROMPT))
    assert first + hand.run({"a": 5}, chunk=6)["a"] == expected_greedy(PROMPT, 9)


def test_a_preempted_request_may_come_back_in_the_plan_that_ends_it(hand):
    hand.add("a", PROMPT)
    first = hand.run({"a": 4})["a"]
    hand.end("a")
    hand.add("a", PROMPT + first, num_prompt_tokens=len(PROMPT))
    assert first + hand.run({"a": 5})["a"] == expected_greedy(PROMPT, 9)


def test_a_hit_is_read_and_only_the_rest_is_computed(hand):
    hand.add("a", PROMPT)
    hand.step({"a": len(PROMPT)})
    blocks = [table[:3] for table in hand.tables["a"]]
    computed = hand.runner.num_computed_tokens_total
    hand.add("b", [*PROMPT[:12], 50, 51], hit=12, hit_blocks=blocks)
    assert hand.run({"b": 1})["b"] == expected_greedy([*PROMPT[:12], 50, 51], 1)
    assert hand.runner.num_computed_tokens_total - computed == 14 - 12


def test_copied_slots_are_read_from_the_copy_before_the_step_writes(hand):
    hand.add("a", PROMPT[:11])
    hand.step({"a": 11})
    tables = [[*table[:2], free.pop()] for table, free in zip(hand.tables["a"], hand.free, strict=True)]
    hand.copies = [BlockCopy(g, hand.tables["a"][g][2], tables[g][2], 2) for g in range(2)]
    hand.add("b", [*PROMPT[:10], 44, 45], hit=10, hit_blocks=tables)
    assert hand.run({"b": 3, "a": 2}) == {
        "b": expected_greedy([*PROMPT[:10], 44, 45], 3),
        "a": expected_greedy(PROMPT[:11], 3)[1:],
    }


def test_more_requests_and_tokens_than_the_first_arrays_hold():
    hand = Hand(DigestModel(), digest_groups(), num_blocks=400)
    prompts = {str(i): [(i * 7 + j) % VOCAB_SIZE for j in range(20 * i + 1)] for i in range(1, 21)}
    for request_id, prompt in prompts.items():
        hand.add(request_id, prompt[:60])
    answers = hand.run(dict.fromkeys(prompts, 2), chunk=50)
    assert answers == {r: expected_greedy(prompt[:60], 2) for r, prompt in prompts.items()}


def test_an_answer_grows_past_the_first_arrays():
    hand = Hand(DigestModel(), digest_groups(), num_blocks=100)
    hand.add("a", PROMPT * 16)
    hand.add("b", PROMPT)
    assert hand.run({"a": 40, "b": 5}) == {"a": expected_greedy(PROMPT * 16, 40), "b": expected_greedy(PROMPT, 5)}


def test_steps_and_tokens_are_counted(hand):
    hand.add("a", PROMPT)
    hand.run({"a": 3}, chunk=10)
    assert (hand.runner.num_steps_total, hand.runner.num_computed_tokens_total) == (4, len(PROMPT) + 2)


def test_a_plan_that_only_ends_requests_computes_nothing(hand):
    hand.add("a", PROMPT)
    hand.step({"a": 4})
    hand.end("a")
    assert hand.step({}).sampled == {}
    assert hand.runner.num_steps_total == 1


def test_an_unfinished_prompt_samples_nothing(hand):
    hand.add("a", PROMPT)
    assert hand.step({"a": 14}).sampled == {}
    assert hand.step({"a": 1}).sampled == {"a": (expected_greedy(PROMPT, 1)[0],)}


def test_the_end_of_a_request_that_never_started_is_ignored(hand):
    hand.ended_ids.append("never")
    hand.add("a", PROMPT)
    assert hand.run({"a": 1})["a"] == expected_greedy(PROMPT, 1)


def test_logprobs_are_of_the_model_and_not_of_what_was_sampled_from(hand):
    hand.add("a", PROMPT, SamplingParams(temperature=0, presence_penalty=2, logprobs=4))
    found = hand.step({"a": len(PROMPT)}).logprobs["a"][0]
    logprobs_V = expected_logits(PROMPT).log_softmax(0)
    best = logprobs_V.topk(4)
    assert (found.token_id, found.rank) == (int(best.indices[0]), 1)
    assert found.logprob == pytest.approx(float(best.values[0]), abs=1e-5)
    assert [token_id for token_id, _ in found.top] == best.indices.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_prompt_logprobs_are_those_of_each_next_prompt_token(hand, chunk):
    hand.add("a", PROMPT, SamplingParams(temperature=0, prompt_logprobs=2))
    hand.add("b", PROMPT[::-1])
    found = []
    while len(found) < len(PROMPT) - 1:
        size = min(chunk, len(PROMPT) - hand.num_computed["a"])
        found += hand.step({"b": size, "a": size}).prompt_logprobs["a"]
    assert [each.token_id for each in found] == PROMPT[1:]
    for index, each in enumerate(found):
        logprobs_V = expected_logits(PROMPT[: index + 1]).log_softmax(0)
        assert each.logprob == pytest.approx(float(logprobs_V[PROMPT[index + 1]]), abs=1e-5)
        assert each.rank == 1 + int((logprobs_V > logprobs_V[PROMPT[index + 1]]).sum())
        assert [token_id for token_id, _ in each.top] == logprobs_V.topk(2).indices.tolist()


def test_prompt_logprobs_never_hold_the_logits_of_a_whole_prompt(hand, monkeypatch):
    monkeypatch.setattr(model_runner, "MAX_LOGITS_BYTES", 4 * VOCAB_SIZE * 4)
    hand.add("a", PROMPT, SamplingParams(temperature=0, prompt_logprobs=0))
    result = hand.step({"a": len(PROMPT)})
    assert hand.runner.model.largest_logits_rows == 4
    assert [each.token_id for each in result.prompt_logprobs["a"]] == PROMPT[1:]


def test_no_prompt_logprobs_are_made_for_the_answer(hand):
    hand.add("a", PROMPT, SamplingParams(temperature=0, prompt_logprobs=2))
    hand.step({"a": len(PROMPT)})
    assert hand.step({"a": 1}).prompt_logprobs == {}


def test_a_preempted_request_keeps_its_penalties(hand):
    sampling = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1)
    hand.add("alone", PROMPT, sampling)
    hand.add("a", PROMPT, sampling)
    first = hand.run({"a": 6})["a"]
    hand.end("a")
    hand.add("a", PROMPT + first, sampling, num_prompt_tokens=len(PROMPT))
    answer = first + hand.run({"a": 6})["a"]
    assert answer == hand.run({"alone": 12})["alone"]
    assert answer != expected_greedy(PROMPT, 12)


@pytest.mark.parametrize("chunk", [2, 4096])
def test_a_seeded_request_samples_the_same_alone_and_among_seven_neighbours(hand, chunk):
    sampling = SamplingParams(temperature=1.5, top_p=0.95)
    hand.add("alone", PROMPT, sampling, seed=11)
    alone = hand.run({"alone": 15})["alone"]
    hand.add("a", PROMPT, sampling, seed=11)
    others = [GREEDY, sampling, SamplingParams(top_k=5), SamplingParams(temperature=0.7, repetition_penalty=1.2)]
    for i in range(7):
        hand.add(str(i), PROMPT[i:], others[i % 4], seed=i)
    together = hand.run({"0": 15, "1": 12, "2": 15, "a": 15, "3": 9, "4": 15, "5": 15, "6": 3}, chunk=chunk)
    assert together["a"] == alone
    assert len(set(alone)) > 8


def test_a_seeded_request_samples_the_same_after_a_preemption(hand):
    sampling = SamplingParams(temperature=2.0, top_k=30, presence_penalty=0.5)
    hand.add("alone", PROMPT, sampling, seed=3)
    hand.add("a", PROMPT, sampling, seed=3)
    first = hand.run({"a": 5})["a"]
    hand.end("a")
    hand.add("a", PROMPT + first, sampling, seed=3, num_prompt_tokens=len(PROMPT))
    assert first + hand.run({"a": 7}, chunk=3)["a"] == hand.run({"alone": 12})["alone"]


def test_stop_tokens_are_forbidden_while_the_answer_is_short(hand):
    likely = int(expected_logits(PROMPT).argmax())
    hand.add("a", PROMPT, SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(likely, 10**6)))
    assert likely not in hand.run({"a": 3})["a"]


def test_nan_logits_stop_the_step_instead_of_becoming_a_token(hand):
    hand.add("a", PROMPT)
    hand.step({"a": 8})
    hand.runner.cache.poison(0, [hand.tables["a"][0][1]], math.nan)
    with pytest.raises(AssertionError, match="highest logits"):
        hand.step({"a": 7})


def test_a_request_that_the_runner_was_not_told_of_is_an_error(hand):
    with pytest.raises(AssertionError, match="request a is not known"):
        hand.runner.execute(StepPlan(0, ("a",), (0,), (4,), (False,)))


@pytest.mark.parametrize("block_id", [-1, 65])
def test_a_block_outside_its_group_is_an_error(hand, block_id):
    hand.free[1].append(block_id)
    hand.add("a", PROMPT)
    with pytest.raises(AssertionError, match=r"of group 1, which has ids below 65"):
        hand.step({"a": 3})


def test_writing_to_the_null_block_is_an_error(hand):
    hand.free[1].append(0)
    hand.add("a", PROMPT)
    with pytest.raises(AssertionError, match=r"group 1: the null block stands where positions \[0 1 2\]"):
        hand.step({"a": 3})


def test_a_table_too_short_for_the_step_is_an_error(hand):
    hand.add("a", PROMPT)
    hand.step({"a": BLOCK_SIZE})
    with pytest.raises(AssertionError, match=r"\[5\] keys in tables of \[4\] slots"):
        hand.runner.execute(StepPlan(1, ("a",), (4,), (1,), (False,)))


@pytest.mark.parametrize(("computed", "size", "sampled"), [(4, 11, False), (4, 12, True), (4, 2, True)])
def test_a_plan_that_disagrees_on_the_known_tokens_is_an_error(hand, computed, size, sampled):
    hand.add("a", PROMPT)
    hand.step({"a": 4})
    with pytest.raises(AssertionError, match=r"of \[15\] tokens"):
        hand.runner.execute(StepPlan(1, ("a",), (computed,), (size,), (sampled,)))


def test_a_request_that_stands_twice_in_a_plan_is_an_error(hand):
    hand.add("a", PROMPT)
    hand.step({"a": 4})
    with pytest.raises(AssertionError, match="stands twice"):
        hand.runner.execute(StepPlan(1, ("a", "a"), (4, 4), (1, 1), (False, False)))


def test_a_request_that_starts_twice_is_an_error(hand):
    hand.add("a", PROMPT)
    hand.step({"a": 4})
    hand.new_ids["a"] = (GREEDY, 0)
    with pytest.raises(AssertionError, match="started twice"):
        hand.step({"a": 4})


def test_an_empty_chunk_is_an_error(hand):
    hand.add("a", PROMPT)
    with pytest.raises(AssertionError, match=r"chunks of \[0\] tokens"):
        hand.step({"a": 0})


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_outside_the_vocabulary_is_an_error(hand, token_id):
    hand.add("a", [*PROMPT, token_id])
    with pytest.raises(AssertionError, match="the vocabulary has 61"):
        hand.step({"a": 4})


def test_two_runners_live_in_one_process():
    first, second = (Hand(DigestModel(), digest_groups()) for _ in range(2))
    first.add("a", PROMPT)
    second.add("a", PROMPT[5:])
    first.step({"a": 6})
    assert second.run({"a": 2})["a"] == expected_greedy(PROMPT[5:], 2)
    assert first.run({"a": 2})["a"] == expected_greedy(PROMPT, 2)
