"""`LLM.score`: right log-probabilities, and each context computed once."""

from __future__ import annotations

import pytest
import torch
from transformers import JambaForCausalLM

from hybrid_engine import tiny_hybrid
from hybrid_engine.demo.ledger import ledger
from hybrid_engine.errors import RequestError, SamplingParamsError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scoring import num_common_tokens

CONTEXT = f"{ledger()[:1500]} The code of Belora is"
CONTINUATIONS = [" 4071.", " 938.", " a friend of the family, and of the horse.", " 4"]
TOLERANCE = 1e-4
"""float32, sums taken in another order."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(cache_memory_bytes="64MiB", dtype="float32", max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def oracle_logprobs(llm):
    """Return what transformers makes of each token of some ids but the first, by the ids before it."""
    model = JambaForCausalLM.from_pretrained(tiny_hybrid.find_model(tiny_hybrid.NAME), dtype=torch.float32)

    def logprobs(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)[:-1]

    return logprobs


def test_scores_are_those_of_transformers(llm, oracle_logprobs):
    context = llm.get_tokenizer()(CONTEXT)["input_ids"]
    for score in llm.score(CONTEXT, CONTINUATIONS):
        rows = oracle_logprobs(context + score.token_ids)[len(context) - 1 :]
        wanted = rows.gather(1, torch.tensor(score.token_ids)[:, None])[:, 0]
        assert score.logprobs == pytest.approx(wanted.tolist(), abs=TOLERANCE)
        assert score.logprob == pytest.approx(wanted.sum().item(), abs=TOLERANCE * len(wanted))
        assert score.is_greedy == bool((rows.argmax(1) == torch.tensor(score.token_ids)).all())


def test_a_context_is_computed_once_and_each_further_continuation_alone(llm):
    llm.reset_prefix_cache()
    scores = llm.score(CONTEXT, CONTINUATIONS)
    assert scores[0].num_computed_tokens == scores[0].num_prompt_tokens
    # The context's last token is computed again: it says how likely the first one behind it is.
    assert [score.num_computed_tokens for score in scores[1:]] == [1 + len(score.token_ids) for score in scores[1:]]


def test_scores_are_the_same_cold_and_from_the_cache(llm):
    llm.reset_prefix_cache()
    (cold,), (warm,) = llm.score(CONTEXT, CONTINUATIONS[:1]), llm.score(CONTEXT, CONTINUATIONS[:1])
    assert warm.num_computed_tokens < cold.num_computed_tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=TOLERANCE)


def test_what_a_connector_could_bring_beyond_the_first_token_scored_is_computed(llm, tmp_path):
    context, continuation = CONTEXT[:200], CONTEXT[200:800]
    (wanted,) = llm.score(context, [continuation])
    settings = {"cache_memory_bytes": "64MiB", "dtype": "float32", "disk_cache": tmp_path}
    with LLM(**settings) as first:
        first.prefill(context + continuation)
    with LLM(**settings) as second:
        (score,) = second.score(context, [continuation])
    assert score.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)


def test_several_contexts_score_as_each_does_alone(llm):
    contexts = [(CONTEXT[-500:], CONTINUATIONS), (CONTEXT[:400], CONTINUATIONS[:2])]
    alone = [[score.logprob for score in llm.score(*each)] for each in contexts]
    together = [[score.logprob for score in scores] for scores in llm.score_batch(contexts)]
    assert together == [pytest.approx(each, abs=TOLERANCE) for each in alone]


def test_text_and_token_ids_are_scored_alike(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(CONTINUATIONS[0], add_special_tokens=False)["input_ids"]
    (text,), (tokens,) = llm.score(CONTEXT, [CONTINUATIONS[0]]), llm.score(tokenizer(CONTEXT)["input_ids"], [ids])
    assert (text.token_ids, text.logprobs) == (tokens.token_ids, pytest.approx(tokens.logprobs, abs=TOLERANCE))


def test_a_rendered_conversation_keeps_its_one_begin_of_text_token(llm):
    prompt = llm.apply_chat_template([{"role": "user", "content": "What is the code of Belora?"}])
    (score,) = llm.score(prompt, ["4071."])
    assert score.num_prompt_tokens == len(prompt["prompt_token_ids"]) + len(score.token_ids)


@pytest.mark.parametrize(("context", "continuation"), [(CONTEXT, ""), (CONTEXT, []), ([5, 6], [])], ids=str)
def test_a_continuation_without_tokens_is_refused(llm, context, continuation):
    with pytest.raises(RequestError, match="the continuation has no tokens"):
        llm.score(context, [continuation])


@pytest.mark.parametrize("start", [1, 40, 41, 63, 64, 65, 79])
def test_a_prompt_is_reported_from_the_token_asked_for_whatever_is_cached(llm, oracle_logprobs, start):
    ids = llm.get_tokenizer()(CONTEXT)["input_ids"][:80]
    llm.generate([ids], SamplingParams(max_tokens=1, temperature=0))
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, prompt_logprob_start=start)
    (output,) = llm.generate([ids], sampling)
    assert output.num_cached_tokens < start
    assert output.prompt_logprobs[:start] == [None] * start
    found = [
        position[token].logprob for position, token in zip(output.prompt_logprobs[start:], ids[start:], strict=True)
    ]
    wanted = oracle_logprobs(ids)[range(start - 1, 79), ids[start:]]
    assert found == pytest.approx(wanted.tolist(), abs=TOLERANCE)


def test_prompt_logprob_start_without_prompt_logprobs_is_refused():
    with pytest.raises(SamplingParamsError, match="prompt_logprobs is None, must be a number"):
        SamplingParams(prompt_logprob_start=3)


def test_prompt_logprob_start_of_the_first_token_is_refused():
    with pytest.raises(SamplingParamsError, match="prompt_logprob_start is 0, must be at least 1"):
        SamplingParams(prompt_logprobs=0, prompt_logprob_start=0)


@pytest.mark.parametrize(
    ("one", "other", "common"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0)]
)
def test_common_tokens_end_at_the_first_difference(one, other, common):
    assert num_common_tokens(one, other) == common
