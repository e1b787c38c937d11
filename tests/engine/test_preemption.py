"""Preempted at every possible step of an answer of 60 tokens: the same stream, the same log-probabilities."""

from dataclasses import replace

import pytest
import torch
from tiny_engines import TinyEngines
from tiny_models import save_tiny_model

from hybrid_engine import SamplingParams
from hybrid_engine.engine import Prompt
from hybrid_engine.models.registry import load_model
from hybrid_engine.speculation.ngram import NgramDrafter
from hybrid_engine.weights import open_checkpoint

NUM_NEW, PROMPT = 60, [(7 * i * i + 3) % 99 + 3 for i in range(21)]
SAMPLING = SamplingParams(temperature=0.8, seed=9, max_tokens=NUM_NEW, ignore_eos=True, logprobs=2)
LOGPROB_TOLERANCE = 1e-3
"""What is computed again is computed in chunks: float32 sums in another order."""


@pytest.fixture(scope="module", params=["gemma3", "jamba"])
def engines(request, byte_tokenizer, tmp_path_factory) -> TinyEngines:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(request.param, folder, initializer_range=0.08)
    checkpoint = open_checkpoint(folder)
    return TinyEngines(load_model(checkpoint, dtype=torch.float32), checkpoint.config, byte_tokenizer)


@pytest.fixture(scope="module")
def expected(engines):
    (output,) = engines.make().generate([PROMPT], SAMPLING)
    return output.outputs[0]


def run(engine, prompts, after_step=lambda: None) -> dict[str, list]:
    """Run requests to their ends; return the deltas of each."""
    engine.add_requests(prompts)
    deltas = {prompt.request_id: [] for prompt in prompts}
    while engine.has_unfinished_requests():
        for output in engine.step():
            deltas[output.request_id].append(output.outputs[0])
        after_step()
    return deltas


def assert_as_expected(deltas, expected) -> None:
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text
    positions = [position for delta in deltas for position in delta.logprobs]
    for ours, plain in zip(positions, expected.logprobs, strict=True):
        assert ours.keys() == plain.keys()
        for token in ours:
            assert ours[token].logprob == pytest.approx(plain[token].logprob, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    ("depth", "num_drafts"),
    [(0, 0), (1, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, 3), (1, 0)])],
)
def test_a_request_preempted_after_any_number_of_tokens_says_the_same(engines, expected, depth, num_drafts):
    drafter = NgramDrafter(min_tokens=1, max_tokens=3) if num_drafts else None
    settings = {"async_depth": depth, "drafter": drafter, "draft_slots": num_drafts, "max_num_seqs": NUM_NEW}
    engine = engines.make(cache_memory_bytes="32MiB", **settings)._engine
    scheduler = engine.scheduler
    preempted = set()

    def preempt_those_due() -> None:
        for request in list(scheduler.running):
            if request.request_id not in preempted and request.num_output_tokens >= int(request.request_id):
                preempted.add(request.request_id)
                scheduler._preempt(request, "blocks")

    # Each under a salt of its own: nobody finds another's tokens.
    prompts = [Prompt(str(k), PROMPT, SAMPLING, cache_salt=str(k)) for k in range(NUM_NEW)]
    found = run(engine, prompts, preempt_those_due)
    for deltas in found.values():
        assert_as_expected(deltas, expected)
    # A step of several tokens may end the last ones first.
    assert len(preempted) >= NUM_NEW - num_drafts


@pytest.mark.slow
def test_a_pool_of_any_size_gives_the_same_stream(engines, expected):
    """Blocks of one token: in each pool the second request loses its place another step later.

    The pool must hold either request whole. So where it is to be short early, the first one is long at once.
    """
    positions = set()
    for k in range(NUM_NEW):
        first, num_first = (PROMPT * 4, 24) if k < 22 else (PROMPT, NUM_NEW)
        llm = engines.make(num_blocks=len(first) + len(PROMPT) + 2 * k + 1, num_states=8, block_size=1, watermark=0.0)
        scheduler, preempt = llm._engine.scheduler, llm._engine.scheduler._preempt

        def record(victim, reason, preempt=preempt) -> None:
            positions.add(victim.num_output_tokens)
            preempt(victim, reason)

        scheduler._preempt = record
        prompts = [
            Prompt("first", first, replace(SAMPLING, max_tokens=num_first)),
            Prompt("second", PROMPT, SAMPLING, cache_salt="second"),
        ]
        assert_as_expected(run(llm._engine, prompts)["second"], expected)
    assert positions >= set(range(2, NUM_NEW - 1)), sorted(positions)
