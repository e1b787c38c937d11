"""Cache entries that a connector brings: late, never, or wrong, while other requests go on."""

import pytest
from bookkeeping import Bench, expected_stream, full, hit_tokens, sliding, state
from fakes import FakeConnector

from hybrid_engine.request import RequestStatus

GROUPS = {"full": [full()], "three kinds": [full(), sliding(32), state()]}


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_scene_7_what_a_connector_brings_is_found_when_it_has_arrived():
    bench = Bench([full()], 20)
    bench.run_one(tokens(32), "cached")
    connector = attach(bench, FakeConnector(128, delay_steps=1))
    request = bench.add(tokens(200), "r", max_tokens=3)
    bench.launch()
    assert (request.status, len(request.held.tables[0])) == (RequestStatus.WAITING_FOR_KV, 8)
    assert (hit_tokens(bench.coordinator, tokens(200)), connector.loads[0].num_local_tokens) == (32, 32)
    bench.launch()
    bench.step()
    assert (bench.plans[-1].started[0].num_computed_tokens, bench.plans[-1].num_tokens) == (128, 72)
    assert len(request.held.tables[0]) == 13
    bench.run()
    assert bench.streams["r"] == expected_stream(tokens(200), 3)


def attach(bench: Bench, connector: FakeConnector) -> FakeConnector:
    """Let a scheduler that has run without a connector have one."""
    connector.device, bench.connector = bench.device, connector
    bench.scheduler.loads.connector = bench.scheduler._admission.connector = connector
    return connector


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_other_requests_go_on_while_a_load_runs(specs, depth):
    connector = FakeConnector(100, delay_steps=5)
    bench = Bench(specs, 40, connector=connector, async_depth=depth)
    bench.add(tokens(101), "loaded", max_tokens=5)
    bench.add([7], "short", max_tokens=4)
    for _ in range(5):
        bench.step()
    assert len(bench.streams["short"]) >= 2
    assert "loaded" not in bench.streams
    bench.run()
    assert bench.streams["loaded"] == expected_stream(tokens(101), 5)
    assert bench.device.num_computed_tokens == 1 + 4 + 1 + 3


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_what_was_not_loaded_is_computed(specs):
    bench = Bench(specs, 40, connector=FakeConnector(100, fails=1.0, delay_steps=2))
    request = bench.add(tokens(120), max_tokens=5)
    bench.run()
    assert bench.streams["r"] == expected_stream(tokens(120), 5)
    assert (bench.scheduler.loads.num_failed, request.cache.external, request.cache.hit) == (1, 0, 0)
    assert bench.plans[0].num_tokens == 120


def test_a_load_that_failed_can_not_be_found():
    bench = Bench([full()], 40, connector=FakeConnector(100, fails=1.0))
    bench.add(tokens(120), "r", max_tokens=1)
    bench.launch()
    bench.connector.advance()
    bench.scheduler._take_loads()
    assert hit_tokens(bench.coordinator, tokens(120)) == 0
    assert bench.coordinator.usage()[0].num_held == 0


def test_loads_that_end_at_once_do_not_overfill_a_step():
    bench = Bench([full()], 40, connector=FakeConnector(), max_num_batched_tokens=4)
    for i in range(8):
        bench.add(tokens(20, 100 * i), f"r{i}", max_tokens=5)
    bench.run()
    assert max(plan.num_tokens for plan in bench.plans) == 4


def test_an_aborted_load_holds_its_blocks_until_it_has_ended_and_is_found_afterwards():
    bench = Bench([full()], 20, connector=FakeConnector(100, delay_steps=3))
    bench.add(tokens(120))
    bench.launch()
    bench.scheduler.abort_request("r")
    assert not bench.scheduler.has_unfinished_requests()
    held = []
    for _ in range(4):
        bench.launch()
        held.append(bench.coordinator.usage()[0].num_held)
    assert held == [7, 7, 7, 0]
    assert hit_tokens(bench.coordinator, tokens(120)) == 100


def test_what_a_connector_brought_is_explained():
    bench = Bench([full()], 20, connector=FakeConnector(100))
    request = bench.run_one(tokens(120))
    assert (request.cache.external, request.cache.never_seen, request.num_cached_tokens) == (100, 19, 100)
    assert str(request.cache) == "120 = 0 hit + 100 external + 1 last + 19 never seen"


def test_a_load_waits_for_the_copy_of_a_block_that_it_was_given():
    # "a" goes on from inside a block and has planned its copy; the block then goes to the load of "b".
    bench = Bench([full()], 6, watermark=0, async_depth=1, full_sequence_must_fit=False)
    bench.run_one(tokens(40), "cached")
    connector = attach(bench, FakeConnector(30))
    connector.find = lambda request, num_local: 30 - num_local if request.request_id == "b" else 0
    bench.add([*tokens(40), 900, 901], "a", max_tokens=4)
    bench.add(tokens(60, 500), "b", max_tokens=4)
    bench.launch()
    assert bench.plans[-1].block_copies
    assert connector.loads == []
    bench.take_in()
    assert [load.request.request_id for load in connector.loads] == ["b"]
    bench.run()
    assert bench.streams["a"] == expected_stream([*tokens(40), 900, 901], 4)
    assert bench.streams["b"] == expected_stream(tokens(60, 500), 4)


@pytest.mark.parametrize("fails", [0.0, 1.0], ids=["brought", "failed"])
def test_what_a_load_does_not_bring_back_counts_as_computed_again(fails):
    bench = Bench([full()], 20, connector=FakeConnector(0, fails=fails))
    request = bench.add(tokens(60), max_tokens=10)
    bench.step()
    bench.scheduler._preempt(request)
    bench.coordinator.reset_prefix_cache()
    bench.connector.num_tokens = 32
    bench.run()
    assert bench.scheduler.stats.num_recomputed_tokens == (60 if fails else 28)


def test_a_loaded_request_can_be_preempted_before_it_has_run():
    bench = Bench([full(), state()], [9, 8], connector=FakeConnector(), full_sequence_must_fit=False, watermark=0)
    bench.connector.find = lambda request, num_local: max(0, 60 - num_local) if request.request_id == "b" else 0
    bench.add(tokens(70), "a", max_tokens=30)
    bench.step()
    bench.add(tokens(61, 500), "b", max_tokens=10)
    bench.step()
    bench.connector.advance()
    bench.scheduler._take_loads()
    bench.scheduler._preempt(bench.scheduler.requests["b"])
    bench.run()
    assert bench.streams["a"] == expected_stream(tokens(70), 30)
    assert bench.streams["b"] == expected_stream(tokens(61, 500), 10)


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("length", [96, 101])
@pytest.mark.parametrize("depth", [0, 2])
def test_requests_for_one_stored_document_wait_for_one_load(specs, length, depth):
    connector = FakeConnector(length, delay_steps=3)
    bench = Bench(specs, 60, connector=connector, async_depth=depth)
    prompts = {f"r{i}": [*tokens(length), *tokens(9, 1000 * (i + 1))] for i in range(4)}
    requests = [bench.add(prompt, name, max_tokens=3) for name, prompt in prompts.items()]
    bench.run()
    assert len(connector.loads) == 1
    assert [(request.cache.hit, request.cache.external) for request in requests] == [(0, length), *[(length, 0)] * 3]
    assert {name: bench.streams[name] for name in prompts} == {
        name: expected_stream(prompt, 3) for name, prompt in prompts.items()
    }


def test_full_attention_goes_on_from_inside_what_another_request_loads():
    connector = FakeConnector(96, delay_steps=3)
    bench = Bench([full()], 60, connector=connector)
    bench.add(tokens(120), "first")
    second = bench.add([*tokens(64), *tokens(40, 500)], "second")
    bench.run()
    assert [load.request.request_id for load in connector.loads] == ["first", "second"]
    assert (second.cache.hit, second.cache.external) == (64, 32)  # this connector knows any prompt's first 96 tokens


@pytest.mark.parametrize(("num_shared", "end"), [(64, 96), (99, 101)], ids=["blocks before", "inside its last block"])
def test_windows_and_states_do_not_wait_for_a_load_that_ends_elsewhere(num_shared, end):
    bench = Bench(GROUPS["three kinds"], 60, connector=FakeConnector(end, delay_steps=3))
    bench.add(tokens(120), "first")
    second = bench.add([*tokens(num_shared), *tokens(40, 500)], "second")
    bench.launch()
    assert (second.status, second.junction) == (RequestStatus.WAITING_FOR_KV, None)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_who_waits_for_a_load_that_does_not_come_goes_on_alone(is_aborted):
    connector = FakeConnector(96, fails=0.0 if is_aborted else 1.0, delay_steps=2)
    bench = Bench([full()], 60, connector=connector)
    bench.add(tokens(120), "first", max_tokens=3)
    bench.add(tokens(110), "second", max_tokens=3)
    bench.launch()
    if is_aborted:
        bench.scheduler.abort_request("first")
    bench.run()
    assert bench.streams["second"] == expected_stream(tokens(110), 3)
    assert ("first" in bench.streams) is not is_aborted


def test_another_tenant_does_not_wait_for_a_load():
    connector = FakeConnector(96, delay_steps=2)
    bench = Bench([full()], 60, connector=connector)
    bench.add(tokens(120), "first")
    other = bench.add(tokens(120), "other")
    other.root_hash = bench.coordinator.hasher.root(cache_salt="another")
    other.block_hashes.clear()
    bench.coordinator.hasher.extend(other.block_hashes, other.root_hash, other.token_ids)
    bench.launch()
    assert (other.status, other.junction) == (RequestStatus.WAITING_FOR_KV, None)
