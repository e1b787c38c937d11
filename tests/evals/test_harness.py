"""lm-evaluation-harness on this engine: the numbers of its own transformers backend, whatever the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hybrid_engine import tiny_hybrid
from hybrid_engine.errors import PromptTooLongError, RequestError

pytest.importorskip("lm_eval.evaluator", reason="the evals extra isn't installed: pip install -e '.[evals]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from hybrid_engine.demo.ledger import ledger, questions
from hybrid_engine.evals.harness import HybridEngineLM

FOLDER = str(Path(tiny_hybrid.__file__).parent)
TOLERANCE = 1e-3
NUM_ITEMS = 200
SETTINGS = {"dtype": "float32", "cache_memory_bytes": "128MiB"}
TASK = """
task: recall_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def model() -> HybridEngineLM:
    return HybridEngineLM(FOLDER, batch_size=16, **SETTINGS)


@pytest.fixture(scope="module")
def hf():
    """The harness's own backend."""
    return get_model("hf")(pretrained=FOLDER, device="cpu", dtype="float32", batch_size=16)


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def choices() -> list[Instance]:
    answers = [answer for _, answer in questions()][:4]
    contexts = [ledger()[: 300 + 40 * i] + " Answer:" for i in range(3)]
    return ask("loglikelihood", *((context, f" {answer}") for context in contexts for answer in answers))


def test_the_harness_knows_the_model_by_name():
    assert get_model("hybrid_engine") is HybridEngineLM


def test_continuations_of_one_context_compute_it_once(model):
    runner = model.llm._engine.runner
    model.llm.reset_prefix_cache()
    before = runner.num_computed_tokens_total
    requests = choices()
    model.loglikelihood(requests, disable_tqdm=True)
    longest = max(len(model.tok_encode(request.args[0])) for request in requests)
    # Three contexts, each the beginning of the next but for its last words.
    assert runner.num_computed_tokens_total - before < longest + 12 * 12 + 2 * 16


def test_an_answer_ends_before_a_stop_text(model):
    prompt = model.apply_chat_template(
        [{"role": "system", "content": ledger()}, {"role": "user", "content": questions()[0][0]}]
    )
    assert model.generate_until(ask("generate_until", (prompt, {"until": ["."]})), disable_tqdm=True) == [" 4071"]


def test_a_rendered_conversation_gets_no_second_begin_of_text_token(model):
    prompt = model.apply_chat_template([{"role": "user", "content": "Hello."}])
    assert model.tok_encode(prompt).count(model.prefix_token_id) == 1
    assert model.tok_encode("Hello.").count(model.prefix_token_id) == 1


def test_a_context_that_does_not_fit_is_refused_and_cut_only_where_asked(model):
    request = ask("loglikelihood", ("a b c " * 3000, " d"))
    with pytest.raises(PromptTooLongError, match=r"there is room for [\d,]+: raise max_length"):
        model.loglikelihood(request, disable_tqdm=True)
    cutting = HybridEngineLM(llm=model.llm, truncation=True)
    cutting.loglikelihood(request, disable_tqdm=True)
    assert cutting.num_truncated == 1


def test_an_unknown_generation_setting_is_refused(model):
    with pytest.raises(RequestError, match="gen_kwargs has 'num_beams'"):
        model.generate_until(ask("generate_until", ("a", {"do_sample": True, "num_beams": 4})), disable_tqdm=True)


def test_the_device_that_the_harness_asks_for_by_default_becomes_the_cpu_where_there_is_no_gpu(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert HybridEngineLM(FOLDER, device="cuda:0", **SETTINGS).llm.max_model_len == 4096
    assert "there is no GPU: the CPU computes" in caplog.text


@pytest.mark.slow
def test_log_likelihoods_are_those_of_the_hf_backend(model, hf):
    ours, theirs = (each.loglikelihood(choices(), disable_tqdm=True) for each in (model, hf))
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=TOLERANCE)
    assert [is_greedy for _, is_greedy in ours] == [is_greedy for _, is_greedy in theirs]


@pytest.mark.slow
def test_rolling_log_likelihoods_are_those_of_the_hf_backend_over_several_windows(hf):
    model = HybridEngineLM(FOLDER, max_length=100, **SETTINGS)
    hf._max_length = model.max_length
    requests = ask("loglikelihood_rolling", (ledger()[:900],), ("Hello there.",))
    ours, theirs = (each.loglikelihood_rolling(requests, disable_tqdm=True) for each in (model, hf))
    hf._max_length = None
    assert ours == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.slow
def test_answers_are_those_of_the_hf_backend(model, hf):
    prompts = [
        model.apply_chat_template(
            [{"role": "system", "content": ledger()[:1500]}, {"role": "user", "content": question}]
        )
        for question, _ in questions()[:3]
    ]
    requests = ask("generate_until", *((prompt, {"until": ["<"], "max_gen_toks": 12}) for prompt in prompts))
    assert model.generate_until(requests, disable_tqdm=True) == hf.generate_until(requests, disable_tqdm=True)


def write_task(folder: Path) -> Path:
    """Write a multiple-choice task whose items lie in a local file."""
    rng = random.Random(7)
    known = [answer for _, answer in questions()]
    items = folder / "items.jsonl"
    with items.open("w") as file:
        for _ in range(NUM_ITEMS):
            question, answer = rng.choice(questions())
            options = rng.sample([other for other in known if other != answer], 3)
            label = rng.randrange(4)
            options.insert(label, answer)
            start = rng.randrange(0, 600)
            context = f"{ledger()[start : start + 200]} {question}"
            file.write(json.dumps({"context": context, "choices": options, "label": label}) + "\n")
    (folder / "recall_choice.yaml").write_text(TASK.format(items=items))
    return folder


def item_scores(model: object, folder: Path) -> list[float]:
    found = simple_evaluate(
        model, tasks=["recall_choice"], task_manager=TaskManager(include_path=str(folder), include_defaults=False)
    )
    samples = sorted(found["samples"]["recall_choice"], key=lambda sample: sample["doc_id"])
    return [float(score) for sample in samples for ((score, _),) in sample["resps"]]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_items_score_as_on_the_hf_backend_in_batches_of_1_and_16(hf, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = write_task(tmp_path)
    wanted = item_scores(hf, folder)
    assert len(wanted) == 4 * NUM_ITEMS
    for batch_size in (1, 16):
        found = item_scores(HybridEngineLM(FOLDER, batch_size=batch_size, **SETTINGS), folder)
        assert found == pytest.approx(wanted, abs=TOLERANCE), f"batch size {batch_size}"
