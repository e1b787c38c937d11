from bookkeeping import full, make_coordinator, make_request

from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams


def test_block_hashes_exist_from_the_start_and_grow_with_the_answer():
    coordinator = make_coordinator([full(4)], 4)
    request = make_request(coordinator, range(7))
    assert len(request.block_hashes) == 1
    for token in range(7, 12):
        request.append_token(token)
    assert request.block_hashes == make_request(coordinator, range(12)).block_hashes


def test_the_prompt_given_is_not_modified():
    coordinator, prompt = make_coordinator([full(4)], 4), [1, 2, 3]
    request = make_request(coordinator, prompt)
    request.append_token(4)
    assert (prompt, request.output_token_ids, request.num_output_tokens) == ([1, 2, 3], [4], 1)


def test_the_answer_ends_at_the_models_context():
    hasher = make_coordinator([full(4)], 4).hasher
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=None), hasher=hasher, max_model_len=10)
    assert request.max_total_tokens == 10


def test_ignore_eos_keeps_stop_tokens():
    hasher = make_coordinator([full(4)], 4).hasher
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(5,))
    request = Request("r", [1], sampling, hasher=hasher, max_model_len=10, eos_token_ids=(2,))
    assert request.stop_token_ids == {5}
