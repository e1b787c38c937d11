"""The tokenizer built from a GGUF file against transformers' conversion of the same file, and where it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybrid_engine import tokenizer as tokenizer_module
from hybrid_engine.errors import CheckpointError
from hybrid_engine.tokenizer import cache_folder, load_tokenizer, merges_of

TEXTS = {
    "empty": "",
    "words": "the cat sat on the mat",
    "spaces": " the  cat   sat     ",
    "newlines": "a\n\nb\n\n\n\nc\n",
    "tabs and code": "def f(x):\n\treturn x**2  # ok\n",
    "unknown letters": "čaj, żółć",
    "emoji": "🙂👩‍👩‍👧 ok",
    "CJK": "漢字かな 中文",
    "control tokens": "<bos>the<eos><unk>",
    "control characters": "\x00\x01\u200b\ufeff",
    "markup": "<b>the</b>",
}

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
WHOLE = ["\n\n", "\n\n\n\n", "▁▁", "▁▁▁▁", "  ", "<b>", "</b>"]
WORDS = [
    "th",
    "he",
    "the",
    "▁the",
    "▁t",
    "at",
    "cat",
    "▁c",
    "▁cat",
    "sat",
    "ca",
    "▁s",
    "▁sat",
    "on",
    "mat",
    "\t\t",
    "**",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """Keep every test's tokenizers in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path, *, template: str | None = None, with_tokens: bool = True) -> Path:
    """Write a file with a small vocabulary of Gemma's kind, and no weights but what transformers insists on."""
    letters = sorted(
        {letter for word in [*WORDS, "def returnxokf()#:.,abc"] for letter in word.replace(" ", "")} | {"▁", "\n"}
    )
    plain = WORDS + letters
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(1)
    writer.add_key_length(8)
    if with_tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*SPECIAL, *WHOLE, *(f"<0x{byte:02X}>" for byte in range(256)), *plain])
        writer.add_token_scores([0.0] * (len(SPECIAL) + len(WHOLE) + 256 + len(plain)))
        writer.add_token_types([3] * len(SPECIAL) + [4] * len(WHOLE) + [6] * 256 + [1] * len(plain))
        for name, index in zip(("pad", "eos", "bos", "unk"), range(4), strict=True):
            getattr(writer, f"add_{name}_token_id")(index)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path) -> PreTrainedTokenizerBase:
    """Convert with transformers."""
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("small") / "small.gguf")


@pytest.fixture(scope="module")
def small_oracle(small) -> PreTrainedTokenizerBase:
    return converted(small)


@pytest.mark.parametrize("name", TEXTS)
def test_a_small_vocabulary_splits_texts_as_transformers_does(name, small, small_oracle):
    ours = load_tokenizer(small)
    token_ids = ours(TEXTS[name]).input_ids
    assert token_ids == small_oracle(TEXTS[name]).input_ids
    assert ours.decode(token_ids) == small_oracle.decode(token_ids)


def test_special_tokens_are_known_by_their_roles(small):
    ours = load_tokenizer(small)
    assert (ours.pad_token_id, ours.eos_token_id, ours.bos_token_id, ours.unk_token_id) == (0, 1, 2, 3)
    assert ours.decode(ours("the cat").input_ids, skip_special_tokens=True) == "the cat"


def test_merges_prefer_earlier_tokens_and_longer_left_parts():
    vocab = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    assert merges_of(vocab) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_a_chat_template_comes_along(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", template="{{ messages[0].content }}!")
    ours = load_tokenizer(path)
    assert ours.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False) == "the cat!"


def test_a_tokenizer_is_built_once_and_then_read(small, monkeypatch):
    first = load_tokenizer(small)
    monkeypatch.setattr(tokenizer_module, "build", lambda file: pytest.fail("built again"))
    assert load_tokenizer(small)("the cat").input_ids == first("the cat").input_ids


def test_a_kept_tokenizer_belongs_to_the_content_not_to_the_path(tmp_path):
    path = tmp_path / "x.gguf"
    assert load_tokenizer(write_gguf(path)).chat_template is None
    assert load_tokenizer(write_gguf(path, template="hello")).chat_template == "hello"


def test_building_leaves_nothing_half_done(small):
    load_tokenizer(small)
    (kept,) = cache_folder().iterdir()
    assert {file.name for file in kept.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}


def test_two_processes_may_build_at_once(small, monkeypatch):
    built = tokenizer_module.build

    def build_and_lose_the_race(file):
        monkeypatch.setattr(tokenizer_module, "build", built)
        load_tokenizer(small)
        return built(file)

    monkeypatch.setattr(tokenizer_module, "build", build_and_lose_the_race)
    assert load_tokenizer(small)("the cat").input_ids
    assert len(list(cache_folder().iterdir())) == 1


def test_a_cache_that_cannot_be_written_costs_only_time(small, cache, caplog):
    cache.write_text("a file where the folder should be")
    assert load_tokenizer(small)("the cat").input_ids
    assert "can't be kept" in caplog.text


def test_a_tokenizer_beside_the_weights_comes_first(small, tmp_path):
    load_tokenizer(small).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "broken.gguf").write_bytes(b"never read")
    assert load_tokenizer(tmp_path / "model").bos_token == "<bos>"


def test_a_folder_with_one_gguf_file_is_enough(small):
    assert load_tokenizer(small.parent).bos_token == "<bos>"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: tokenizer.json, tokenizer.model or"):
        load_tokenizer(tmp_path)


def test_a_gguf_file_without_tokens_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: tokenizer.ggml.tokens is missing"):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", with_tokens=False))


@pytest.mark.slow
@pytest.mark.real_weights
def test_gemmas_tokenizer_is_the_one_that_transformers_makes(real_weights):
    ours = json.loads(load_tokenizer(real_weights).backend_tokenizer.to_str())
    assert ours == json.loads(converted(real_weights).backend_tokenizer.to_str())


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_file_that_holds_none_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* can't be read"):
        load_tokenizer(tmp_path)
