import jinja2
import pytest

from hybrid_engine.errors import ChatTemplateError
from hybrid_engine.llm import LLM
from hybrid_engine.message_boundaries import message_ends, token_positions

MESSAGES = ["sys.", "hello?", "hi!"]


def render(count: int) -> str:
    return "".join(MESSAGES[:count])


def test_each_message_that_the_whole_text_starts_with_has_an_end():
    assert message_ends(render, 3, render(3) + "answer:") == [4, 10, 13]


def test_a_shorter_conversation_that_is_rendered_differently_has_none():
    assert message_ends(lambda count: render(count) + ("" if count == 3 else "<end>"), 3, render(3)) == [13]


def test_a_template_may_refuse_a_shorter_conversation():
    def refusing(count: int) -> str:
        if count == 1:
            raise jinja2.TemplateError("a user must speak first")
        return render(count)

    assert message_ends(refusing, 3, render(3)) == [10, 13]


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
