"""Contexts share what they had in common, whether they are kept as tokens or as blocks."""

import random
from itertools import combinations

import pytest

from hybrid_engine.bench.generator.context import BlockContext, BlockSource, TokenContext, TokenSource
from hybrid_engine.bench.generator.measurement import common_tokens

BLOCK_TOKENS = 4


def token_context(*messages: int) -> TokenContext:
    context = TokenContext(TokenSource(0, 1_000_000))
    for num_tokens in messages:
        context.append(num_tokens)
    return context


def block_context(*messages: int) -> BlockContext:
    context = BlockContext(BlockSource(BLOCK_TOKENS))
    for num_tokens in messages:
        context.append(num_tokens)
    return context


def test_forks_share_what_was_there_and_nothing_after_it():
    stem = token_context(10)
    one, other = stem.fork(), stem.fork()
    one.append(5)
    other.append(5)
    assert common_tokens(one.prompt(), other.prompt()) == 10


def test_a_block_that_was_not_full_when_contexts_parted_is_not_shared():
    stem = block_context(10)
    one, other = stem.fork(), stem.fork()
    one.append(5)
    other.append(5)
    assert common_tokens(one.prompt(), other.prompt()) == 8


def test_a_rewrite_changes_content_and_no_size():
    context = token_context(4, 6, 5)
    before = context.prompt()
    context.rewrite(7)
    assert common_tokens(before, context.prompt()) == 7
    assert context.message_boundaries == (4, 10, 15)
    assert context.prompt().num_tokens == 15


def test_a_cut_ends_a_message():
    context = token_context(4, 6, 5)
    context.cut(7)
    context.append(2)
    assert context.message_boundaries == (4, 7, 9)
    assert context.prompt().num_tokens == 9


def test_reasoning_is_answered_and_not_shown():
    context = token_context(4)
    answer = context.answer(3, 2)
    assert len(answer) == 5
    assert context.prompt().token_ids()[4:] == list(answer[3:])


def test_ids_that_go_on_ascending_make_one_run():
    assert block_context(4, 8, 3).prompt().block_runs == ((0, 3),)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_and_blocks_tell_the_same_about_any_two_prompts(seed):
    rng = random.Random(seed)
    pairs = [(token_context(9), block_context(9))]
    prompts = []
    for _ in range(25):
        pair = rng.choice(pairs)
        size, action = rng.randrange(1, 12), rng.choice(["append", "append", "rewrite", "cut", "fork"])
        place = rng.randrange(1, pair[0].num_tokens + 1)
        if action == "fork":
            pairs.append((pair[0].fork(), pair[1].fork()))
        else:
            for context in pair:
                getattr(context, action)(size if action == "append" else place)
        prompts.append(tuple(context.prompt() for context in pair))
    for (one, one_blocks), (other, other_blocks) in combinations(prompts, 2):
        common = common_tokens(one, other)
        assert common_tokens(one_blocks, other_blocks) == common - common % BLOCK_TOKENS
