"""`hybrid-engine eval`: reports and pages from the command line; a run that is killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_engine.cli import main
from hybrid_engine.evals.command import parse_lengths
from hybrid_engine.evals.report import read_report

SMALL = ["--tasks", "hops_1", "--lengths", "600", "--samples", "4", "--format", "chat-system", "--memory", "64MiB"]


@pytest.fixture
def run(capsys):
    """Run the command line: the exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_eval_prints_scores_and_writes_a_report_and_a_page(run, tmp_path):
    pytest.importorskip("matplotlib", reason="the evals extra isn't installed: pip install -e '.[evals]'")
    code, out, _ = run("eval", "tiny-hybrid", *SMALL, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert code == 0
    assert "tiny-hybrid: scores with 95 % intervals" in " ".join(out.split())
    assert "4 samples; prompts" in out
    assert read_report(tmp_path / "r.json").num_samples == 4
    code, _, _ = run("eval-page", tmp_path / "r.json", tmp_path / "r.json", "--html", tmp_path / "both.html")
    assert code == 0
    assert "tiny-hybrid" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "needel_map"], "did you mean 'needle_map'"),
        (["--lengths", "1k,two"], "must be numbers of tokens with commas between"),
        (["--lengths", "32"], "give a length of about that or more"),
        (["--answer-tokens", "590"], "the answer may take 590"),
    ],
    ids=" ".join,
)
def test_wrong_use_ends_with_one_line_and_code_2(run, arguments, message):
    code, out, err = run("eval", "tiny-hybrid", *SMALL, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_tasks_are_listed_with_what_they_ask(run):
    code, out, _ = run("eval-tasks")
    assert code == 0
    assert "niah_multikey_3" in out
    assert "facts: facts_1, facts_2, facts_3" in out


@pytest.mark.parametrize(("text", "lengths"), [("1024", [1024]), ("1k, 2K,300", [1024, 2048, 300])])
def test_lengths_are_read_in_tokens_or_k(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_does_no_finished_sample_twice(tmp_path, repository):
    journal, report = tmp_path / "run.jsonl", tmp_path / "report.json"
    num_samples = 80
    command = [sys.executable, "-m", "hybrid_engine.cli", "eval", "tiny-hybrid", *SMALL, "--samples", str(num_samples)]
    command += ["--journal", str(journal), "--json", str(report)]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    with subprocess.Popen(command, cwd=repository, env=environment, stdout=subprocess.DEVNULL) as first:
        while num_lines(journal) < 1 + num_samples // 4:
            assert first.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    left = journal.read_bytes()
    finished = left[: left.rfind(b"\n") + 1]
    num_finished = len(finished.splitlines()) - 1
    assert num_samples // 4 <= num_finished < num_samples
    subprocess.run(command, cwd=repository, env=environment, check=True, stdout=subprocess.DEVNULL)
    whole = journal.read_bytes()
    assert whole.startswith(finished)
    keys = [json.loads(line)["key"] for line in whole.splitlines()[1:]]
    assert len(keys) == len(set(keys)) == num_samples
    assert (read_report(report).num_samples, read_report(report).num_resumed) == (num_samples, num_finished)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
