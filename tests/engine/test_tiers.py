"""Whole engines on tiny models: what was evicted comes from host memory and disk, and no answer changes."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import JambaConfig, JambaForCausalLM

from hybrid_engine.connectors.rates import FetchRates
from hybrid_engine.errors import CapacityError, ConfigError, EngineDeadError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
STORY = "Once there was a bridge over a river, and who crossed it had to tell the keeper a story. "
MAX_LEN = 250


@pytest.fixture(params=["gemma", "jamba"])
def model(request) -> Path:
    return request.getfixturevalue("tiny_gemma3" if request.param == "gemma" else "tiny_jamba")


def small_memory(model: Path) -> int:
    """Memory for two requests of MAX_LEN tokens and a few states."""
    num_bytes = 1 << 16
    while True:
        try:
            LLM.plan(model, cache_memory_bytes=num_bytes, max_model_len=MAX_LEN, max_num_seqs=1)
        except CapacityError:
            num_bytes += num_bytes // 8
        else:
            return 2 * num_bytes


def make_llm(model: Path, **settings) -> LLM:
    small = {"cache_memory_bytes": small_memory(model), "max_model_len": MAX_LEN, "max_num_seqs": 1}
    return LLM(model, **small | settings)


def answers(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def ask(llm: LLM, prompt):
    (output,) = llm.generate([prompt], GREEDY, progress=False)
    return output


def evict(llm: LLM) -> None:
    for number in range(6):
        ask(llm, f"{number} is something else that has nothing to do with it at all; " * 3)


def test_an_evicted_prompt_comes_back_from_host_memory_and_its_answer_is_the_same(model):
    llm = make_llm(model, host_cache_bytes="64MiB")
    cold = ask(llm, STORY)
    evict(llm)
    again = ask(llm, STORY)
    assert (again.cache.hit, again.cache.external) == (0, len(STORY) // 16 * 16)
    assert again.num_cached_tokens == again.cache.external
    assert answers([again]) == answers([cold])


def test_a_conversation_goes_on_at_its_exact_end_after_it_was_evicted(model, ids):
    llm = make_llm(model, host_cache_bytes="64MiB")
    first = ask(llm, STORY)
    evict(llm)
    history = first.prompt_token_ids + first.outputs[0].token_ids
    second = ask(llm, [*history, *ids("more")])
    assert second.num_cached_tokens == len(history) - 1
    assert answers([second]) == answers([ask(make_llm(model), [*history, *ids("more")])])


@pytest.mark.parametrize("async_depth", [0, 1, 2])
def test_loads_go_on_while_others_run(model, async_depth, monkeypatch):
    # On a busy machine the loads of the second `evict` may have been so slow that computing would win.
    monkeypatch.setattr(FetchRates, "is_worth_fetching", lambda *_: True)
    prompts = [f"{number}{STORY}" for number in range(4)]
    settings = {"max_num_seqs": 4, "cache_memory_bytes": 2 * small_memory(model), "async_depth": async_depth}
    llm = make_llm(model, host_cache_bytes="64MiB", **settings)
    cold = answers(llm.generate(prompts, GREEDY))
    evict(llm)
    evict(llm)
    again = llm.generate([prompts[0], "new", prompts[1], prompts[2], prompts[3]], GREEDY)
    assert sum(output.cache.external for output in again) > 0
    assert [answer for index, answer in enumerate(answers(again)) if index != 1] == cold


def test_questions_about_one_stored_document_fetch_it_once(model, tmp_path):
    questions = [STORY + question for question in ("Who asks?", "Who crosses?", "What is told?")]
    settings = {"max_num_seqs": 3, "cache_memory_bytes": 4 * small_memory(model)}
    cold = make_llm(model, **settings).generate(questions, GREEDY)
    with make_llm(model, disk_cache=tmp_path, **settings) as llm:
        ask(llm, STORY)
    with make_llm(model, disk_cache=tmp_path, **settings) as llm:
        again = llm.generate(questions, GREEDY)
    assert [(each.cache.hit, each.cache.external) for each in again] == [(0, len(STORY)), *[(len(STORY), 0)] * 2]
    assert answers(again) == answers(cold)


def test_a_new_process_finds_on_disk_what_an_earlier_one_has_left(model, tmp_path):
    with make_llm(model, disk_cache=tmp_path) as llm:
        cold = ask(llm, STORY)
    with make_llm(model, disk_cache=tmp_path) as llm:
        again = ask(llm, STORY)
    assert again.cache.external == len(STORY) // 16 * 16
    assert answers([again]) == answers([cold])


def test_an_llm_that_is_dropped_without_being_closed_leaves_everything_on_disk(tiny_jamba, tmp_path):
    llm = make_llm(tiny_jamba, disk_cache=tmp_path)
    ask(llm, STORY)
    del llm
    gc.collect()
    assert ask(make_llm(tiny_jamba, disk_cache=tmp_path), STORY).cache.external > 0


def test_different_weights_find_nothing_in_the_same_folder(tiny_jamba, tmp_path, byte_tokenizer):
    torch.manual_seed(1)
    other = JambaForCausalLM(JambaConfig.from_pretrained(tiny_jamba))
    other.save_pretrained(tmp_path / "other")
    byte_tokenizer.save_pretrained(tmp_path / "other")
    with make_llm(tiny_jamba, disk_cache=tmp_path / "cache") as llm:
        ask(llm, STORY)
    with make_llm(tmp_path / "other", disk_cache=tmp_path / "cache") as llm:
        assert ask(llm, STORY).num_cached_tokens == 0


def test_another_block_size_finds_nothing_in_the_same_folder(tiny_gemma3, tmp_path):
    with make_llm(tiny_gemma3, disk_cache=tmp_path) as llm:
        ask(llm, STORY)
    with make_llm(tiny_gemma3, disk_cache=tmp_path, block_size=8) as llm:
        assert ask(llm, STORY).num_cached_tokens == 0


def cut(content: bytes) -> bytes:
    return content[:-9]


def overwrite(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + b"x" * (len(content) - half)


@pytest.mark.parametrize("damage", [cut, overwrite])
def test_bad_files_are_misses_and_the_answer_is_the_same(tiny_jamba, tmp_path, caplog, damage):
    with make_llm(tiny_jamba, disk_cache=tmp_path) as llm:
        cold = ask(llm, STORY)
    files = list(tmp_path.rglob("*.safetensors"))
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING), make_llm(tiny_jamba, disk_cache=tmp_path) as llm:
        again = ask(llm, STORY)
    assert again.cache.external == 0
    assert answers([again]) == answers([cold])
    num_lines = len([record for record in caplog.records if "cache file" in record.message])
    assert 1 <= num_lines <= len(files)


def test_resetting_forgets_host_memory_and_disk(tiny_jamba, tmp_path):
    llm = make_llm(tiny_jamba, host_cache_bytes="64MiB", disk_cache=tmp_path)
    ask(llm, STORY)
    llm.flush_cache()
    assert list(tmp_path.rglob("*.safetensors"))
    llm.reset_prefix_cache()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert ask(llm, STORY).num_cached_tokens == 0


def test_resetting_forgets_also_what_a_step_in_flight_is_to_save(tiny_jamba):
    llm = make_llm(tiny_jamba, host_cache_bytes="64MiB", async_depth=1, max_num_seqs=2)
    evict(llm)
    first = llm.stream("the first", GREEDY)
    next(first)
    may_run, saves, execute = threading.Event(), [], llm._engine.runner.execute

    def held_up(plan):
        assert may_run.wait(30)
        saves.extend(plan.transfers.saves if plan.transfers is not None else ())
        return execute(plan)

    llm._engine.runner.execute = held_up
    second = llm.stream("the second, whose step takes the memory of what was before; " * 3, GREEDY)
    next(first)  # which launched that step
    threading.Timer(0.1, may_run.set).start()
    llm.reset_prefix_cache()
    assert saves
    assert llm.tier_stats().host_bytes == 0
    second.close()


def test_a_closed_llm_refuses_and_can_be_closed_again(tiny_jamba):
    with make_llm(tiny_jamba, host_cache_bytes="1MiB") as llm:
        ask(llm, STORY)
    llm.close()
    with pytest.raises(EngineDeadError, match="the engine can't be used any more: it was closed"):
        ask(llm, STORY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_bytes": -1}, "must be at least 0"),
        ({"host_cache_bytes": "a lot"}, "is no size in bytes"),
        ({"host_cache_bytes": "1MiB", "enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"disk_cache": "/proc/nowhere"}, "can't be used"),
        ({"disk_cache": "x", "disk_cache_bytes": 0}, "must be above 0"),
        ({"disk_cash": "x"}, "did you mean 'disk_cache'"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny_jamba, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(tiny_jamba, **settings)


WRITER = """
import json, sys
from hybrid_engine import LLM, SamplingParams
settings, prompts = json.loads(sys.argv[2]), json.loads(sys.argv[3])
llm = LLM(sys.argv[1], **settings)
for number, prompt in enumerate(prompts):
    llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), progress=False)
    llm.flush_cache()
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_cache_that_is_whole(tiny_jamba, tmp_path):
    prompts = [f"{number}. {STORY}" for number in range(20)]
    settings = {"cache_memory_bytes": small_memory(tiny_jamba), "max_model_len": MAX_LEN, "max_num_seqs": 1}
    command = [sys.executable, "-c", WRITER, str(tiny_jamba), json.dumps(settings | {"disk_cache": str(tmp_path)})]
    root = Path(__file__).resolve().parents[2]
    writer = subprocess.Popen(
        [*command, json.dumps(prompts)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert writer.stdout is not None
    num_stored = 1 + next(number for number in map(int, writer.stdout) if number == 8)
    # It is on its way to the next one now.
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    with make_llm(tiny_jamba, disk_cache=tmp_path) as llm:
        found = [ask(llm, prompt) for prompt in prompts[: num_stored + 2]]
    assert sum(output.cache.external > 0 for output in found[:num_stored]) >= 0.9 * num_stored
    assert answers(found) == answers([ask(make_llm(tiny_jamba), prompt) for prompt in prompts[: num_stored + 2]])
    assert not list(tmp_path.rglob("*.tmp"))
