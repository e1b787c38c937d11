"""A draft model that is the model itself: every guess must be right, and hardly anything computed twice."""

import pytest
import torch
from tiny_models import save_tiny_model

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.registry import load_model
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.speculation.draft_model import DraftModelDrafter
from hybrid_engine.weights import open_checkpoint

PROMPT = [(i * i * 7 + 3 * i) % 99 + 3 for i in range(37)]
MAX_MODEL_LEN = 200


@pytest.fixture(scope="module", params=["llama", "gemma3", "jamba"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(request.param, folder)
    return load_model(open_checkpoint(folder), dtype=torch.float32)


@pytest.fixture
def drafter(model) -> DraftModelDrafter:
    groups = group_layers(model.info.cache_specs(block_size=4, element_bytes=4))
    scheduler = Scheduler(SchedulerConfig(), Coordinator(groups, [100] * len(groups)))
    return DraftModelDrafter(scheduler, ModelRunner(model, groups, [100] * len(groups)), max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.9}], ids=["greedy", "hot"])
def test_a_model_guesses_its_own_tokens_in_whatever_pieces_it_is_asked(drafter, make_request, sampling):
    request = make_request(PROMPT, **sampling)
    (whole,) = drafter.propose([request], [12])
    found: list[int] = []
    for size in (1, 3, 2, 4, 2):
        (drafts,) = drafter.propose([request], [size])
        found += drafts
        for token_id in drafts:
            request.append_token(token_id)
    assert tuple(found) == whole
    assert len(set(whole)) > 3


def test_after_rejected_drafts_only_what_is_new_is_computed(drafter, make_request):
    request = make_request(PROMPT, temperature=0)
    drafter.propose([request], [3])
    for token_id in (50, 51):  # the first draft was rejected
        request.append_token(token_id)
        computed = drafter._runner.num_computed_tokens_total
        drafter.propose([request], [3])
        # The new token, and all drafts but the last.
        assert drafter._runner.num_computed_tokens_total - computed == 1 + 2


def test_requests_are_drafted_for_in_one_batch(drafter, make_request):
    requests = [make_request(PROMPT[i:], str(i), temperature=0) for i in range(4)]
    alone = [drafter.propose([request], [3])[0] for request in requests]
    for request in requests:
        request.append_token(60)
    steps = drafter._runner.num_steps_total
    together = drafter.propose(requests, [3, 0, 2, 3])
    assert drafter._runner.num_steps_total - steps == 3
    assert [len(drafts) for drafts in together] == [3, 0, 2, 3]
    assert together != alone


def test_a_request_at_the_draft_models_reach_gets_fewer_and_then_none(drafter, make_request):
    request = make_request([5] * (MAX_MODEL_LEN - 1), temperature=0)
    lengths = []
    for _ in range(4):
        lengths.append(len(drafter.propose([request], [3])[0]))
        request.append_token(5)
    assert lengths == [2, 1, 0, 0]


def test_what_ends_or_reports_an_answer_is_no_matter_of_drafts(drafter, make_request):
    plain = make_request(PROMPT, temperature=0)
    (drafts,) = drafter.propose([plain], [4])
    asking = make_request(
        PROMPT, temperature=0, stop=("a",), stop_token_ids=drafts[:1], n=2, logprobs=3, prompt_logprobs=1, max_tokens=1
    )
    assert drafter.propose([asking], [4]) == [drafts]
