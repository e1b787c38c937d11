from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_engine.bench.rendering import ANSWER_TOKEN_ID, Renderer, load_encoder, renderer_maker
from hybrid_engine.bench.traces import BlockCall, MessageCall, read_trace
from hybrid_engine.errors import CheckpointError, ConfigError, TraceError


@pytest.fixture
def renderer():
    return Renderer(load_encoder(None))


def blocks(num_tokens: int, *runs: tuple[int, int], scope: str = "") -> BlockCall:
    return BlockCall("s", scope, num_tokens, 4, runs, 16)


def test_the_next_turn_goes_on_from_the_prompt_and_the_answer(renderer, conversations):
    first, second, *_ = map(renderer.render, read_trace(conversations))
    known = [*first.prompt_token_ids, *first.answer_token_ids]
    assert second.prompt_token_ids[: len(known)] == known


def test_messages_end_where_the_next_one_begins(renderer, conversations):
    first = renderer.render(read_trace(conversations)[0])
    text = bytes(first.prompt_token_ids).decode()
    starts = [text.index("<|user|>"), text.index("<|assistant|>")]
    assert list(first.message_boundaries) == starts


def test_what_a_message_holds_beside_its_text_is_seen(renderer):
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "book"}]}
    rendered = renderer.render(MessageCall("s", (message,), {"role": "assistant", "content": "x"}))
    assert b'<|assistant|>\n\n{"tool_calls": [{"name": "book"}]}<|end|>\n' in bytes(rendered.prompt_token_ids)


def test_a_replaced_assistant_parts_from_what_was_generated_at_its_first_token(conversations):
    renderer = Renderer(load_encoder(None), replaces_assistant=True)
    first, second, *_ = map(renderer.render, read_trace(conversations))
    num_prompt = len(first.prompt_token_ids)
    assert second.prompt_token_ids[:num_prompt] == first.prompt_token_ids
    assert second.prompt_token_ids[num_prompt] != first.answer_token_ids[0]
    assert b"On Monday at nine" in bytes(first.answer_token_ids)
    assert b"(edited) " in bytes(second.prompt_token_ids)


def test_equal_blocks_are_equal_tokens_in_one_scope_only(renderer):
    one, same, other = (renderer.render(blocks(32, (3, 2), scope=scope)) for scope in ("a", "a", "b"))
    assert one.prompt_token_ids == same.prompt_token_ids
    assert not set(one.prompt_token_ids) & set(other.prompt_token_ids)


def test_a_last_block_is_cut_at_the_prompts_end(renderer):
    whole, cut = renderer.render(blocks(32, (3, 2))), renderer.render(blocks(20, (3, 2)))
    assert cut.prompt_token_ids == whole.prompt_token_ids[:20]


def test_what_no_block_covers_never_comes_again(renderer):
    one, two = (renderer.render(blocks(20, (3, 1))).prompt_token_ids for _ in range(2))
    assert (len(one), one[:16]) == (20, two[:16])
    assert not set(one[16:]) & set(two[16:])


def test_unknown_answers_are_in_no_prompt(renderer):
    rendered = renderer.render(blocks(40, (0, 2)))
    assert rendered.answer_token_ids == [ANSWER_TOKEN_ID] * 4
    assert ANSWER_TOKEN_ID not in rendered.prompt_token_ids


@pytest.fixture
def template(tmp_path) -> Path:
    """A chat template that closes each message, and invites to answer."""
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of single bytes, on disk."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(folder)
    return folder


def test_a_chat_template_renders_whole_prompts_and_what_the_answer_adds(tokenizer, template):
    renderer = renderer_maker(tokenizer, template)()
    encode = load_encoder(tokenizer)
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})
    rendered = renderer.render(MessageCall("s", messages, {"role": "assistant", "content": "ok"}))
    assert rendered.prompt_token_ids == encode("user: hi\nassistant: yes\nassistant: ")
    assert list(rendered.answer_token_ids) == encode("ok\n")
    assert list(rendered.message_boundaries) == [len("user: hi\n"), len("user: hi\nassistant: yes\n")]


def test_messages_that_a_template_refuses_are_named(tokenizer, tmp_path):
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('no tools here') }}")
    call = MessageCall("s", ({"role": "tool", "content": "x"},), {"role": "assistant", "content": "x"})
    with pytest.raises(TraceError, match="session s: the chat template refused the messages: no tools here"):
        renderer_maker(tokenizer, tmp_path / "refusing.jinja")().render(call)


def test_a_template_wants_a_tokenizer_and_a_file(tokenizer, template, tmp_path):
    with pytest.raises(ConfigError, match="a chat template without a tokenizer"):
        renderer_maker(None, template)
    with pytest.raises(ConfigError, match="can't be read as UTF-8 text"):
        renderer_maker(tokenizer, tmp_path / "none.jinja")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_encoder(tmp_path)
