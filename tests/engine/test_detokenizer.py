import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from hybrid_engine.detokenizer import MAX_HELD_BYTES, Detokenizer, StopStrings, TextStream, fast_tokenizer
from hybrid_engine.errors import CheckpointError

SPECIAL, A, SPACE_B, SPACE = 256, 257, 258, 259


def make_spaced_tokenizer() -> Tokenizer:
    """Llama's kind: a word's space belongs to the word, a text's first space is dropped, unknown text is bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<s>": SPECIAL, "a": A, "▁b": SPACE_B, "▁": SPACE}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


SPACED = make_spaced_tokenizer()


def stream(token_ids, *, prompt=(), skip_special_tokens=True):
    """What each token released, and what the end did."""
    text_stream = TextStream(SPACED, prompt, skip_special_tokens=skip_special_tokens)
    return [*map(text_stream.add, token_ids), text_stream.flush()]


def test_a_first_space_stays_after_a_prompt_with_text():
    assert stream([SPACE_B, A], prompt=[SPECIAL, A]) == [" b", "a", ""]


def test_a_first_space_goes_after_a_prompt_without_text():
    assert stream([SPACE_B, A], prompt=[SPECIAL]) == ["b", "a", ""]


def test_bytes_are_held_until_their_character_is_whole():
    assert stream([A, 0xE2, 0x82, 0xAC, A]) == ["a", "", "", "€", "a", ""]


def test_bytes_that_never_become_a_character_come_out_at_the_end():
    assert stream([A, 0xE2, 0x82]) == ["a", "", "", "��"]


def test_a_character_that_the_prompt_began_is_released_whole_and_without_the_prompts_text():
    assert stream([0xAC, SPACE_B], prompt=[A, 0xE2, 0x82]) == ["€", " b", ""]


def test_a_prompt_that_ends_in_a_broken_character_is_not_repeated():
    assert "".join(stream([A, A], prompt=[A, 0xFF])) == "aa"


def test_a_byte_that_spoils_the_run_before_it_does_not_end_the_stream():
    assert "".join(stream([0xE2, 0x82, 0xAC, 0xFF, A, SPACE_B])) == "€�a b"


def test_a_long_run_of_broken_bytes_is_released_before_the_end():
    released = stream([0xFF] * (MAX_HELD_BYTES + 1))
    assert released[-2:] == ["�" * (MAX_HELD_BYTES + 1), ""]


@pytest.mark.parametrize(("skips", "text"), [(True, "aa"), (False, "a<s>a")])
def test_special_tokens_are_text_only_where_asked(skips, text):
    assert "".join(stream([A, SPECIAL, A], skip_special_tokens=skips)) == text


@given(st.lists(st.sampled_from([A, SPACE_B, SPACE, SPECIAL, *"é€🙂".encode()]), max_size=40))
def test_no_release_ends_within_a_character_and_the_stream_never_fails(token_ids):
    released = stream(token_ids, prompt=[A])
    assert not any(text.endswith("�") and len(text) <= MAX_HELD_BYTES for text in released[:-1])


# A replacement character that is really meant can't be told from broken bytes.
MEANT = st.characters(exclude_characters="�", codec="utf-8")


@given(st.text(MEANT, max_size=30), st.text(MEANT, max_size=10))
def test_released_text_joins_to_the_whole_text(prompt, answer):
    answer_ids = list(answer.encode())
    assert "".join(stream(answer_ids, prompt=list(("x" + prompt).encode()))) == answer


def feed(pieces, stops, **options):
    """The text released in all, and the stop string found."""
    matcher = StopStrings(stops, **options)
    text = ""
    for piece in pieces:
        released, stop = matcher.add(piece)
        text += released
        if stop is not None:
            return text, stop
    return text + matcher.flush(), None


def test_text_is_held_while_it_may_become_a_stop_string():
    matcher = StopStrings(["END"])
    assert [matcher.add(piece) for piece in ["xE", "N", "x", "E"]] == [
        ("x", None),
        ("", None),
        ("ENx", None),
        ("", None),
    ]
    assert matcher.flush() == "E"


def test_a_stop_string_is_found_across_pieces_and_cut():
    assert feed(["ab\n", "\nQ", ": what"], ["\n\nQ:"]) == ("ab", "\n\nQ:")


def test_a_stop_string_can_be_part_of_the_text():
    assert feed(["ab.", "cd"], ["."], include_in_text=True) == ("ab.", ".")


def test_of_two_stop_strings_the_first_to_be_complete_wins():
    assert feed(["abcd"], ["abcd", "bc"]) == ("a", "bc")


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_how_a_text_is_cut_into_pieces_changes_nothing(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert feed(pieces, stops) == feed([text], stops)


def test_a_stop_string_below_min_tokens_is_text():
    detokenizer = Detokenizer(TextStream(SPACED, [A], skip_special_tokens=True), StopStrings(["aa"]), min_tokens=3)
    assert [detokenizer.add(A) for _ in range(4)] == [("", None), ("a", None), ("", "aa"), ("", None)]


def test_a_stop_string_can_turn_up_in_the_text_held_to_the_end():
    detokenizer = Detokenizer(TextStream(SPACED, [A], skip_special_tokens=True), StopStrings(["�"]))
    assert detokenizer.add(0xE2) == ("", None)
    assert detokenizer.finish() == ("", "�")


def test_a_tokenizer_that_cant_stream_is_refused():
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        fast_tokenizer(object())
