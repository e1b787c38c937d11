"""The scenes of docs/SCENARIOS.md with recurrent states, by their numbers."""

import random

import pytest
from bookkeeping import (
    Bench,
    NamedPrefixes,
    compute,
    expected_stream,
    full,
    hit_tokens,
    lose,
    make_coordinator,
    make_request,
    sliding,
    state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.groups.spec import group_layers


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def lose_states(coordinator, *positions: int) -> None:
    """Take the recurrent states at some positions away, and nothing else."""
    for checkpoint in list(coordinator.checkpoints):
        if checkpoint.position in positions:
            coordinator.checkpoints.forget(checkpoint)


@pytest.fixture
def scene_15():
    """A prompt of 161 tokens in three kinds of group, with a checkpoint at every 16."""
    bench = Bench([full(), sliding(32), state()], 40, checkpoint_interval=16)
    bench.run_one(tokens(161))
    return bench.coordinator


def find(coordinator):
    return coordinator.lookup.find_longest_cache_hit(make_request(coordinator, tokens(161)))


def test_scene_15_the_longest_position_that_all_three_kinds_have(scene_15):
    hit = find(scene_15)
    assert (hit.num_computed_tokens, hit.shared_prefix_boundary) == (160, None)


def test_scene_15_without_states_it_is_the_next_state_and_the_boundary_lies_beyond(scene_15):
    lose_states(scene_15, 160)
    hit = find(scene_15)
    assert (hit.num_computed_tokens, hit.shared_prefix_boundary) == (144, 160)


def test_scene_15_without_its_window_or_its_block_it_is_the_one_before(scene_15):
    lose_states(scene_15, 160, 128)
    cached = make_request(scene_15, tokens(161))
    lose(scene_15, 1, cached, 8)  # of the window below 144
    assert find(scene_15).num_computed_tokens == 112
    lose(scene_15, 0, cached, 6)  # what ends at 112, in the group that keeps everything
    hit, _ = scene_15.look_up(cached)
    assert (hit.num_computed_tokens, hit.shared_prefix_boundary) == (96, None)


def test_scene_16_three_kinds_are_three_groups_without_dead_bytes():
    specs = [full()] * 4 + [sliding(512)] * 24 + [state(4096)] * 28
    groups = group_layers(dict(enumerate(specs)))
    assert sorted(len(group.layer_indices) for group in groups) == [4, 24, 28]
    assert sum(group.block_bytes for group in groups) == sum(spec.page_bytes for spec in specs)


def test_scene_17_a_checkpoint_goes_as_a_whole():
    bench = Bench([full(), sliding(32), state()], [40, 40, 3], checkpoint_interval=0)
    for i in range(6):
        bench.run_one(tokens(100, 1000 * i), f"r{i}")
    # Three slots: one to work in, and the two states of the last prompt; the others went with all their blocks.
    usage = bench.coordinator.usage()
    assert (usage[2].num_cached, usage[0].num_cached) == (2, 7)


def test_scene_18_under_pressure_the_hit_falls_to_the_next_checkpoint_that_survives():
    bench = Bench([full(), state()], [30, 8], checkpoint_interval=48)
    bench.run_one(tokens(129))
    hits = [hit_tokens(bench.coordinator, tokens(129))]
    for checkpoint in sorted(bench.coordinator.checkpoints, key=lambda c: -c.position):
        bench.coordinator.checkpoints.forget(checkpoint)
        hits.append(hit_tokens(bench.coordinator, tokens(129)))
    assert hits == sorted(hits, reverse=True)
    assert hits[0] == 128
    assert hits[-2] > 0


def test_scene_19_a_running_requests_checkpoints_stay_whatever_else_runs():
    bench = Bench([full(), state()], [60, 6], checkpoint_interval=0)
    chat = bench.add(tokens(80), "chat", max_tokens=30)
    bench.step()
    for i in range(5):
        bench.add(tokens(60, 1000 * (i + 1)), f"other{i}")
    while chat.held is not None:
        bench.step()
    assert hit_tokens(bench.coordinator, [*chat.token_ids, 7, 8]) == chat.num_tokens - 1


def test_scene_20_the_next_turn_hits_the_exact_end_of_what_was_computed():
    bench = Bench([full(), state()], 40, checkpoint_interval=0)
    first = bench.run_one(tokens(80), max_tokens=19)
    second = bench.run_one([*first.token_ids, *tokens(10, 5000)], max_tokens=5)
    assert second.cache.hit == 98
    assert second.output_token_ids == expected_stream([*first.token_ids, *tokens(10, 5000)], 5)


def test_scene_21_the_second_of_four_lays_a_checkpoint_where_they_part():
    bench = Bench([full(), state()], [300, 30], checkpoint_interval=0)
    hits = [bench.run_one([*tokens(512), *tokens(200, 1000 * i)], f"r{i}").cache.hit for i in range(1, 5)]
    assert hits == [0, 0, 512, 512]


def test_scene_21_together_the_shared_part_is_computed_once():
    bench = Bench([full(), state()], [300, 30], checkpoint_interval=0, max_num_scheduled_tokens=1024)
    requests = [bench.add([*tokens(512), *tokens(200, 1000 * i)], f"r{i}") for i in range(1, 5)]
    bench.run()
    assert bench.device.num_computed_tokens == 512 + 4 * 200
    assert [request.cache.hit for request in requests] == [0, 512, 512, 512]
    assert len(bench.plans[0].request_ids) == 1


@pytest.mark.parametrize(("interval", "expected"), [(256, [0, 512, 256, 256, 512]), (0, [0, 0, 0, 256, 512])])
def test_scene_22_a_tree_of_prompts(interval, expected):
    bench = Bench([full(), state()], [600, 60], checkpoint_interval=interval)
    stem, branch = tokens(256), tokens(256, 1000)
    leaves = [tokens(30, 2000 + 100 * i) for i in range(5)]
    prompts = [
        [*stem, *branch, *leaves[0]],
        [*stem, *branch, *leaves[1]],
        [*stem, *leaves[2]],
        [*stem, *leaves[3]],
        [*stem, *branch, *leaves[4]],
    ]
    assert [bench.run_one(prompt, f"r{i}").cache.hit for i, prompt in enumerate(prompts)] == expected


def test_scene_23_a_strict_prefix_hits_the_nearest_checkpoint_and_lays_one_at_its_end():
    bench = Bench([full(), state()], [100, 20], checkpoint_interval=64)
    bench.run_one(tokens(400))
    assert bench.run_one(tokens(150)).cache.hit == 128
    assert hit_tokens(bench.coordinator, [*tokens(150), 9999, 9998]) == 150


def test_scene_24_a_preempted_request_goes_on_where_it_was():
    bench = Bench([full(), state()], [100, 10], checkpoint_interval=0)
    request = bench.add(tokens(100), max_tokens=250)
    while request.num_computed_tokens < 299:
        bench.step()
    bench.scheduler._preempt(request)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 299
    bench.run()
    assert request.output_token_ids == expected_stream(tokens(100), 250)


@pytest.mark.parametrize("specs", [[full()], [full(), state()]], ids=["full", "full and state"])
def test_scene_25_a_long_prefill_goes_on_beside_a_hundred_decoders(specs):
    bench = Bench(specs, [1200, 400][: len(specs)], max_num_scheduled_tokens=600, max_num_seqs=128)
    decoders = [bench.add(tokens(6, 1000 * i), f"d{i}", max_tokens=40) for i in range(100)]
    bench.step()
    bench.add(tokens(5000, 500_000), "long", max_tokens=5)
    short = bench.add(tokens(20, 900_000), "short", max_tokens=5)
    for _ in range(11):
        bench.step()
    assert [plan.num_scheduled_tokens for plan in bench.plans[1:11]] == [(1,) * 100 + (500,)] * 10
    assert short.num_output_tokens == 1
    assert all(decoder.num_output_tokens == 12 for decoder in decoders)


def test_scene_26_checkpoints_cost_no_steps():
    bench = Bench([full(), state()], [700, 10], checkpoint_interval=1000, max_num_scheduled_tokens=2048)
    bench.run_one(tokens(10_000))
    assert bench.scheduled() == [[2048]] * 4 + [[1808]]
    bench.run_one(tokens(1057, 20_000))
    assert bench.scheduled()[5:] == [[1057]]
    assert len(bench.plans[-1].state_captures) == 3


def test_scene_27_only_the_sibling_waits_for_the_junction():
    bench = Bench([full(), state()], [100, 10], checkpoint_interval=0)
    bench.add(tokens(256), "a", max_tokens=3)
    b = bench.add([*tokens(256), *tokens(50, 5000)], "b", max_tokens=3)
    bench.add(tokens(40, 9000), "c", max_tokens=3)
    bench.step()
    bench.step()
    assert bench.plans[0].request_ids == ("a", "c")
    assert bench.plans[1].request_ids == ("a", "c", "b")
    assert b.cache.hit == 256


def test_scene_28_the_gate_counts_blocks_and_one_working_state():
    bench = Bench([full(), *[state()] * 7], [17, 1], checkpoint_interval=0, max_num_scheduled_tokens=64)
    request = bench.run_one(tokens(256), max_tokens=17)
    assert request.num_output_tokens == 17
    assert request.num_preemptions == 0


class Oracle:
    """Knows the prefix that each checkpoint's key promises, from the requests that could have laid it."""

    def __init__(self, bench, requests):
        self.bench, self.requests = bench, requests

    def check(self) -> int:
        """Compare the content of every state that is kept with the prefix of its key; return how many there are."""
        found = 0
        for checkpoint in self.bench.coordinator.checkpoints:
            promised = self._prefix(checkpoint)
            for manager, slots, block in zip(
                self.bench.coordinator.managers, self.bench.device.slots, checkpoint.blocks, strict=True
            ):
                if manager.is_state:
                    assert slots[block.block_id] == [promised], f"{checkpoint} keeps another prefix's state"
                    found += 1
        return found

    def _prefix(self, checkpoint) -> bytes:
        start = checkpoint.position - len(checkpoint.tail)
        num_units = start // self.bench.coordinator.match_unit_tokens
        for request in self.requests:
            is_long_enough = request.num_tokens >= checkpoint.position
            if is_long_enough and request.hash_at(num_units) == checkpoint.parent:
                token_ids = request.token_ids[: checkpoint.position]
                if tuple(token_ids[start:]) == checkpoint.tail:
                    return NamedPrefixes(token_ids).prefixes[-1]
        raise AssertionError(f"no request has the prefix of {checkpoint}")


def run_and_ask_the_oracle(seed: int) -> int:
    """Random prompts that share beginnings, in chunks, with aborts and too little memory; return the states seen."""
    rng = random.Random(seed)
    bench = Bench(
        [full(4), sliding(10, 4), state()],
        [rng.randrange(24, 40), rng.randrange(24, 40), rng.randrange(3, 9)],
        max_num_scheduled_tokens=rng.choice([3, 16, 64]),
        max_num_seqs=rng.choice([2, 4]),
        full_sequence_must_fit=rng.random() < 0.5,
        watermark=0,
        checkpoint_interval=rng.choice([0, 5]),
        block_size=4,
    )
    requests, found = [], 0
    oracle = Oracle(bench, requests)
    while len(requests) < 8 or bench.scheduler.has_unfinished_requests():
        if len(requests) < 8 and rng.random() < 0.3:
            prompt = [*tokens(rng.choice([0, 9, 20])), *tokens(rng.randrange(1, 25), 100 * rng.randrange(1, 4))]
            boundaries = sorted(rng.sample(range(1, len(prompt) + 1), min(2, len(prompt))))
            name = f"r{len(requests)}"
            request = make_request(
                bench.coordinator, prompt, name, max_tokens=rng.randrange(1, 30), message_boundaries=boundaries
            )
            bench.scheduler.add_request(request)
            requests.append(request)
        if requests and rng.random() < 0.03:
            bench.scheduler.abort_request(rng.choice(requests).request_id)
        if bench.scheduler.has_unfinished_requests():
            bench.step()
            found += oracle.check()
    return found


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_scene_29_every_state_that_is_kept_is_that_of_the_prefix_its_key_promises(seed):
    run_and_ask_the_oracle(seed)


def test_scene_29_its_traffic_keeps_states():
    assert sum(run_and_ask_the_oracle(seed) for seed in range(5)) > 100


def test_a_long_prefill_leaves_states_to_other_requests():
    bench = Bench([full(), state()], [200, 8], checkpoint_interval=16, max_num_scheduled_tokens=160)
    bench.add(tokens(1000), "long", max_tokens=20)
    short = bench.add(tokens(20, 5000), "short", max_tokens=2)
    for _ in range(9):
        bench.step()
    assert short.num_output_tokens > 0
    assert bench.coordinator.managers[1].pool.num_free > 0


def test_checkpoints_laid_on_the_way_give_way_to_the_request_itself():
    bench = Bench([full(), sliding(32), state()], [40, 4, 20], max_num_scheduled_tokens=16, checkpoint_interval=16)
    assert bench.run_one(tokens(200), max_tokens=20).num_output_tokens == 20


def test_a_repeated_prompt_in_little_memory_runs():
    bench = Bench([full(), state()], [3, 8], max_num_scheduled_tokens=64)
    bench.run_one(tokens(20), "a")
    assert bench.run_one(tokens(20), "b", max_tokens=20).num_output_tokens == 20


def test_a_reset_while_a_request_runs_leaves_it_running():
    bench = Bench([full(), state()], [10, 12], max_num_scheduled_tokens=64, long_prefill_token_threshold=16)
    request = bench.add(tokens(100), "a", max_tokens=60)
    bench.step()
    bench.coordinator.reset_prefix_cache()
    bench.add(tokens(17), "c", skip_reading_prefix_cache=True)
    bench.run()
    assert request.num_output_tokens == 60


def test_an_abort_inside_a_step_keeps_no_state_that_the_step_goes_on_writing():
    bench = Bench([full(), state()], [20, 8], max_num_scheduled_tokens=16)
    bench.add(tokens(64), "a", max_tokens=30)
    bench.step()
    plan = bench.scheduler.schedule()
    bench.scheduler.abort_request("a")
    bench.scheduler.update(plan, bench.device.execute(plan))
    bench.run_one(tokens(64), "b", max_tokens=3)  # FakeDevice fails when it goes on from another state


def test_two_states_let_two_requests_run():
    bench = Bench([full(), state()], [200, 2], checkpoint_interval=0)
    for i in range(4):
        bench.add(tokens(20, 1000 * i), f"r{i}", max_tokens=5)
    bench.run()
    assert max(len(plan.request_ids) for plan in bench.plans) == 2


def test_more_siblings_than_may_run_compute_their_document_once():
    bench = Bench([full(), state()], [300, 30], checkpoint_interval=0, max_num_seqs=3, max_num_scheduled_tokens=64)
    for i in range(12):
        bench.add([*tokens(320), *tokens(20, 1000 * (i + 1))], f"r{i}")
    bench.run()
    assert bench.device.num_computed_tokens == 320 + 12 * 20


def test_a_checkpoint_is_known_only_when_its_states_are_written():
    coordinator = make_coordinator([full(), state()], 20)
    request = compute(coordinator, make_request(coordinator, tokens(50)))
    # No step said that it wrote the states, so that nothing may be resumed from them.
    coordinator.free(request)
    assert hit_tokens(coordinator, tokens(60)) == 0


def test_a_prompt_without_a_state_to_go_on_from_says_so():
    bench = Bench([full(), state()], [100, 10], checkpoint_interval=0)
    bench.run_one([*tokens(256), *tokens(40, 5000)])
    fork = bench.run_one([*tokens(256), *tokens(40, 9000)])
    assert (fork.cache.hit, fork.cache.missing_state, fork.cache.never_seen) == (0, 256, 39)
