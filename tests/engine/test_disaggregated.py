"""Two processes: one computes prompts, the other decodes, and nobody can tell from the text."""

import io
import json
import os
import signal
from pathlib import Path

import pytest

from hybrid_engine.disaggregated import HANDED_OVER, DisaggregatedLLM
from hybrid_engine.errors import ConfigError
from hybrid_engine.inputs import as_prompts
from hybrid_engine.llm import LLM
from hybrid_engine.prefill_worker import serve_prefills
from hybrid_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [f"Prompt number {number}: what stands in the old book about bridges?" for number in range(3)] + ["x"]
SETTINGS = {"cache_memory_bytes": "4MiB", "max_model_len": 200}


def answers(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["tiny_jamba", pytest.param("tiny_gemma3", marks=pytest.mark.slow)])
def test_two_processes_answer_as_one_and_decode_computes_one_token_of_each_prompt(name, request):
    model = request.getfixturevalue(name)
    expected = answers(LLM(model, **SETTINGS).generate(PROMPTS, GREEDY))
    with DisaggregatedLLM(model, **SETTINGS) as llm:
        folder = Path(llm._folder)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert answers(outputs) == expected
        assert [output.cache.num_computed for output in outputs] == [1] * len(PROMPTS)
        assert outputs[0].prompt == PROMPTS[0]
        # What was handed over stays for whoever comes with the same beginning.
        os.kill(llm._worker.process_id, signal.SIGKILL)
        assert (
            answers(llm.generate([*PROMPTS, "and now without the other process"], GREEDY))[: len(PROMPTS)] == expected
        )
        assert answers(llm.generate("again", GREEDY))
    assert not folder.exists()


def test_a_prefill_process_that_cannot_start_is_an_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid_engine.disaggregated.SHARED_MEMORY", str(tmp_path))
    with pytest.raises(Exception, match="nowhere"):
        DisaggregatedLLM("/nowhere", **SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_is_handed_over_with_all_that_it_came_with(tiny_jamba):
    told = {"prompt": "abc", "cache_salt": "s", "message_boundaries": [2], "priority": 7}
    (prompt,) = as_prompts(told)
    with LLM(tiny_jamba, **SETTINGS) as llm:
        known = llm.as_tokens(prompt)
    assert {name: known[name] for name in told} == told
    assert set(HANDED_OVER) == set(known) - {"prompt"}


def test_a_folder_of_ones_own_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="handoff_bytes"):
        DisaggregatedLLM(tmp_path, disk_cache=tmp_path)


def lines(*prompts: dict) -> list[str]:
    return [json.dumps(prompt) + "\n" for prompt in prompts]


def test_a_worker_answers_each_prompt_and_a_bad_one_hurts_no_other(tiny_jamba, tmp_path, ids):
    good, bad = {"id": 1, "prompt_token_ids": ids(PROMPTS[0])}, {"id": 2, "prompt_token_ids": [5, 10_000, 5]}
    out = io.StringIO()
    with LLM(tiny_jamba, **SETTINGS, disk_cache=tmp_path) as llm:
        serve_prefills(llm, lines(good, bad), out)
    ready, first, second = map(json.loads, out.getvalue().splitlines())
    assert (ready, first) == ({"ready": True}, {"id": 1, "error": None})
    assert (second["id"], "10000" in second["error"]) == (2, True)


def test_a_prefilled_prompt_needs_only_its_last_token_in_another_llm(tiny_jamba, tmp_path, ids):
    with LLM(tiny_jamba, **SETTINGS, disk_cache=tmp_path) as llm:
        llm.prefill([PROMPTS[0], {"prompt": PROMPTS[1], "cache_salt": "somebody"}])
    other = LLM(tiny_jamba, **SETTINGS, disk_cache=tmp_path)
    outputs = other.generate([PROMPTS[0], PROMPTS[1], {"prompt": PROMPTS[1], "cache_salt": "somebody"}], GREEDY)
    assert [output.cache.num_computed for output in outputs] == [1, len(PROMPTS[1]), 1]
