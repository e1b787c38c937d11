"""The journal: what is written stays, what was cut short doesn't count, what doesn't belong is refused."""

from __future__ import annotations

import sys

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.journal import Journal

SETTINGS = {"seed": 1, "lengths": (10, 20)}


def record(key: str) -> dict:
    return {"key": key, "score": 1.0}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "new folder" / "run.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add([record("a"), record("b")])
    return path


def test_records_are_found_again(path):
    with Journal(path, SETTINGS) as journal:
        assert (list(journal.records), journal.num_found) == (["a", "b"], 2)
        journal.add([record("c")])
        assert journal.num_found == 2
    assert len(path.read_text().splitlines()) == 4


def test_a_record_is_on_disk_before_the_journal_is_closed(path):
    with Journal(path, SETTINGS) as journal:
        journal.add([record("c")])
        assert '"c"' in path.read_text()


def test_a_line_that_a_kill_has_cut_short_is_removed(path):
    path.write_bytes(path.read_bytes() + b'{"key": "c", "sco')
    with Journal(path, SETTINGS) as journal:
        assert list(journal.records) == ["a", "b"]
        journal.add([record("d")])
    with Journal(path, SETTINGS) as journal:
        assert list(journal.records) == ["a", "b", "d"]


def test_a_journal_of_other_settings_is_refused_with_the_difference(path):
    with pytest.raises(ConfigError, match=r"was written with seed = 1, now it is 2"):
        Journal(path, SETTINGS | {"seed": 2})


@pytest.mark.parametrize("content", ["a novel\n", '{"key": "a"}\n'], ids=["text", "other JSON"])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "novel.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no journal of an evaluation"):
        Journal(path, SETTINGS)
    assert path.read_text() == content


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked on Windows")
def test_two_evaluations_do_not_write_one_journal(path):
    with Journal(path, SETTINGS), pytest.raises(ConfigError, match="is in use by another evaluation"):
        Journal(path, SETTINGS)


def test_without_a_path_records_are_kept_in_memory():
    with Journal(None, SETTINGS) as journal:
        journal.add([record("a")])
        assert list(journal.records) == ["a"]
