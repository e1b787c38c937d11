import io
import json
import sys
from types import SimpleNamespace

import pytest

from hybrid_engine import __version__
from hybrid_engine.cli import main
from hybrid_engine.errors import EngineDeadError
from hybrid_engine.kernels import native
from hybrid_engine.llm import LLM

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FEW = ["--max-tokens", "4", "--memory", "1MiB", "--ignore-eos"]


@pytest.fixture
def run(capsys):
    """Run the command line: the exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def answers(tiny_gemma3):
    """What the tiny model answers to prompts, asked in Python."""

    def answers(*prompts):
        from hybrid_engine.sampling_params import SamplingParams

        llm = LLM(tiny_gemma3, cache_memory_bytes="1MiB")
        outputs = llm.generate(list(prompts), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        return [output.outputs[0].text for output in outputs]

    return answers


def test_version_is_printed(run):
    assert run("--version") == (0, f"hybrid-engine {__version__}\n", "")


def test_generate_streams_one_answer_and_puts_the_facts_on_stderr(run, tiny_gemma3, answers):
    code, out, err = run("generate", tiny_gemma3, "hello", *FEW)
    assert (code, out) == (0, answers("hello")[0] + "\n")
    assert "4 tokens" in err
    assert "5 = 0 hit + 1 last + 4 never seen" in err


def test_generate_guesses_ahead_and_says_how_well(run, tiny_gemma3, answers):
    few = ["--max-tokens", "4", "--memory", "1MiB", "--ignore-eos"]
    code, out, err = run("generate", tiny_gemma3, "hello", *few, "--draft-model", tiny_gemma3)
    assert (code, out) == (0, answers("hello")[0] + "\n")
    assert "1 of 1 guesses right" in err


def test_generate_refuses_guesses_that_make_no_sense(run, tiny_gemma3):
    code, _, err = run("generate", tiny_gemma3, "hello", "--speculative", "magic")
    assert code == 2
    assert "method is 'magic', must be 'ngram' or 'draft_model'" in err


def test_generate_prints_each_of_several_answers(run, tiny_gemma3, answers):
    _, out, _ = run("generate", tiny_gemma3, "hello", "other", *FEW)
    assert all(answer in out for answer in answers("hello", "other"))


def test_generate_prints_json_for_programs(run, tiny_gemma3, answers):
    _, out, _ = run("generate", tiny_gemma3, "hello", "other", "--json", *FEW)
    found = [json.loads(line) for line in out.splitlines()]
    assert [output["outputs"][0]["text"] for output in found] == answers("hello", "other")
    assert found[0]["cache"]["never_seen"] == 4


def test_generate_reads_prompts_from_a_file(run, tiny_gemma3, tmp_path):
    (tmp_path / "prompts.txt").write_text("hello\n\nother\n")
    _, out, _ = run("generate", tiny_gemma3, "--file", tmp_path / "prompts.txt", "--json", *FEW)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["hello", "other"]


@pytest.mark.parametrize(("typed", "prompt"), [("from\nstdin", "from\nstdin"), ("hi\n", "hi"), ("hi\n\n", "hi\n")])
def test_generate_reads_one_prompt_from_stdin_without_its_last_line_end(run, tiny_gemma3, monkeypatch, typed, prompt):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    _, out, _ = run("generate", tiny_gemma3, "--json", *FEW)
    assert json.loads(out)["prompt"] == prompt


def test_prompts_that_are_no_utf_8_are_refused(run, tiny_gemma3, tmp_path, monkeypatch):
    (tmp_path / "latin-1.txt").write_bytes("Grüße".encode("latin-1"))
    code, _, err = run("generate", tiny_gemma3, "--file", tmp_path / "latin-1.txt")
    assert (code, err.count("\n")) == (2, 1)
    assert "latin-1.txt as UTF-8 text" in err
    monkeypatch.setattr(sys, "stdin", (tmp_path / "latin-1.txt").open(encoding="utf-8"))
    assert "from stdin as UTF-8 text" in run("generate", tiny_gemma3)[2]


def test_a_chat_template_that_is_no_utf_8_is_refused(run, tiny_gemma3, tmp_path):
    (tmp_path / "template.jinja").write_bytes("Grüße".encode("latin-1"))
    code, _, err = run("chat", tiny_gemma3, "--chat-template", tmp_path / "template.jinja")
    assert code == 2
    assert "can't be read as UTF-8 text" in err


def test_plan_shows_layers_and_groups_from_a_config_alone(run, tiny_gemma3):
    code, out, _ = run("plan", tiny_gemma3 / "config.json", "--memory", "1MiB")
    assert code == 0
    assert "last 8" in out
    assert "2: 1, 3" in out
    assert "One request can be 256 tokens long" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "hi"], "error: nowhere"),
        (["generate", "MODEL", "hi", "--top-p", "2"], "error: top_p is 2.0, must be above 0"),
        (["generate", "MODEL", "x" * 300], "error: the prompt has 300 tokens, max_model_len is 256"),
        (["generate", "MODEL", "hi", "--file", "nofile"], "error: the prompts can't be read"),
        (["generate", "MODEL", "hi", "--memory", "much"], "error: 'much' is no size"),
        (["plan", "MODEL", "--max-model-len", "999"], "error: max_model_len is 999, the model reaches 256"),
        (["chat", "MODEL"], "error: this checkpoint has no chat template"),
    ],
    ids=["model", "parameter", "length", "file", "memory", "plan", "chat"],
)
def test_the_callers_mistakes_are_one_line_and_exit_code_2(run, tiny_gemma3, arguments, message):
    code, _, err = run(*[tiny_gemma3 if argument == "MODEL" else argument for argument in arguments])
    assert code == 2
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "chat", "eval", "serve"])
def test_each_command_that_computes_can_ask_for_the_same_bits(run, tiny_gemma3, monkeypatch, command):
    monkeypatch.setattr(native, "prepare", lambda: {"attention": False})  # where exact engines refuse to start
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    code, _, err = run(command, tiny_gemma3, "--exact", "--memory", "1MiB")
    assert code == 2
    assert "attention would run on torch alone" in err


def test_a_prompt_is_asked_for_when_there_is_none(run, tiny_gemma3, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("generate", tiny_gemma3)[0] == 2


def test_our_mistakes_exit_with_1(run, tiny_gemma3, monkeypatch):
    def die(*arguments):
        raise EngineDeadError("a step failed")

    monkeypatch.setattr(LLM, "stream", die)
    code, _, err = run("generate", tiny_gemma3, "hi", *FEW)
    assert (code, err) == (1, "error: a step failed\n")


def test_chat_shows_square_brackets_of_an_error_as_they_are(run, tiny_gemma3, tmp_path, monkeypatch):
    lines = iter(["hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    template = TEMPLATE + "{% if messages[-1].content == 'hi' %}{{ raise_exception('no [/red] here') }}{% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    code, _, err = run("chat", tiny_gemma3, "--chat-template", tmp_path / "template.jinja", "--memory", "1MiB")
    assert code == 0
    assert "no [/red] here" in err


def test_chat_answers_line_by_line_until_exit(run, tiny_gemma3, tmp_path, monkeypatch):
    lines = iter(["hi", "/reset", "", "hi", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    arguments = ["--chat-template", tmp_path / "template.jinja", "--memory", "1MiB", "--max-tokens", "3"]
    code, _, err = run("chat", tiny_gemma3, *arguments, "--temperature", "0")
    assert code == 0
    assert err.count("prompt: 9 =") == 2
    assert "9 = 0 hit" in err
    assert next(lines) == "never read"


def test_generate_answers_what_a_schema_or_a_regex_asks_for(run, tiny_gemma3, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    options = ["--max-tokens", "9", "--memory", "1MiB"]
    assert run("generate", tiny_gemma3, "hello", "--json-schema", file, *options)[1] in ('"yes"\n', '"no"\n')
    assert run("generate", tiny_gemma3, "hello", "--regex", "(yes|no)!", *options)[1] in ("yes!\n", "no!\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "("], "unclosed group"),
        (["--json-schema", "missing.json"], "the JSON schema can't be read"),
        (["--json-schema", "missing.json", "--regex", "a"], "--json-schema and --regex are both given"),
    ],
    ids=["regex", "file", "both"],
)
def test_a_wrong_schema_or_regex_is_the_callers_mistake(run, tiny_gemma3, options, message):
    code, _, err = run("generate", tiny_gemma3, "hello", "--memory", "1MiB", *options)
    assert code == 2
    assert message in err


def test_the_tiny_hybrid_is_used_where_no_model_is_named(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The prince"))
    code, out, err = run("generate", *FEW)
    assert (code, err.count("4 tokens")) == (0, 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The prince"))
    assert run("generate", "tiny-hybrid", *FEW)[1] == out
    assert "jamba" in run("plan", "--memory", "4MiB")[1]


def test_a_lone_prompt_is_told_to_stand_behind_the_model(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    code, _, err = run("generate", "What is the code of Belora?")
    assert code == 2
    assert "hybrid-engine generate tiny-hybrid PROMPT" in err
