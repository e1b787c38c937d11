"""Prompts known by blocks alone hit what the same prompts hit as tokens."""

import random

import pytest

from hybrid_engine.bench import prefix_run
from hybrid_engine.bench.geometry import GEMMA_27B, JAMBA_MINI, LLAMA_8B, describe
from hybrid_engine.bench.infinite import InfiniteCache
from hybrid_engine.bench.prefix_result import PrefixRun, RunSettings
from hybrid_engine.bench.prefix_run import ModelledRunner, Run, make_coordinator, survey
from hybrid_engine.bench.token_free import BlockNames, NamedTokens, with_chained_ids
from hybrid_engine.bench.workload import BlockPrompt, TokenPrompt, WorkItem
from hybrid_engine.server.cache_log import PrefixNumbers

MODELS = {
    "full": LLAMA_8B | {"num_hidden_layers": 1},
    "full+state": JAMBA_MINI
    | {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
    "full+window": GEMMA_27B | {"num_hidden_layers": 6, "sliding_window": 64},
}


class Still:
    """A clock that stands still but for a moment a step."""

    def seconds(self, positions, num_new, num_sampled):
        return 0.001


def run(items: list[WorkItem], model: str, share: float) -> PrefixRun:
    """Replay calls with a share of the working set."""
    geometry, needs = describe(model, MODELS[model], block_size=8), survey(items)
    memory_bytes = int(share * needs.working_set_bytes(geometry))
    settings = RunSettings("t", model, "lru", memory_bytes, concurrency=3, pace="fast", block_size=8)
    coordinator = make_coordinator(geometry, settings, needs)
    return Run(items, settings, coordinator, ModelledRunner(Still())).run()


def random_sessions(seed: int) -> list[WorkItem]:
    """Conversations that share beginnings, go on from their answers, and now and then part from them."""
    rng, items = random.Random(seed), []
    shared = [rng.randrange(100) for _ in range(37)]
    for session in range(8):
        history = shared[: rng.choice((20, 37))]
        for _ in range(rng.randrange(2, 6)):
            history = history + [rng.randrange(100) for _ in range(rng.randrange(1, 60))]
            answer = [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
            ends = (len(history) // 2,)
            items.append(WorkItem(str(session), TokenPrompt((history,)), len(answer), answer, message_boundaries=ends))
            history = history + answer if rng.random() < 0.7 else history[: len(history) * 2 // 3]
    return items


def as_numbers(items: list[WorkItem]) -> list[WorkItem]:
    """The same calls, their tokens known by what is equal to what alone."""
    numbers = PrefixNumbers()
    return [
        WorkItem(
            item.session,
            BlockPrompt(
                item.prompt.num_tokens,
                tuple(numbers.runs("", [*item.prompt.token_ids(), *item.answer])),
                1,
                names_answer=True,
            ),
            item.num_answer_tokens,
            message_boundaries=item.message_boundaries,
        )
        for item in items
    ]


@pytest.mark.parametrize("share", [0.25, 3], ids=["short", "ample"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_without_tokens_is_the_run_with_them(seed, model, share):
    items = random_sessions(seed)
    with_tokens, without = run(items, model, share), run(as_numbers(items), model, share)
    assert with_tokens.totals.num_hit_tokens > 0
    for run_of in (with_tokens, without):
        run_of.totals.processor_s = 0.0
    assert without.totals == with_tokens.totals
    assert without.series == with_tokens.series


def test_a_short_memory_gives_something_up_in_these_runs():
    totals = run(random_sessions(0), "full+state", 0.25).totals
    assert totals.missed_tokens["evicted"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_the_infinite_cache_knows_the_same_of_blocks_as_of_tokens(seed):
    items = random_sessions(seed)
    of_tokens, of_blocks = InfiniteCache(), InfiniteCache()
    for item, named in zip(items, as_numbers(items), strict=True):
        names = BlockNames().tokens("s", named.prompt, named.num_answer_tokens, None)
        tokens = [*item.prompt.token_ids(), *item.answer]
        for length in (item.prompt.num_tokens, len(tokens) - 1):
            assert of_blocks.add(names, length) == of_tokens.add(tokens, length)
    assert of_blocks.num_tokens == of_tokens.num_tokens


def prompt(num_tokens: int, *runs: tuple[int, int], scope: str = "") -> BlockPrompt:
    return BlockPrompt(num_tokens, runs, 64, scope)


def test_the_next_prompt_shows_what_an_answer_was():
    names = BlockNames()
    tokens = names.tokens("s", prompt(150, (1, 2)), 100, prompt(256, (1, 4)))
    assert (len(tokens), tokens.names) == (150, [1, 2, 3, 4])


def test_a_next_prompt_that_parts_before_the_end_shows_nothing():
    tokens = BlockNames().tokens("s", prompt(150, (1, 2)), 100, prompt(256, (1, 1), (7, 3)))
    assert tokens.names[:2] == [1, 2]
    assert all(name < 0 for name in tokens.names[2:])


def test_what_nothing_shows_is_equal_to_nothing():
    names = BlockNames()
    one, other = (names.tokens("s", prompt(100, (1, 1)), 1, None).names for _ in range(2))
    assert (one[0], one[1] != other[1]) == (other[0], True)


def test_equal_ids_of_different_scopes_are_different():
    names = BlockNames()
    one, other = (names.tokens(scope, prompt(64, (1, 1), scope=scope), 1, None).names for scope in "ab")
    assert one[0] != other[0]


def test_a_token_is_named_by_its_block_and_its_place():
    tokens = NamedTokens([5, 9], 70, 64)
    assert (tokens[64:66], tokens[-1], len(tokens)) == ([9 * 64, 9 * 64 + 1], 9 * 64 + 5, 70)
    tokens.append(0)
    assert tokens[70:] == [9 * 64 + 6]


def test_ids_of_single_blocks_become_names_of_prefixes():
    first, second = with_chained_ids([prompt(192, (1, 3)), prompt(192, (7, 1), (2, 2))])
    assert [sum(count for _, count in each.block_runs) for each in (first, second)] == [3, 3]
    ids = [{first + i for first, count in each.block_runs for i in range(count)} for each in (first, second)]
    assert not ids[0] & ids[1]


def test_ids_that_name_prefixes_stay_as_they_are():
    prompts = [prompt(192, (1, 3)), prompt(256, (1, 2), (9, 2)), prompt(320, (1, 2), (9, 3))]
    assert with_chained_ids(prompts) == prompts


def test_a_runner_that_computes_nothing_is_given_no_tokens():
    numbered = as_numbers(random_sessions(0))[:1]
    assert run(numbered, "full", 10).totals.num_requests == 1


@pytest.mark.parametrize("share", [0.25, 3], ids=["short", "ample"])
@pytest.mark.parametrize("model", MODELS)
def test_steps_made_at_once_change_neither_hits_nor_times(model, share, monkeypatch):
    items = random_sessions(2)
    at_once = run(items, model, share).totals
    monkeypatch.setattr(prefix_run, "MAX_STEPS_AT_ONCE", 1)
    one_by_one = run(items, model, share).totals
    assert (at_once.num_hit_tokens, at_once.num_steps) == (one_by_one.num_hit_tokens, one_by_one.num_steps)
    assert at_once.makespan_s == pytest.approx(one_by_one.makespan_s)
    assert at_once.ttft_s.p90 == pytest.approx(one_by_one.ttft_s.p90)
