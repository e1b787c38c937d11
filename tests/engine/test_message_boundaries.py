import jinja2
import pytest

from hybrid_engine.errors import ChatTemplateError
from hybrid_engine.llm import LLM
from hybrid_engine.message_boundaries import MessageEnds, token_positions

TEXTS = ["sys.", "hello?", "hi!"]
MESSAGES = [{"role": "user", "content": text} for text in TEXTS]


def render(count: int) -> str:
    return "".join(TEXTS[:count])


@pytest.fixture
def counting():
    """A rendering that notes how many messages it was asked for, each time."""

    def counting(count: int) -> str:
        asked.append(count)
        return render(count)

    counting.asked = asked = []
    return counting


def test_each_message_that_the_whole_text_starts_with_has_an_end():
    assert MessageEnds().find(render, MESSAGES, render(3) + "answer:") == [4, 10, 13]


def test_a_shorter_conversation_that_is_rendered_differently_has_none():
    def closing(count: int) -> str:
        return render(count) + ("" if count == 3 else "<end>")

    assert MessageEnds().find(closing, MESSAGES, render(3)) == [13]


def test_a_template_may_refuse_a_shorter_conversation():
    def refusing(count: int) -> str:
        if count == 1:
            raise jinja2.TemplateError("a user must speak first")
        return render(count)

    assert MessageEnds().find(refusing, MESSAGES, render(3)) == [10, 13]


def test_a_later_turn_renders_only_what_is_new(counting):
    ends = MessageEnds()
    assert ends.find(counting, MESSAGES[:2], render(2)) == [4, 10]
    assert ends.find(counting, MESSAGES, render(3)) == [4, 10, 13]
    assert counting.asked == [1, 2, 3]


def test_nothing_is_remembered_for_another_message_or_template(counting):
    ends = MessageEnds()
    ends.find(counting, MESSAGES[:1], render(1), template="a")
    ends.find(counting, MESSAGES[:1], render(1), template="b")
    ends.find(counting, [{"role": "system", "content": TEXTS[0]}], render(1), template="a")
    assert counting.asked == [1, 1, 1]


def test_what_is_remembered_is_rendered_again_where_the_text_differs():
    day = "Monday: "
    ends = MessageEnds()

    def dated(count: int) -> str:
        return day + render(count)

    assert ends.find(dated, MESSAGES, dated(3)) == [12, 18, 21]
    day = "Sunday. "
    assert ends.find(dated, MESSAGES, dated(3)) == [12, 18, 21]
    assert ends.find(dated, MESSAGES, render(3)) == []


def test_messages_that_hold_objects_are_rendered_each_time(counting):
    ends = MessageEnds()
    messages = [MESSAGES[0], {"role": "user", "content": object()}, MESSAGES[2]]
    for _ in range(2):
        assert ends.find(counting, messages, render(3)) == [4, 10, 13]
    assert counting.asked == [1, 2, 3, 2, 3]


def test_only_so_much_is_remembered(counting):
    ends = MessageEnds(max_remembered=2)
    ends.find(counting, MESSAGES, render(3))
    ends.find(counting, MESSAGES[:1], render(1))
    assert counting.asked == [1, 2, 3, 1]


@pytest.mark.parametrize(
    ("char_ends", "expected"), [([4, 10], [2, 4]), ([3, 4], [1, 2]), ([1], []), ([10, 10, 12], [4]), ([], [])]
)
def test_a_position_counts_the_tokens_that_lie_wholly_before_it(char_ends, expected):
    assert token_positions(char_ends, [(0, 2), (2, 4), (4, 7), (7, 10)]) == expected


def test_a_template_that_fails_on_its_messages_is_a_template_error(tiny_gemma3):
    llm = LLM(tiny_gemma3, cache_memory_bytes="2MiB")
    parts = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    with pytest.raises(ChatTemplateError, match="refused the messages"):
        llm.chat(parts, chat_template="{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")


def test_chat_tells_the_engine_where_its_messages_end(tiny_gemma3):
    llm = LLM(tiny_gemma3, cache_memory_bytes="2MiB")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    prompt = llm.apply_chat_template(messages, chat_template=template)
    assert prompt["message_boundaries"] == [6, 9]  # one token a byte
    assert len(prompt["prompt_token_ids"]) == 13
