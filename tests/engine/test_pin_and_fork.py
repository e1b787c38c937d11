"""`LLM.pin`, `fork` and `unpin` with a real model."""

import pytest

from hybrid_engine import LLM, SamplingParams
from hybrid_engine.errors import RequestError

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 8
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def shared_llm():
    with LLM(cache_memory_bytes="24MiB", max_model_len=512, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm):
    shared_llm.reset_prefix_cache()
    return shared_llm


def crowd(llm: LLM) -> None:
    llm.generate([[5 + i] * 400 for i in range(20)], GREEDY, progress=False)


def cached_tokens(llm: LLM, prompt) -> int:
    return llm.generate(prompt, GREEDY, progress=False)[0].num_cached_tokens


def test_a_pinned_document_is_hit_whatever_was_asked_meanwhile(llm):
    pin = llm.pin(DOCUMENT, name="document")
    assert pin.num_tokens == len(pin.token_ids)
    crowd(llm)
    assert cached_tokens(llm, {"prompt_token_ids": [*pin.token_ids, 5, 6]}) == pin.num_tokens
    assert dict(llm.pins) == {"document": pin}


def test_several_continuations_start_where_an_answer_ended(llm):
    (output,) = llm.generate(DOCUMENT, GREEDY, progress=False)
    fork = llm.fork(output)
    crowd(llm)
    for token_id in (5, 6):
        assert cached_tokens(llm, {"prompt_token_ids": [*fork.token_ids, token_id]}) == fork.num_tokens
    assert fork.num_tokens == len(fork.token_ids) - 1


def test_continuations_of_a_fork_answer_as_if_nothing_were_cached(llm):
    (output,) = llm.generate(DOCUMENT, GREEDY, progress=False)
    prompt = {"prompt_token_ids": [*llm.fork(output).token_ids, 5]}
    (warm,) = llm.generate(prompt, GREEDY, progress=False)
    cold_sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, skip_reading_prefix_cache=True)
    (cold,) = llm.generate(prompt, cold_sampling, progress=False)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_unpin_frees_the_name_and_the_memory(llm):
    llm.unpin(llm.pin(DOCUMENT, name="document"))
    assert not llm.pins
    assert llm._engine.scheduler.coordinator.is_idle()
    assert llm.pin(DOCUMENT, name="document").num_tokens


def test_a_name_is_pinned_once(llm):
    llm.pin(DOCUMENT, name="document")
    with pytest.raises(RequestError, match="'document', which is pinned already"):
        llm.pin("something else", name="document")


def test_one_prompt_is_pinned_at_a_time(llm):
    with pytest.raises(RequestError, match="2 prompts were given"):
        llm.pin([DOCUMENT, "another"])


def test_pins_are_refused_before_they_leave_too_little_for_the_longest_request(llm):
    prompts = [{"prompt_token_ids": [5 + i % 40, *[5 + i // 40] * 400]} for i in range(1000)]
    with pytest.raises(RequestError, match="unpin something"):
        list(map(llm.pin, prompts))
    assert len(llm.generate("x " * 250, GREEDY, progress=False)) == 1
