"""The real Gemma 3 270M: what an evaluation notes as its answers is what transformers says to the same prompts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_engine.evals import evaluate
from hybrid_engine.evals.prompts import Prompts
from hybrid_engine.evals.samples import Builder
from hybrid_engine.evals.tasks import find_tasks
from hybrid_engine.evals.tasks.retrieval import Recall
from hybrid_engine.evals.texts import Texts
from hybrid_engine.llm import LLM

pytestmark = [pytest.mark.slow, pytest.mark.real_weights, pytest.mark.timeout(1800)]

LENGTH = 1024
TASKS = [Recall(4), *find_tasks(["hops_1"])]


def test_answers_are_those_of_transformers(real_weights):
    llm = LLM(real_weights, dtype="float32", cache_memory_bytes="1GiB", max_num_seqs=8)
    report = evaluate(llm, TASKS, [LENGTH], num_samples=4, progress=False)
    tokenizer = llm.get_tokenizer()
    builder = Builder(Prompts(llm), Texts(), seed=42)
    samples = {sample.key: sample for task in TASKS for sample in task.make_group(builder, LENGTH, 0)}
    del llm
    oracle = AutoModelForCausalLM.from_pretrained(
        real_weights.parent, gguf_file=real_weights.name, dtype=torch.float32, attn_implementation="eager"
    )
    assert len(report.samples) == len(samples) == 8
    for record in report.samples:
        sample = samples[record["key"]]
        prompt = torch.tensor([builder.prompts.render(sample)])
        whole = oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=sample.max_tokens, do_sample=False
        )
        answer = tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)
        assert answer == record["answer"], record["key"]
