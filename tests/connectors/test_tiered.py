"""What the caches give up comes back: scenes with exact answers, on a device that checks what every request reads."""

import pytest
from bookkeeping import expected_stream, full, make_request, sliding, state
from tiers import TierBench

from hybrid_engine.groups.spec import LayerSpec
from hybrid_engine.request import RequestStatus
from hybrid_engine.transfer_plan import CheckpointKey

PROMPT = list(range(100, 200))
KINDS: dict[str, list[LayerSpec]] = {
    "full": [full()],
    "full and window": [full(), sliding(32)],
    "full and state": [full(), state()],
    "window and state": [sliding(32), state()],
    "all three, blocks of two sizes": [full(16), sliding(48, 32), state()],
    "state": [state()],
}


def make_bench(kind: str = "full", **settings) -> TierBench:
    """Memory for one prompt of 100 tokens and its answer, not for two."""
    return TierBench(KINDS[kind], 9, **{"checkpoint_interval": 0} | settings)


@pytest.fixture(params=KINDS)
def bench(request) -> TierBench:
    return make_bench(request.param)


def evict(bench: TierBench) -> None:
    """Let other prompts take all the memory there is."""
    for number in range(4):
        bench.run_one([1000 * (number + 1) + token for token in range(100)], f"other {number}")


def wait_for_kv(bench: TierBench, request) -> None:
    while request.status is not RequestStatus.WAITING_FOR_KV:
        bench.step()


def test_a_prompt_that_was_evicted_comes_back_and_only_its_last_block_is_computed(bench):
    bench.run_one(PROMPT)
    evict(bench)
    again = bench.run_one(PROMPT, "again")
    assert (again.cache.hit, again.cache.external, again.cache.num_computed) == (0, 96, 4)
    assert again.output_token_ids == expected_stream(PROMPT, 1)


def test_an_answer_and_a_new_turn_go_on_exactly_where_the_answer_ended(bench):
    first = bench.run_one(PROMPT, max_tokens=7)
    evict(bench)
    turn = [*first.token_ids, 7, 8, 9]
    again = bench.run_one(turn, "again")
    # The last token of the answer was never computed.
    assert again.cache.hit + again.cache.external == 106
    assert again.output_token_ids == expected_stream(turn, 1)


def test_a_prompt_that_parts_from_what_is_stored_is_fetched_up_to_there():
    bench = make_bench()
    bench.run_one(PROMPT)
    evict(bench)
    other = bench.run_one([*PROMPT[:70], *range(40)], "other")
    assert (other.cache.hit, other.cache.external) == (0, 64)


def test_another_salt_finds_nothing_in_the_store():
    bench = make_bench()
    bench.run_one(PROMPT)
    evict(bench)
    request = bench.add(PROMPT, "again")
    request.root_hash = bench.coordinator.hasher.root(cache_salt="another")
    request.block_hashes.clear()
    bench.coordinator.hasher.extend(request.block_hashes, request.root_hash, request.token_ids)
    bench.run()
    assert request.num_cached_tokens == 0


def test_a_request_that_reads_no_cache_fetches_nothing():
    bench = make_bench()
    bench.run_one(PROMPT)
    evict(bench)
    again = bench.run_one(PROMPT, "again", skip_reading_prefix_cache=True)
    assert (again.num_cached_tokens, again.cache.disabled) == (0, 99)


# Device and store together


def test_a_window_from_the_store_and_full_attention_from_the_device_make_one_hit():
    bench = TierBench([full(), sliding(32)], [60, 8])
    bench.run_one(PROMPT)
    evict(bench)
    again = bench.run_one(PROMPT, "again")
    assert (again.cache.hit, again.cache.external) == (0, 96)
    # Of full attention the device has lost nothing yet.
    assert not [key for key in bench.store.host if getattr(key, "group_id", 1) == 0]


def test_what_the_device_has_itself_is_copied_and_not_loaded():
    bench = TierBench([full(), sliding(32)], [60, 8])
    bench.run_one(PROMPT)
    evict(bench)
    again = bench.add(PROMPT, "again")
    plan = bench.scheduler.schedule()
    assert again.status is RequestStatus.WAITING_FOR_KV
    (load,) = plan.transfers.loads
    # Six blocks of full attention; of the window the two that lie in [65, 96).
    assert [copy.group_id for copy in plan.transfers.copies] == [0] * 6
    assert [transfer.key.group_id for transfer in load.transfers] == [1] * 2


def test_a_load_whose_own_blocks_push_out_what_it_needs_takes_that_from_the_store():
    bench = TierBench([full(), sliding(32)], [13, 8])
    bench.run_one(PROMPT)
    bench.run_one(PROMPT[::-1], "other")
    again = bench.add(PROMPT, "again")
    assert all(key in bench.coordinator.managers[0].pool.cached for key in again.block_hashes)
    bench.run()
    assert again.cache.external == 96
    assert bench.scheduler.loads.num_failed == 0


def test_what_is_about_to_be_loaded_is_not_dropped_for_what_is_just_stored():
    bench = make_bench(host_slots=110)
    bench.run_one(PROMPT)
    bench.run_one(PROMPT[::-1], "other")
    again = bench.run_one(PROMPT, "again")
    assert (again.cache.hit, again.cache.external) == (32, 64)
    assert bench.scheduler.loads.num_failed == 0


def test_a_thing_is_stored_once_however_often_it_is_given_up():
    bench = make_bench()
    for number in range(3):
        bench.run_one(PROMPT, f"again {number}")
        evict(bench)
    num_saved = bench.device.num_saved
    bench.run_one(PROMPT, "once more")
    evict(bench)
    assert bench.device.num_saved == num_saved


def test_window_blocks_that_were_passed_are_not_stored():
    bench = TierBench([full(), sliding(32)], [60, 14], max_num_scheduled_tokens=16)
    bench.run_one(PROMPT)
    for number in range(12):
        bench.run_one([1000 * (number + 1) + token for token in range(100)], f"other {number}")
    windows = [key for key in bench.store.host if getattr(key, "group_id", None) == 1]
    hashes = bench.add(PROMPT, "again").block_hashes
    # To go on at 96 needs the blocks from 64 on.
    assert {hashes.index(key.block_hash) for key in windows if key.block_hash in hashes} == {4, 5}


# While a load runs


def test_others_run_while_a_load_goes_on_and_nobody_finds_its_blocks_before():
    bench = TierBench([full()], 30, delay_steps=0)
    bench.run_one(PROMPT)
    for number in range(5):
        bench.run_one([1000 * (number + 1) + token for token in range(100)], f"other {number}")
    bench.device.rng = FixedDelay(6)
    bench.device.delay_steps = 6
    again = bench.add(PROMPT, "again")
    wait_for_kv(bench, again)
    other = bench.add([9, 9, 9], "other", max_tokens=4)
    while other.status is not RequestStatus.FINISHED:
        bench.step()
        assert again.status is RequestStatus.WAITING_FOR_KV
        assert not any(key in bench.coordinator.managers[0].pool.cached for key in again.block_hashes)
    bench.run()
    assert again.cache.external == 96
    assert all(key in bench.coordinator.managers[0].pool.cached for key in again.block_hashes[:6])


class FixedDelay:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def randint(self, low: int, high: int) -> int:
        return self.steps


def test_a_request_aborted_while_it_loads_gives_its_blocks_back_when_the_load_has_ended():
    bench = make_bench(delay_steps=3)
    bench.run_one(PROMPT)
    evict(bench)
    wait_for_kv(bench, bench.add(PROMPT, "again"))
    bench.scheduler.abort_request("again")
    for _ in range(6):
        bench.step()
    assert bench.coordinator.is_idle()
    assert bench.run_one(PROMPT, "once more").output_token_ids == expected_stream(PROMPT, 1)


def test_a_load_of_something_that_is_gone_is_computed_instead_and_said_so(bench):
    bench.run_one(PROMPT)
    evict(bench)
    again = bench.add(PROMPT, "again")
    wait_for_kv(bench, again)
    bench.store.loses = 1.0
    bench.run()
    assert bench.scheduler.loads.num_failed == 1
    assert (again.cache.external, again.num_cached_tokens) == (0, 0)
    assert again.output_token_ids == expected_stream(PROMPT, 1)


def test_a_preempted_request_finds_in_the_store_what_it_had_computed():
    bench = TierBench([full(), state()], [17, 12], checkpoint_interval=0)
    requests = [bench.add(PROMPT, "first", max_tokens=60), bench.add(PROMPT[::-1], "second", max_tokens=60)]
    bench.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert bench.scheduler.stats.num_recomputed_tokens <= sum(request.num_preemptions for request in requests)
    assert [request.output_token_ids for request in requests] == [
        expected_stream(PROMPT, 60),
        expected_stream(PROMPT[::-1], 60),
    ]


# What is worth it


def test_what_takes_longer_to_fetch_than_to_compute_is_computed():
    bench = make_bench()
    bench.run_one(PROMPT)
    evict(bench)
    rates = bench.tiers.rates
    rates.note_step(1000, 1.0)
    rates.note_load({"host": 95}, 0.1)  # 96 tokens in 96 slots: 0.096 s to compute, 0.101 s to fetch
    assert bench.run_one(PROMPT, "again").cache.external == 0
    assert bench.tiers.num_not_fetched_tokens == 96
    rates.bytes_per_second["host"] = 1001
    evict(bench)
    assert bench.run_one(PROMPT, "once more").cache.external == 96


def test_a_host_tier_too_small_for_a_prompt_changes_nothing():
    bench = make_bench(host_slots=20)
    for number in range(3):
        again = bench.run_one(PROMPT, f"again {number}")
        evict(bench)
        assert again.output_token_ids == expected_stream(PROMPT, 1)
    assert bench.store.host.num_bytes <= 20


def test_what_was_moved_is_counted():
    bench = make_bench()
    bench.run_one(PROMPT)
    evict(bench)
    bench.run_one(PROMPT, "again")
    evict(bench)
    bench.store.loses = 1.0
    bench.run_one(PROMPT, "once more")
    stats = bench.tiers.stats()
    # The four others have come back too.
    assert (stats.num_loads, stats.num_failed_loads) == (5, 1)
    assert stats.num_saved == bench.device.num_saved
    assert stats.host_bytes == bench.store.host.num_bytes > 0
    assert stats.bytes_per_second == {"host": pytest.approx(96 / 0.01)}


def test_a_stored_checkpoint_that_lies_about_its_position_is_no_hit(bench):
    parent = make_request(bench.coordinator, PROMPT).hash_at(5)
    for position in (-1, 79, 81, 99, 10**6):
        bench.store.put(CheckpointKey(parent, (), position), [b"forged"] * 40)
        bench.store.put(CheckpointKey(parent, tuple(PROMPT[80:83]), position), [b"forged"] * 40)
        assert bench.run_one(PROMPT, f"r{position}").output_token_ids == expected_stream(PROMPT, 1)
        bench.coordinator.reset_prefix_cache()
    assert bench.scheduler.loads.num_failed == 0


def test_spare_checkpoints_are_not_stored_by_a_flush():
    bench = TierBench([full(), state()], 40, checkpoint_interval=10)
    bench.run_one(range(150))
    positions = {checkpoint.position for checkpoint in bench.coordinator.checkpoints}
    stored = {thing.key.position for thing in bench.tiers._device_things() if isinstance(thing.key, CheckpointKey)}
    assert positions - stored == {10, 20, 30, 50, 60, 70, 90}
    assert {40, 80, 110, 120, 130, 140, 144, 150} <= stored


def test_resetting_forgets_what_is_stored(bench):
    bench.run_one(PROMPT)
    evict(bench)
    bench.coordinator.reset_prefix_cache()
    bench.tiers.reset()
    assert bench.run_one(PROMPT, "again").num_cached_tokens == 0
