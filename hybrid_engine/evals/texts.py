"""What documents are made of: the reader's own texts where given, else what comes along."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.articles import made_up_articles

DEFAULT_ESSAY = Path(__file__).parent / "data" / "emma.txt.xz"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's filler (arXiv 2404.06654), first used with passkeys (arXiv 2305.16300)."""
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')]))\s+(?=["'(]*[A-Z])""")


@dataclass(frozen=True)
class Question:
    """A question about some of the documents of a set."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    """Those that the answer needs."""
    related: tuple[int, ...] = ()
    """Those that are added first where there is room."""


@dataclass(frozen=True)
class QuestionSet:
    """Documents and questions about them."""

    documents: list[str]
    questions: list[Question]


@dataclass(frozen=True)
class Texts:
    """The texts of an evaluation; None: the one that comes along."""

    essay: Path | None = None
    """Long prose, as UTF-8 text: the haystack."""
    squad: Path | None = None
    """Questions on one document each, as SQuAD's JSON."""
    hotpotqa: Path | None = None
    """Questions on two documents each, as HotpotQA's JSON (distractor setting)."""
    words: Path | None = None
    """Words, one a line: where a task needs more than the wonderwords package has."""

    def sources(self) -> dict[str, str]:
        """Say what the texts are, for the report."""
        return {
            "essay": _describe(self.essay, "Jane Austen, Emma (public domain), comes along"),
            "qa_1": _describe(self.squad, "made-up articles, one question each, come along"),
            "qa_2": _describe(self.hotpotqa, "made-up articles, questions on two of them, come along"),
            "words": _describe(self.words, "the wonderwords package"),
        }

    @cached_property
    def essay_words(self) -> list[str]:
        """The haystack, word by word."""
        return re.sub(r"\s+", " ", self.essay_text).strip().split(" ")

    @cached_property
    def essay_sentences(self) -> list[str]:
        """The haystack, sentence by sentence."""
        return split_sentences(re.sub(r"\s+", " ", self.essay_text).strip())

    @cached_property
    def essay_text(self) -> str:
        """The haystack."""
        if self.essay is None:
            return lzma.decompress(DEFAULT_ESSAY.read_bytes()).decode()
        return _read("essay", self.essay)

    @cached_property
    def nouns_and_adjectives(self) -> tuple[list[str], list[str]]:
        """The words that keys are put together from."""
        return _wonderwords("noun"), _wonderwords("adjective")

    @cached_property
    def common_words(self) -> list[str]:
        """Words to count, no word twice."""
        return sorted({*_wonderwords("noun"), *_wonderwords("adjective"), *_wonderwords("verb")})

    @cached_property
    def more_words(self) -> list[str]:
        """Words to count where the common ones are too few; empty where no file was given."""
        return [] if self.words is None else sorted(set(_read("words", self.words).split()))

    @cached_property
    def single_hop(self) -> QuestionSet:
        """Questions on one document each."""
        return made_up_questions(num_hops=1) if self.squad is None else _read_squad(self.squad)

    @cached_property
    def two_hop(self) -> QuestionSet:
        """Questions on two documents each."""
        return made_up_questions(num_hops=2) if self.hotpotqa is None else _read_hotpotqa(self.hotpotqa)


def split_sentences(text: str) -> list[str]:
    """Cut a text behind full stops, question and exclamation marks that a capital letter follows."""
    return SENTENCE_END.split(text)


def made_up_questions(*, num_hops: int) -> QuestionSet:
    """Return questions on articles about towns and people that don't exist."""
    documents, asked = made_up_articles(num_hops=num_hops)
    return QuestionSet(documents, [Question(text, (answer,), needed) for text, answer, needed in asked])


def _describe(path: Path | None, default: str) -> str:
    if path is None:
        return default
    if not path.is_file():
        raise ConfigError(f"the text {path} doesn't exist: give the path of a file")
    with path.open("rb") as file:
        return f"{path.name}, SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def _read(name: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} can't be read from {path} as UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"{name} is {path}, which is empty: give a text")
    return text


def _read_json(name: str, path: Path) -> Any:
    try:
        return json.loads(_read(name, path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is {path}, which is no JSON: {error}") from error


def _wonderwords(kind: str) -> list[str]:
    found = importlib.util.find_spec("wonderwords")
    if found is None or found.origin is None:
        raise ConfigError("this task takes its words from the wonderwords package: pip install 'hybrid-engine[evals]'")
    lines = (Path(found.origin).parent / "assets" / f"{kind}list.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line]


def _read_squad(path: Path) -> QuestionSet:
    try:
        articles = [article["paragraphs"] for article in _read_json("squad", path)["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        index = {document: i for i, document in enumerate(documents)}
        questions = []
        for article in articles:
            ids = [index[paragraph["context"]] for paragraph in article]
            for paragraph, own in zip(article, ids, strict=True):
                related = tuple(i for i in ids if i != own)
                for asked in paragraph["qas"]:
                    if not asked.get("is_impossible"):
                        answers = tuple(answer["text"] for answer in asked["answers"])
                        questions.append(Question(asked["question"], answers, (own,), related))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"squad is {path}, which doesn't have SQuAD's form: {error!r}") from error
    return QuestionSet(documents, questions)


def _read_hotpotqa(path: Path) -> QuestionSet:
    try:
        rows = _read_json("hotpotqa", path)
        texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in rows]
        documents = sorted({text for row in texts for text in row})
        index = {document: i for i, document in enumerate(documents)}
        questions = [
            Question(row["question"], (row["answer"],), tuple(index[text] for text in own))
            for row, own in zip(rows, texts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"hotpotqa is {path}, which doesn't have HotpotQA's form: {error!r}") from error
    return QuestionSet(documents, questions)
