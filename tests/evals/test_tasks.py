"""What the tasks ask: of the length that was wanted, answered by the document, the same for the same seed."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.samples import LengthError
from hybrid_engine.evals.tasks import FAMILIES, TASKS, find_tasks
from hybrid_engine.evals.tasks.retrieval import NeedleMap

LENGTH = 2048
SLACK = {"qa_1": 170, "qa_2": 170, "niah_multikey_3": 110, "niah_single_3": 60, "facts_1": 60, "facts_2": 60}
"""Tokens of the largest unit of filler, where it is more than a long sentence."""
ASKS = [name for name in TASKS if name != "perplexity"]


@pytest.fixture(scope="module")
def groups(builder):
    return {name: task.make_group(builder, LENGTH, 1) for name, task in TASKS.items()}


def size(builder, sample) -> int:
    return len(builder.prompts.render(sample)) + sample.max_tokens


@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_take_the_length_that_was_asked_for_and_no_more(builder, groups, name):
    largest = max(size(builder, sample) for sample in groups[name])
    assert LENGTH - max(120, SLACK.get(name, 0)) <= largest <= LENGTH


@pytest.mark.parametrize("name", TASKS)
def test_a_group_has_one_document_and_the_indexes_of_its_number(groups, name):
    assert [sample.index for sample in groups[name]] == list(TASKS[name].indexes(1))
    assert len({sample.document for sample in groups[name]}) == 1


@pytest.mark.parametrize("name", ASKS)
def test_every_answer_stands_in_the_document(groups, name):
    for sample in groups[name]:
        assert sample.references
        assert all(reference in sample.document for reference in sample.references)


@pytest.mark.parametrize("name", ["niah_multiquery", "vt", "fwe", "qa_2", "recall", "hops_2", "passkey"])
def test_the_same_seed_makes_the_same_samples_and_another_makes_others(make_builder, name):
    first, again, other = (TASKS[name].make_group(make_builder(seed=seed), LENGTH, 0) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_an_answers_budget_takes_its_room_from_the_document(make_builder):
    group = TASKS["passkey"].make_group(make_builder(max_tokens=500), LENGTH, 0)
    assert group[0].max_tokens == 500
    assert LENGTH - 60 <= size(make_builder(), group[0]) <= LENGTH


# RULER: the published prompts


def test_a_single_needle_is_asked_for_in_the_singular(groups):
    (sample,) = groups["niah_single_1"]
    start = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
        "again.\nThe grass"
    )
    assert sample.document.startswith(start)
    key = re.search(r"One of the special magic numbers for (\S+) is: (\d{7})\.", sample.document)
    assert sample.references == (key[2],)
    assert sample.question == f"\nWhat is the special magic number for {key[1]} mentioned in the provided text?"
    assert sample.answer_prefix == f" The special magic number for {key[1]} mentioned in the provided text is"


def test_several_needles_are_asked_for_in_the_plural(groups):
    (sample,) = groups["niah_multiquery"]
    assert sample.document.startswith("Some special magic numbers are hidden within the following text.")
    found = dict(re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", sample.document))
    query = re.fullmatch(r"\nWhat are all the special magic numbers for (.+) mentioned in .*", sample.question)[1]
    assert [found[key] for key in re.split(r", (?:and )?", query)] == list(sample.references)
    assert sample.answer_prefix.endswith("mentioned in the provided text are")


@pytest.mark.parametrize(("name", "count"), [("niah_multikey_1", 4), ("niah_multivalue", 4), ("niah_single_2", 1)])
def test_needles_in_prose_are_as_many_as_the_paper_says(groups, name, count):
    assert groups[name][0].document.count("One of the special magic numbers for") == count


def test_a_haystack_of_needles_is_nothing_but_needles_of_the_same_kind(groups):
    (sample,) = groups["niah_multikey_3"]
    uuid = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    lines = sample.document.split("\n")[1:]
    assert len(lines) > 5
    assert all(re.fullmatch(f"One of the special magic uuids for {uuid} is: {uuid}\\.", line) for line in lines)


def test_variables_are_those_that_got_the_value_over_four_assignments(groups):
    (sample,) = groups["vt"]
    example, text = sample.document.rsplit("Memorize and track", 1)
    value = re.search(r"assigned the value (\d{5}) in the text above", sample.question)[1]
    names = [re.search(rf"VAR (\w{{5}}) = {value}", text)[1]]
    while following := re.search(rf"VAR (\w{{5}}) = VAR {names[-1]}", text):
        names.append(following[1])
    assert tuple(names) == sample.references
    assert sample.answer_prefix.endswith(f" 5 variables are assigned the value {value}, they are: ")
    solved = re.search(r"they are:  (\w{3}) (\w{3}) (\w{3}) (\w{3}) (\w{3})\n", example)
    assert re.search(rf"VAR {solved[2]} = VAR {solved[1]}", example)


@pytest.mark.parametrize(("length", "common", "other"), [(LENGTH, 6, 1), (6000, 30, 3)], ids=["short", "long"])
def test_common_words_stand_as_often_as_the_paper_says(builder, length, common, other):
    (sample,) = TASKS["cwe"].make_group(builder, length, 0)
    listed = sample.document.rsplit("most often.\n", 1)[1]
    words = Counter(re.findall(r"\d+\. (\D+?)(?= \d+\.|$)", listed))
    assert {word for word, count in words.items() if count == common} == set(sample.references)
    assert set(words.values()) <= {common, other}


def test_the_most_frequent_coded_words_are_those_behind_the_dots(groups):
    (sample,) = groups["fwe"]
    counts = Counter(sample.document.split("coded words. ")[1].split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *sample.references]
    first, second = (counts[word] for word in sample.references[:2])
    assert first / second == pytest.approx((3 / 2) ** 2, rel=0.3)  # a zeta distribution's, alpha 2


def test_the_documents_that_a_question_needs_are_among_those_given(builder):
    (sample,) = TASKS["qa_2"].make_group(builder, LENGTH, 5)
    asked = builder.texts.two_hop.questions[5]
    assert all(builder.texts.two_hop.documents[which] in sample.document for which in asked.documents)
    assert asked.text in sample.question


# Our own


def test_people_are_where_they_went_last(groups):
    for sample in groups["facts_1"]:
        person = re.fullmatch(r"\nWhere is (\w+)\?", sample.question)[1]
        went = re.findall(rf"{person} (?:went|walked|hurried|returned) to the (\w+)\.", sample.document)
        assert sample.references == (went[-1],)


def test_things_are_where_they_were_carried(groups):
    for now, before in zip(groups["facts_2"], groups["facts_3"], strict=True):
        thing = re.search(r"Where is the (\w+)\?", now.question)[1]
        person = re.search(rf"(\w+) took the {thing} there", now.document)[1]
        after = now.document.split(f"took the {thing} there.")[1].split(f"{person} put the {thing} down.")[0]
        carried = re.findall(rf"{person} (?:went|walked|hurried|returned) to the (\w+)\.", after)
        assert (now.references, before.references) == ((carried[-1],), (carried[-2],))


@pytest.mark.parametrize("num_hops", [1, 2, 3, 4])
def test_a_chain_of_keepers_ends_at_the_answer(groups, num_hops):
    for sample in groups[f"hops_{num_hops}"]:
        keepers = dict(re.findall(r"The keeper of (\w+) is (\w+)\.", sample.document))
        name = sample.question.rstrip("?").split()[-1]
        for _ in range(sample.question.count("the keeper of")):
            name = keepers[name]
        assert (sample.question.count("the keeper of"), sample.references) == (num_hops, (name,))


def test_a_needle_stands_at_its_depth(builder):
    samples = [NeedleMap(5).make_group(builder, LENGTH, number)[0] for number in range(5)]
    found = [sample.document.index(sample.references[0]) / len(sample.document) for sample in samples]
    assert [sample.depth for sample in samples] == [0, 0.25, 0.5, 0.75, 1]
    assert found == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.06)  # half of a long sentence


def test_a_needle_map_asks_each_depth_equally_often():
    assert list(NeedleMap(3).batches([10, 20], 4)) == [
        [(10, 0), (10, 1), (10, 2), (20, 0), (20, 1), (20, 2)],
        [(10, 3), (10, 4), (10, 5), (20, 3), (20, 4), (20, 5)],
    ]


# Wrong use


@pytest.mark.parametrize(("name", "length"), [("niah_multikey_3", 300), ("cwe", 400), ("vt", 500), ("recall", 300)])
def test_a_length_below_what_a_task_needs_is_refused_with_what_it_needs(builder, name, length):
    with pytest.raises(LengthError, match=f"{name} at length {length}: its shortest prompt has") as refused:
        TASKS[name].make_group(builder, length, 0)
    needed = int(re.search(r"together ([\d,]+): give", str(refused.value))[1].replace(",", ""))
    # Another length draws other words and other prose.
    assert TASKS[name].make_group(builder, needed * 5 // 4, 0)


def test_a_text_that_is_too_short_for_the_length_is_refused(builder):
    with pytest.raises(LengthError, match=r"perplexity at length 2,048: the text has [\d,]+ tokens, window 900 ends"):
        TASKS["perplexity"].make_group(builder, LENGTH, 900)


@pytest.mark.parametrize(
    ("wanted", "match"), [(["niah_singel_1"], "did you mean 'niah_single_1'"), (["x"], "there are"), ([], "empty")]
)
def test_an_unknown_task_is_refused_with_what_there_is(wanted, match):
    with pytest.raises(ConfigError, match=match):
        find_tasks(wanted)


def test_a_family_stands_for_its_tasks_and_none_comes_twice():
    assert [task.name for task in find_tasks(["hops_2", "hops"])] == ["hops_2", "hops_1", "hops_3", "hops_4"]
    assert len(FAMILIES["ruler"]) == 13
