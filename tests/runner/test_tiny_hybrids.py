"""The runner with layers that keep a state: tiny random hybrids, their oracle transformers' one-shot forwards."""

import pytest
import torch
from hand_plans import Hand
from transformers import BambaConfig, BambaForCausalLM, JambaConfig, JambaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from hybrid_engine.groups.spec import MambaSpec, group_layers
from hybrid_engine.models.registry import load_model
from hybrid_engine.step_plan import BlockCopy, StateCapture, StepPlan
from hybrid_engine.weights import open_checkpoint

PROMPT = [(i * i * 7 + 3 * i) % 99 + 1 for i in range(29)]
# Large random weights: greedy answers depend on all of the prompt, not on its last token.
COMMON = {"vocab_size": 100, "hidden_size": 48, "initializer_range": 0.2, "eos_token_id": 0, "pad_token_id": 0}
ATTENTION = {"intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRIDS = {
    "jamba": (
        JambaForCausalLM,
        JambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=5,
            attn_layer_period=3,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=5,
        ),
    ),
    "bamba": (
        BambaForCausalLM,
        BambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=4,
            attn_layer_indices=[2],
            mamba_n_heads=6,
            mamba_n_groups=2,
            mamba_d_state=5,
        ),
    ),
    "mamba2": (
        Mamba2ForCausalLM,
        Mamba2Config(**COMMON, num_hidden_layers=3, num_heads=6, head_dim=16, n_groups=2, state_size=5),
    ),
}


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(request, tmp_path_factory, device):
    """Transformers' model, and ours loaded from what it saved."""
    model_class, config = HYBRIDS[request.param]
    torch.manual_seed(0)
    oracle = model_class(config).eval()
    folder = tmp_path_factory.mktemp("tiny-hybrid")
    oracle.save_pretrained(folder)
    return oracle, load_model(open_checkpoint(folder), dtype=torch.float32, device=device)


@pytest.fixture
def oracle(pair):
    return pair[0]


@pytest.fixture(params=[torch.nan, 1e30], ids=["nan", "1e30"])
def hand(pair, request, device) -> Hand:
    model = pair[1]
    groups = group_layers(model.info.cache_specs(block_size=4, element_bytes=4))
    return Hand(model, groups, num_blocks=60, poison=request.param, device=device)


def greedy(oracle, prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            known.append(int(oracle(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(prompt) :]


def state_groups(hand: Hand) -> list[int]:
    return [group.group_id for group in hand.groups if isinstance(group.spec, MambaSpec)]


def capture(hand: Hand, request_id: str, position: int) -> dict[int, int]:
    """Have the next step keep a state in every state group; return the slots."""
    slots = {group_id: hand.free[group_id].pop() for group_id in state_groups(hand)}
    hand.captures += [StateCapture(request_id, group_id, position, slot) for group_id, slot in slots.items()]
    return slots


def resume(hand: Hand, request_id: str, token_ids: list[int], *, hit: int, owner: str, captured: dict[int, int]):
    """Start a request behind a kept state: copies for its working slots, the owner's blocks for its attention."""
    tables = []
    for group in hand.groups:
        table = hand.tables[owner][group.group_id][: -(-hit // group.block_size)]
        is_state = group.group_id in captured
        # What the owner may go on writing, and every state, is copied.
        if is_state or hit % group.block_size:
            source = captured.get(group.group_id, table[-1])
            table[-1] = hand.free[group.group_id].pop()
            num_slots = 1 if is_state else hit % group.block_size
            hand.copies.append(BlockCopy(group.group_id, source, table[-1], num_slots))
        tables.append(table)
    hand.add(request_id, token_ids, hit=hit, hit_blocks=tables)


@pytest.mark.parametrize("chunk", [1, 3, 7, 4096])
def test_any_chunking_gives_the_answer_of_transformers(hand, oracle, chunk):
    hand.add("a", PROMPT)
    assert hand.run({"a": 12}, chunk=chunk)["a"] == greedy(oracle, PROMPT, 12)


def test_packed_requests_each_give_the_answer_of_transformers(hand, oracle):
    hand.add("a", PROMPT)
    hand.add("b", PROMPT[11:])
    answers = hand.run({"a": 8, "b": 14}, chunk=9)
    assert answers == {"a": greedy(oracle, PROMPT, 8), "b": greedy(oracle, PROMPT[11:], 14)}
    assert len(set(answers["b"])) > 4


def test_a_request_that_comes_back_starts_from_zeros(hand, oracle):
    hand.add("a", PROMPT)
    hand.add("b", PROMPT[3:])
    first = hand.run({"a": 4, "b": 4})["a"]
    hand.end("a")
    hand.run({"b": 3})
    hand.add("a", PROMPT + first, num_prompt_tokens=len(PROMPT))
    assert first + hand.run({"a": 6, "b": 2}, chunk=7)["a"] == greedy(oracle, PROMPT, 10)


@pytest.mark.parametrize("position", [1, 12, 29], ids=["first token", "on a block's edge", "chunk's end"])
def test_a_request_that_resumes_at_a_kept_state_computes_only_the_rest(hand, oracle, position):
    hand.add("a", PROMPT)
    captured = capture(hand, "a", position)
    hand.step({"a": len(PROMPT)})
    hand.run({"a": 2})
    other = [*PROMPT[:position], 50, 51, 7]
    computed = hand.runner.num_computed_tokens_total
    resume(hand, "b", other, hit=position, owner="a", captured=captured)
    assert hand.run({"b": 8})["b"] == greedy(oracle, other, 8)
    assert hand.runner.num_computed_tokens_total - computed == 3 + 7


def test_states_kept_in_one_step_serve_two_requests_beside_their_owner(hand, oracle):
    hand.add("a", PROMPT)
    hand.add("z", PROMPT[5:])
    hand.step({"z": 3, "a": 8})
    early, late = capture(hand, "a", 10), capture(hand, "a", 17)
    hand.step({"a": 21, "z": 4})
    resume(hand, "b", [*PROMPT[:10], 3], hit=10, owner="a", captured=early)
    resume(hand, "c", [*PROMPT[:17], 4, 5], hit=17, owner="a", captured=late)
    answers = hand.run({"a": 5, "b": 5, "c": 5}, chunk=1)
    assert answers["b"] == greedy(oracle, [*PROMPT[:10], 3], 5)
    assert answers["c"] == greedy(oracle, [*PROMPT[:17], 4, 5], 5)
    assert answers["a"][:5] == greedy(oracle, PROMPT, 6)[1:]


@pytest.mark.parametrize("position", [8, 12])
def test_a_state_outside_the_chunk_cannot_be_kept(hand, position):
    hand.add("a", PROMPT)
    hand.step({"a": 8})
    capture(hand, "a", position)
    with pytest.raises(AssertionError, match="lies outside 3 tokens from 8 on"):
        hand.step({"a": 3})


def test_more_drafts_than_slots_for_their_states_are_an_error(hand):
    hand.add("a", PROMPT)
    hand.step({"a": 29})
    plan = StepPlan(1, ("a",), (29,), (3,), (True,), draft_token_ids=((1, 2),))
    with pytest.raises(AssertionError, match=r"\[1\] state slots for one working state each and \[2\] drafts"):
        hand.runner.execute(plan)
