"""Texts of the reader's own: read in the forms in which they are published, refused with a reason otherwise."""

from __future__ import annotations

import json

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.tasks import TASKS
from hybrid_engine.evals.texts import Texts, split_sentences

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Lions sleep.",
                    "qas": [
                        {"question": "Who sleeps?", "answers": [{"text": "Lions"}, {"text": "The lions"}]},
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                },
                {"context": "Bears swim.", "qas": [{"question": "Who swims?", "answers": [{"text": "Bears"}]}]},
            ]
        }
    ]
}
HOTPOTQA = [{"question": "Who?", "answer": "Ann", "context": [["A", ["Ann ", "was."]], ["B", ["Bob."]]]}]


@pytest.fixture
def write(tmp_path):
    def write(content, name="text"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_squad_gives_its_answerable_questions_with_their_paragraphs(write):
    known = Texts(squad=write(SQUAD)).single_hop
    assert known.documents == ["Bears swim.", "Lions sleep."]
    assert [(asked.text, asked.answers, asked.documents, asked.related) for asked in known.questions] == [
        ("Who sleeps?", ("Lions", "The lions"), (1,), (0,)),
        ("Who swims?", ("Bears",), (0,), (1,)),
    ]


def test_hotpotqa_gives_questions_with_all_their_articles(write):
    known = Texts(hotpotqa=write(HOTPOTQA)).two_hop
    assert known.documents == ["A\nAnn was.", "B\nBob."]
    assert known.questions[0].documents == (0, 1)


@pytest.mark.parametrize("content", ["no JSON", {"data": [{}]}, []], ids=["text", "other keys", "a list"])
def test_a_file_of_another_form_is_refused(write, content):
    with pytest.raises(ConfigError, match=r"squad is .*, which (is no JSON|doesn't have SQuAD's form)"):
        _ = Texts(squad=write(content)).single_hop


@pytest.mark.parametrize("content", ["", " \n"], ids=["nothing", "spaces"])
def test_an_empty_essay_is_refused(write, content):
    with pytest.raises(ConfigError, match="which is empty: give a text"):
        _ = Texts(essay=write(content)).essay_words


def test_the_report_names_a_text_by_its_content_and_says_what_came_along(write):
    sources = Texts(essay=write("Some prose.", "mine.txt")).sources()
    assert sources["essay"].startswith("mine.txt, SHA-256 ")
    assert sources["qa_1"] == "made-up articles, one question each, come along"


def test_an_essay_of_ones_own_becomes_the_haystack(write, builder, monkeypatch):
    monkeypatch.setattr(builder, "texts", Texts(essay=write("Every word here is mine. " * 50)))
    (sample,) = TASKS["niah_single_2"].make_group(builder, 600, 9)
    assert "Every word here is mine. Every word here is mine." in sample.document


def test_without_wonderwords_a_task_that_needs_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hybrid-engine\[evals\]'"):
        _ = Texts().common_words


def test_words_of_ones_own_serve_where_the_common_ones_are_too_few(write, builder, monkeypatch):
    texts = Texts(words=write("\n".join(f"word{i}" for i in range(300))))
    # A cached property of a frozen object: what stands in its dictionary counts.
    vars(texts)["common_words"] = [f"few{i}" for i in range(20)]
    monkeypatch.setattr(builder, "texts", texts)
    (sample,) = TASKS["cwe"].make_group(builder, 2000, 0)
    assert all(word.startswith("word") for word in sample.references)


def test_sentences_end_where_a_capital_letter_follows():
    assert split_sentences('He came at 3.5 p.m. sharp. "Why?" "Why not?" she asked! No answer.') == [
        "He came at 3.5 p.m. sharp.",
        '"Why?"',
        '"Why not?" she asked!',
        "No answer.",
    ]
