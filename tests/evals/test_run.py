"""`evaluate`: right scores, documents computed once, the same answers without reuse, errors before anything runs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals import Texts, TruncatedError, evaluate, read_report
from hybrid_engine.evals.prompts import BeginOfTextError, Prompts
from hybrid_engine.evals.samples import Sample
from hybrid_engine.evals.tasks.retrieval import NeedleMap, Recall
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

SYSTEM = {"prompt_format": "chat-system", "progress": False}


@pytest.fixture
def never_runs(llm, monkeypatch):
    """An LLM that must not be asked anything."""

    def fail(*arguments, **options):
        raise AssertionError("something was run")

    monkeypatch.setattr(llm, "as_completed", fail)
    return llm


@pytest.fixture(scope="module")
def recalled(llm):
    llm.reset_prefix_cache()
    return evaluate(llm, ["recall"], [1200], num_samples=20, compare_without_reuse=True, **SYSTEM)


def test_the_trained_hybrid_recalls_every_fact(recalled):
    (score,) = recalled.scores
    assert (score.num_samples, score.value, score.high, score.interval) == (20, 1.0, 1.0, "Wilson")
    assert score.low == pytest.approx(0.839, abs=1e-3)


def test_twenty_questions_on_one_document_compute_it_once(recalled):
    work = recalled.work
    assert work.prompt_tokens > 20 * 1000
    assert work.unique_tokens < 1200 + 20 * 40
    assert work.computed_tokens <= 1.05 * work.unique_tokens
    assert work.computed_without_reuse == work.prompt_tokens


def test_answers_and_scores_are_the_same_without_reuse(recalled):
    assert recalled.work.num_same_answers == recalled.work.num_same_scores == 20


def test_a_needle_map_computes_the_prose_before_each_needle_once(llm):
    llm.reset_prefix_cache()
    report = evaluate(llm, [NeedleMap(5)], [1000, 1500], num_samples=5, **SYSTEM)
    assert {(cell.length, cell.depth) for cell in report.cells} == {
        (length, depth) for length in (1000, 1500) for depth in (0, 0.25, 0.5, 0.75, 1)
    }
    assert report.work.unique_tokens < 0.65 * report.work.prompt_tokens
    assert report.work.computed_tokens <= 1.05 * report.work.unique_tokens


def test_perplexity_is_what_the_models_own_probabilities_say(llm):
    llm.reset_prefix_cache()
    report = evaluate(llm, ["perplexity"], [256, 512], num_samples=1, progress=False)
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.bos_token_id, *tokenizer(Texts().essay_text[:4000], add_special_tokens=False)["input_ids"]][:511]
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    for length in (256, 512):
        losses = [-output.prompt_logprobs[i][ids[i]].logprob for i in range(length // 2, length - 1)]
        whole = len(losses) // 64 * 64
        assert report.score("perplexity", length).value == pytest.approx(
            math.exp(sum(losses[:whole]) / whole), rel=1e-4
        )
    # The first length's window is the beginning of the second's.
    assert report.work.computed_tokens < 511 + 16


def test_a_report_comes_back_from_its_file(recalled, tmp_path):
    recalled.write_json(tmp_path / "report.json")
    found = read_report(tmp_path / "report.json")
    assert dataclasses.replace(found, settings=recalled.settings) == recalled
    assert len(found.samples) == 20
    recalled.write_json(tmp_path / "short.json", with_samples=False)
    assert read_report(tmp_path / "short.json").scores == recalled.scores


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"version": 1}', '{"version": 2}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is no report|was written by another version"):
        read_report(tmp_path / "report.json")


def test_a_finished_journal_is_read_and_nothing_is_run_again(llm, tmp_path, monkeypatch):
    wanted = {"lengths": [600], "num_samples": 4, "journal": tmp_path / "run.jsonl", **SYSTEM}
    first = evaluate(llm, ["hops_1"], **wanted)
    monkeypatch.setattr(llm, "as_completed", None)
    again = evaluate(llm, ["hops_1"], **wanted)
    assert (again.scores, again.work, again.num_resumed) == (first.scores, first.work, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["needles"]}, "'needles' is no task; did you mean 'needle_map'"),
        ({"lengths": [40]}, "needle_map at length 40: its shortest prompt has"),
        ({"lengths": [512, 100_000]}, r"length 100,000 is above max_model_len \(4,096\)"),
        ({"lengths": []}, "must be one or more numbers of tokens"),
        ({"max_tokens": 480}, "the answer may take 480, together"),
        ({"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"num_samples": 0}, "num_samples is 0, must be at least 1"),
        ({"prompt_format": "yaml"}, "prompt_format is 'yaml', must be one of"),
    ],
    ids=str,
)
def test_wrong_use_is_refused_before_anything_runs(never_runs, change, message):
    wanted = {"tasks": ["needle_map"], "lengths": [512], "num_samples": 11, **SYSTEM}
    with pytest.raises(ConfigError, match=message):
        evaluate(never_runs, **wanted | change)


def test_a_text_that_does_not_exist_is_refused_before_anything_runs(never_runs, tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.txt doesn't exist"):
        evaluate(never_runs, ["needle_map"], [512], texts=Texts(essay=tmp_path / "missing.txt"), **SYSTEM)


def test_a_prompt_that_was_cut_fails_the_run(llm, monkeypatch):
    whole = llm.as_completed

    def cut(prompts, sampling, **options):
        return whole(
            [each | {"prompt_token_ids": each["prompt_token_ids"][:-3]} for each in prompts], sampling, **options
        )

    monkeypatch.setattr(llm, "as_completed", cut)
    with pytest.raises(TruncatedError, match=r"hops_1@600#\d: \d+ of \d+ prompt tokens were run"):
        evaluate(llm, ["hops_1"], [600], num_samples=1, **SYSTEM)


def test_an_answer_that_had_less_room_than_promised_fails_the_run(llm, monkeypatch):
    whole = llm.as_completed

    def cut(prompts, sampling, **options):
        return whole(prompts, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), **options)

    monkeypatch.setattr(llm, "as_completed", cut)
    with pytest.raises(TruncatedError, match="ended with 'length' after 2 of 8 tokens"):
        evaluate(llm, ["hops_1"], [600], num_samples=1, **SYSTEM)


@pytest.mark.parametrize("prompt_format", ["completion", "chat", "chat-system", "auto"])
def test_every_format_gives_one_begin_of_text_token(llm, prompt_format):
    prompts = Prompts(llm, prompt_format)
    token_ids = prompts.render(Sample("t", 100, 0, document="A text.", question="\nWhat?", answer_prefix=" It is"))
    assert [i for i, token_id in enumerate(token_ids) if token_id == llm.get_tokenizer().bos_token_id] == [0]


@pytest.mark.parametrize(("begin", "count"), [("<|begin|><|begin|>", 2), ("", 0)], ids=["two", "none"])
def test_a_template_with_two_or_no_begin_of_text_tokens_is_refused(llm, begin, count):
    template = begin + "{% for m in messages %}{{ m.content }}{% endfor %}"
    other = LLM.from_engine(llm._engine, llm.engine_plan, chat_template=template)
    with pytest.raises(BeginOfTextError, match=f"begins with {count} and has {count} begin-of-text tokens"):
        evaluate(other, ["needle_map"], [600], num_samples=1, progress=False)


def test_a_bar_shows_how_far_it_is_and_how_long_it_takes(llm, capsys):
    evaluate(llm, [Recall(2)], [600], num_samples=2, **SYSTEM | {"progress": True})
    shown = capsys.readouterr().err
    assert "recall 2/2" in shown
    assert "100%" in shown
    assert "left:" in shown
