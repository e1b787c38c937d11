"""Grammars over one tokenizer: which tokens may come next, where an answer may end, and where it must."""

import sys

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from hybrid_engine.errors import SamplingParamsError
from hybrid_engine.runner.sampler import Sampler
from hybrid_engine.sampling_params import SamplingParams, StructuredOutputsParams
from hybrid_engine.step_plan import StartedRequest
from hybrid_engine.structured import Grammars
from hybrid_engine.tokenizer import load_tokenizer

EOS, VOCAB_SIZE = 1, 259
NESTED = StructuredOutputsParams(grammar='start: a\na: "a" a "b" | "a" a | "x"\n')


@pytest.fixture
def make(byte_tokenizer):
    def make(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), **options):
        return Grammars(byte_tokenizer.backend_tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids, **options)

    return make


@pytest.fixture
def allowed(byte_tokenizer):
    """The tokens that a state allows, as text."""
    return lambda state: byte_tokenizer.convert_ids_to_tokens(np.flatnonzero(~state.forbidden_V).tolist())


def advance(state, token_ids):
    for token_id in token_ids:
        state.advance(token_id)
    return state


def test_only_tokens_that_go_on_are_allowed(make, allowed, ids):
    state = make().start(StructuredOutputsParams(regex="(ab|cd)e"), [])
    assert allowed(state) == ["a", "c"]
    assert allowed(advance(state, ids("c"))) == ["d"]


def test_an_end_of_text_token_is_allowed_where_the_answer_may_end_and_only_there(make, allowed, ids):
    state = make().start(StructuredOutputsParams(regex="(ab)+"), [])
    assert allowed(advance(state, ids("a"))) == ["b"]
    assert allowed(advance(state, ids("b"))) == ["<eos>", "a"]
    state.advance(EOS)
    assert state.finish_reason == "stop"


def test_all_of_several_end_of_text_tokens_are_allowed_also_one_that_the_tokenizer_does_not_know(make, ids):
    state = make(vocab_size=270, eos_token_ids=(2, EOS, 265)).start(StructuredOutputsParams(regex="a+"), ids("a"))
    assert np.flatnonzero(~state.forbidden_V).tolist() == [1, 2, *ids("a"), 265]


def test_an_answer_that_ignores_end_of_text_ends_only_when_nothing_can_be_added(make, allowed, ids):
    state = make().start(StructuredOutputsParams(regex="(ab){1,2}"), ids("ab"), ignore_eos=True)
    assert allowed(state) == ["a"]
    assert advance(state, ids("ab")).finish_reason == "stop"


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 13])
def test_a_model_without_end_of_text_tokens_ends_when_nothing_can_be_added(make, allowed, ids, vocab_size):
    state = make(vocab_size, eos_token_ids=()).start(StructuredOutputsParams(regex="a{1,3}"), ids("a"))
    assert allowed(state) == ["a"]
    assert len(state.forbidden_V) == vocab_size
    assert advance(state, ids("aa")).finish_reason == "stop"


def test_a_state_that_has_ended_takes_in_what_a_step_under_way_still_samples(make, ids):
    state = make().start(StructuredOutputsParams(choice=["yes"]), ids("yes"))
    assert (state.finish_reason, state.forbidden_V) == ("stop", None)
    state.advance(77)
    assert (state.finish_reason, state.forbidden_V) == ("stop", None)


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(regex="(ab|c[de])+"),
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    ],
    ids=["regex", "json"],
)
def test_a_state_that_starts_anywhere_in_an_answer_is_the_one_that_came_there(make, params):
    grammars, draws = make(), np.random.default_rng(0)
    state, output = grammars.start(params, [], ignore_eos=True), []
    while state.finish_reason is None and len(output) < 60:
        output.append(int(draws.choice(np.flatnonzero(~state.forbidden_V))))
        state.advance(output[-1])
        again = grammars.start(params, output, ignore_eos=True)
        assert np.array_equal(again.forbidden_V, state.forbidden_V)
        assert again.finish_reason == state.finish_reason
    assert len(output) > 5


def test_two_answers_to_one_grammar_do_not_disturb_each_other(make, allowed, ids):
    grammars, params = make(), StructuredOutputsParams(regex="ab|cd")
    first, second = grammars.start(params, []), grammars.start(params, [])
    advance(first, ids("a"))
    assert allowed(second) == ["a", "c"]


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (StructuredOutputsParams(json={"type": "integer"}), "-12"),
        (StructuredOutputsParams(json='{"enum": ["a", 2]}'), "2"),
        (StructuredOutputsParams(json_object=True), '{\n  "a": [1, {}]}'),
        (StructuredOutputsParams(json_object=True, disable_any_whitespace=True), '{"a":[1,{}]}'),
        (StructuredOutputsParams(json_object=True, whitespace_pattern="_"), '{_"a"_:_1_}'),
        (StructuredOutputsParams(regex=r"\d{4}-\w+/é"), "2026-nov/é"),
        (StructuredOutputsParams(choice=["a\nb", 'q"\\', "😀"]), 'q"\\'),
        (StructuredOutputsParams(choice=["a\nb", 'q"\\', "😀"]), "😀"),
        (StructuredOutputsParams(grammar='start: "(" start ")" | "x"'), "((x))"),
        (StructuredOutputsParams(grammar='root ::= "(" root ")" | [0-9]'), "((7))"),
    ],
    ids=str,
)
def test_an_answer_that_matches_is_allowed_and_may_end_there_only(make, ids, params, answer):
    state = make().start(params, [])
    for token_id in ids(answer):
        assert not state.forbidden_V[token_id]
        assert state.forbidden_V[EOS] or params.constraint == "json"
        state.advance(token_id)
    assert state.finish_reason == "stop" or not state.forbidden_V[EOS]


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (StructuredOutputsParams(json={"type": "integer"}), "1."),
        (StructuredOutputsParams(json_object=True), "{" + " " * 33),
        (StructuredOutputsParams(json_object=True, disable_any_whitespace=True), "{ "),
        (StructuredOutputsParams(regex="ab"), "x"),
        (StructuredOutputsParams(choice=["yes"]), "yea"),
    ],
    ids=str,
)
def test_an_answer_is_forbidden_where_it_stops_to_match(make, ids, params, answer):
    *before, last = ids(answer)
    assert make().start(params, before).forbidden_V[last]


def sentencepiece(decoder):
    """A tokenizer that writes spaces as a sign of their own, as Gemma's and Llama's do."""
    pieces = ["<unk>", "</s>", "▁", "a", "▁a", "b"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Metaspace(),
    ],
    ids=["Sequence", "Metaspace"],
)
def test_a_tokenizer_with_a_sign_for_spaces_is_read(decoder):
    grammars = Grammars(sentencepiece(decoder), vocab_size=6, eos_token_ids=(1,))
    state = grammars.start(StructuredOutputsParams(regex="b (a|b)"), [5])
    assert np.flatnonzero(~state.forbidden_V).tolist() == [2, 4]


@pytest.mark.slow
@pytest.mark.real_weights
def test_the_tokenizer_of_the_real_gemma_is_read(real_weights):
    tokenizer = load_tokenizer(real_weights)
    grammars = Grammars(tokenizer.backend_tokenizer, vocab_size=262_144, eos_token_ids=(1, 106))
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    state = grammars.start(StructuredOutputsParams(json=schema), [])
    for token_id in tokenizer('{\n  "name": "Zoë 😀 of the hills",  "age": 33}', add_special_tokens=False)["input_ids"]:
        assert not state.forbidden_V[token_id]
        state.advance(token_id)
    assert state.finish_reason == "stop"


def test_a_tokenizer_that_pads_and_cuts_is_read(byte_tokenizer, ids):
    padded = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    padded.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    padded.enable_truncation(2)
    grammars = Grammars(padded, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
    assert grammars.start(StructuredOutputsParams(choice=["yes"]), ids("yes")).finish_reason == "stop"


def test_a_tokenizer_of_whole_words_is_refused():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(SamplingParamsError, match="can't tell the bytes of its tokenizer's tokens"):
        Grammars(words, vocab_size=2).check(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "("}, r"(?s)structured_outputs.regex is '\(', refused: .*unclosed group"),
        ({"regex": "a(?!b)"}, "look-ahead"),
        ({"regex": "^$"}, "no answer but the empty one"),
        ({"json": {"type": "objct"}}, "Invalid type: objct"),
        ({"json": {"type": "string", "format": "?"}}, "Unknown format"),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"regex": "a{1000000}"}, "too many expressions"),
        ({"grammar": "root = 1"}, "structured_outputs.grammar is 'root = 1', refused"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_and_the_message_says_why(make, params, message):
    with pytest.raises(SamplingParamsError, match=message):
        make().check(StructuredOutputsParams(**params))


def test_a_missing_library_is_named_with_the_extra_that_brings_it(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SamplingParamsError, match=r"pip install 'hybrid-engine\[structured\]'"):
        make().check(StructuredOutputsParams(regex="a"))


def test_a_grammar_that_grows_too_complex_ends_the_answer_with_an_error(make, ids):
    state = make(limits=LLParserLimits(step_max_items=20)).start(NESTED, [])
    advance(state, ids("a" * 30))
    assert state.finish_reason == "error"
    assert "Too many items" in state.failure
    assert "aaa" not in state.failure


def test_an_answer_whose_grammar_fails_at_once_gets_an_end_of_text_token_and_no_other(make, ids):
    state = make(limits=LLParserLimits(step_max_items=20)).start(NESTED, ids("a" * 30))
    assert state.finish_reason == "error"
    assert np.flatnonzero(~state.forbidden_V).tolist() == [EOS]


@pytest.mark.parametrize(("regex", "vocab_size"), [("a[cd]", 6), ("ab", 5)], ids=["unknown", "not the model's"])
def test_a_vocabulary_that_can_not_go_on_ends_the_answer_with_an_error(regex, vocab_size):
    grammars = Grammars(sentencepiece(decoders.Metaspace()), vocab_size=vocab_size, eos_token_ids=(1,))
    state = grammars.start(StructuredOutputsParams(regex=regex), [3])
    assert state.finish_reason == "error"
    assert state.failure


# In the sampler


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_sampler_called_position_after_position_chooses_what_matches(make, ids, temperature):
    """As inside a draft window: several tokens of one request in one step, each taken in before the next is chosen."""
    sampler = Sampler(VOCAB_SIZE, eos_token_ids=(EOS,), grammars=make())
    sampling = SamplingParams(
        temperature=temperature, top_k=5, structured_outputs=StructuredOutputsParams(regex="a[bc]d"), min_tokens=2
    )
    request = sampler.prepare(StartedRequest("r", (5,), 1, 0, ((),), sampling, 0), np.array([5]))
    logits_XV = np.random.default_rng(0).standard_normal((4, VOCAB_SIZE)).astype(np.float32)
    chosen = []
    while request.finish_reason is None:
        (token_id,) = sampler.sample(logits_XV[len(chosen)][None], [request], [1 + len(chosen)]).tolist()
        request.advance(token_id)
        chosen.append(token_id)
    assert chosen in (ids("abd"), ids("acd"))
    assert request.finish_reason == "stop"
    # A step that was under way when the answer ended still samples; nobody reads what it finds.
    assert 0 <= sampler.sample(logits_XV[3][None], [request], [4])[0] < VOCAB_SIZE


@pytest.mark.parametrize("output", ["", "a", "ab"])
def test_a_request_that_comes_back_goes_on_in_the_middle_of_its_grammar(make, ids, output):
    sampler = Sampler(VOCAB_SIZE, grammars=make())
    sampling = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["abc"]))
    tokens = (5, 6, *ids(output))
    request = sampler.prepare(StartedRequest("r", tokens, 2, 0, ((),), sampling, 0), np.array(tokens))
    chosen = sampler.sample(np.zeros((1, VOCAB_SIZE), np.float32), [request], [len(tokens)])
    assert chosen.tolist() == ids("abc"[len(output)])


def test_sampling_within_a_grammar_changes_no_logits(make):
    sampler = Sampler(VOCAB_SIZE, grammars=make())
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]+"), min_tokens=2)
    request = sampler.prepare(StartedRequest("r", (5,), 1, 0, ((),), sampling, 0), np.array([5]))
    logits_RV = np.ones((1, VOCAB_SIZE), np.float32)
    sampler.sample(logits_RV, [request], [1])
    assert (logits_RV == 1).all()


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(regex="a{100000}"),
        StructuredOutputsParams(json={"enum": [f"the name of thing {index}" for index in range(20_000)]}),
    ],
    ids=["repeats", "list"],
)
def test_a_grammar_whose_tokens_would_take_too_long_is_refused(make, params):
    with pytest.raises(SamplingParamsError, match="it is too large"):
        make().check(params)
