"""Requests that share a long prefix read its keys once: the answers stay what they are without."""

import json
from functools import partial

import pytest
import torch
from scripted_engine import make_byte_tokenizer
from tiny_engines import TinyEngines
from tiny_gemma import save_tiny_gemma3

from hybrid_engine import SamplingParams
from hybrid_engine.models.registry import load_model
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.weights import open_checkpoint

DOCUMENT = "".join(chr(97 + (i * i + 3 * i) % 23) for i in range(1100))
QUESTIONS = ["who?", "and why so?", "where is it then?", "no"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> TinyEngines:
    tokenizer = make_byte_tokenizer()
    folder = save_tiny_gemma3(tmp_path_factory.mktemp("long-gemma"), tokenizer)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    return TinyEngines(load_model(checkpoint, dtype=torch.float32), dict(checkpoint.config), tokenizer)


def ask(engines, *, shares: bool, budget: int = 2048) -> tuple[list, int]:
    """Answers of different lengths with their log-probabilities, and the reads of keys that were spared."""
    llm = engines.make(
        runner_class=partial(ModelRunner, shares_prefixes=shares),
        cache_memory_bytes="32MiB",
        max_num_batched_tokens=budget,
        block_size=16,
    )
    params = [SamplingParams(max_tokens=n, temperature=0, logprobs=1, ignore_eos=True) for n in (12, 5, 9, 12)]
    outputs = llm.generate([DOCUMENT + question for question in QUESTIONS], params)
    answers = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    return answers, llm._engine.runner.num_spared_keys_total


@pytest.mark.parametrize("budget", [2048, 96], ids=["at once", "beside chunks of a prompt"])
def test_answers_are_the_same_to_the_bit_with_and_without(engines, budget):
    alone, num_never_spared = ask(engines, shares=False, budget=budget)
    together, num_spared = ask(engines, shares=True, budget=budget)
    assert together == alone
    assert num_never_spared == 0
    # 1,024 keys, and steps in which two to four requests are decoded.
    assert num_spared >= 8 * 1024
    assert num_spared % 1024 == 0
