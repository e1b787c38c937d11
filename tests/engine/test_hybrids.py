"""Tiny random hybrids with recurrent layers through the whole engine: hits change no answer, and skip what they hit."""

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from hybrid_engine.invariants import check_invariants
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

NUM_NEW = 12
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
COMMON = {"vocab_size": 259, "hidden_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ATTENTION = {
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
MODELS = {
    "jamba": lambda: (
        JambaForCausalLM,
        JambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=5,
            attn_layer_period=3,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=6,
            mamba_dt_rank=5,
        ),
    ),
    "bamba": lambda: (
        BambaForCausalLM,
        BambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=4,
            attn_layer_indices=[2],
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=6,
            mamba_chunk_size=16,
        ),
    ),
    "mamba": lambda: (
        MambaForCausalLM,
        MambaConfig(**COMMON, num_hidden_layers=3, state_size=6, initializer_range=0.2),
    ),
    "mamba2": lambda: (
        Mamba2ForCausalLM,
        Mamba2Config(
            **COMMON, num_hidden_layers=3, state_size=6, num_heads=8, head_dim=12, n_groups=2, initializer_range=0.2
        ),
    ),
}
DOCUMENT = "A long text that several questions are about, with some numbers: 12, 57, 33 and 90. "
PROMPTS = ["a", "sixteen letters.", DOCUMENT + "first?", DOCUMENT + "and the second one?"]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, byte_tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    cls, config = MODELS[request.param]()
    folder = tmp_path_factory.mktemp(f"tiny-{request.param}")
    model = cls(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder, model


def make_llm(checkpoint, **settings) -> LLM:
    return LLM(checkpoint[0], **{"cache_memory_bytes": "8MiB", "max_model_len": 400} | settings)


def expected(checkpoint, token_ids: list[int]) -> list[int]:
    """Greedy tokens by one forward of the whole text for each: transformers' own continuation of a cache is wrong."""
    tokens = list(token_ids)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            tokens.append(int(checkpoint[1](torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(token_ids) :]


def answers(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def cold(checkpoint) -> list[list[int]]:
    return answers(make_llm(checkpoint, enable_prefix_caching=False).generate(PROMPTS, GREEDY))


def test_greedy_answers_are_those_of_transformers(checkpoint, cold, ids):
    assert cold == [expected(checkpoint, ids(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 2048])
def test_chunks_and_hits_change_no_answer(checkpoint, cold, chunk):
    llm = make_llm(checkpoint, max_num_batched_tokens=chunk)
    runner = llm._engine.runner
    for round_name in ("cold", "warm"):
        before = runner.num_computed_tokens_total
        outputs = llm.generate(PROMPTS, GREEDY)
        assert answers(outputs) == cold, round_name
        computed = sum(output.cache.num_computed for output in outputs) + len(PROMPTS) * (NUM_NEW - 1)
        assert runner.num_computed_tokens_total - before == computed
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True, True]
    check_invariants(llm._engine.scheduler.coordinator, [])


def test_questions_on_one_document_compute_it_once(checkpoint, ids):
    llm = make_llm(checkpoint)
    stem = DOCUMENT + "question number "
    questions = [f"{stem}{i}: which?" for i in range(8)]
    outputs = llm.generate(questions, GREEDY)
    shared = len(stem) // 16 * 16
    assert [output.num_cached_tokens for output in outputs] == [0] + [shared] * 7
    alone = make_llm(checkpoint, enable_prefix_caching=False)
    assert answers(outputs) == [answers(alone.generate([question], GREEDY))[0] for question in questions]


def test_a_conversation_goes_on_at_its_exact_end_and_an_edited_one_at_a_checkpoint(checkpoint, ids):
    llm, alone = make_llm(checkpoint), make_llm(checkpoint, enable_prefix_caching=False)
    (first,) = llm.generate(PROMPTS[2], GREEDY)
    history = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate([history + ids("more")], GREEDY)
    assert second.num_cached_tokens == len(history) - 1
    edited = first.prompt_token_ids + ids("another answer, and more")
    (third,) = llm.generate([edited], GREEDY)
    assert third.num_cached_tokens == len(first.prompt_token_ids)
    assert answers([second, third]) == answers(alone.generate([history + ids("more"), edited], GREEDY))


def test_little_memory_preempts_but_changes_no_answer(checkpoint, cold):
    plan = make_llm(checkpoint, max_model_len=120).memory_plan
    pairs = zip(plan.groups, plan.num_blocks, strict=True)
    smallest = sum(group.block_bytes * (1 + min(count, 12)) for group, count in pairs)
    llm = make_llm(checkpoint, max_model_len=120, cache_memory_bytes=smallest, max_num_batched_tokens=16)
    for _ in range(3):
        assert answers(llm.generate(PROMPTS, GREEDY)) == cold
    check_invariants(llm._engine.scheduler.coordinator, [])
