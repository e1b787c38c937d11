"""llama.cpp as a peer, by a module that does as llama_cpp does: the next token is the last one's successor."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_engine.bench import engine
from hybrid_engine.bench.llama_cpp import LlamaCpp
from hybrid_engine.errors import CheckpointError, ConfigError

VOCAB_SIZE = 50
FILE = Path(__file__)
"""Stands for a GGUF file: the module here reads none."""


class FakeBatch(SimpleNamespace):
    """llama_batch with arrays that grow."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(n_tokens=0, token=[0] * num_tokens, pos=[0] * num_tokens, n_seq_id=[0] * num_tokens)
        self.seq_id, self.logits = [[0] for _ in range(num_tokens)], [False] * num_tokens


class FakeLlamaCpp:
    """Keeps what it was asked; the caches of sequences are their lengths."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.batches: list[int] = []
        self.params = SimpleNamespace()

    def __getattr__(self, name: str):
        """Most functions only hand something on."""
        return lambda *args: name

    def llama_context_default_params(self) -> SimpleNamespace:
        return self.params

    def llama_vocab_n_tokens(self, vocab: object) -> int:
        return VOCAB_SIZE

    def llama_batch_init(self, num_tokens: int, embd: int, num_sequences: int) -> FakeBatch:
        return FakeBatch(num_tokens)

    def llama_memory_clear(self, memory: object, has_data: bool) -> None:
        self.lengths.clear()

    def llama_decode(self, context: object, batch: FakeBatch) -> int:
        self.batches.append(batch.n_tokens)
        self.wanted = {}
        for i in range(batch.n_tokens):
            (sequence,) = batch.seq_id[i]
            assert batch.pos[i] == self.lengths.get(sequence, 0), "a position twice, or left out"
            self.lengths[sequence] = batch.pos[i] + 1
            if batch.logits[i]:
                self.wanted[i] = batch.token[i] + 1
        return 0

    def llama_get_logits_ith(self, context: object, index: int):
        logits = (ctypes.c_float * VOCAB_SIZE)()
        logits[self.wanted[index]] = 1.0
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))

    def llama_print_system_info(self) -> bytes:
        return b"CPU : AVX2 = 1 \n"


@pytest.fixture
def api(monkeypatch):
    """What `import llama_cpp` gives."""
    fake = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    return fake


def make_peer(**sizes: int) -> LlamaCpp:
    return LlamaCpp(FILE, **{"num_threads": 2, "num_requests": 3, "num_tokens": 300} | sizes)


def test_prompts_of_any_lengths_are_answered_at_once(api):
    assert make_peer().generate([[3, 9], [20], [7, 8, 30]], 3) == [[10, 11, 12], [21, 22, 23], [31, 32, 33]]
    assert api.batches == [6, 3, 3]


def test_a_call_finds_nothing_of_the_one_before(api):
    peer = make_peer()
    assert peer.generate([[1, 2]], 2) == peer.generate([[1, 2]], 2) == [[3, 4]]


def test_a_prompt_longer_than_a_batch_is_computed_in_several(api):
    assert make_peer(num_tokens=2100).generate([[5] * 2050], 2) == [[6, 7]]
    assert api.batches == [2048, 2, 1]


def test_it_gets_the_threads_and_the_memory_that_the_comparison_needs(api):
    peer = make_peer(num_threads=2, num_requests=3, num_tokens=300)
    assert (api.params.n_threads, api.params.n_threads_batch) == (2, 2)
    assert (api.params.n_ctx, api.params.n_seq_max) == (3 * 512, 3)
    assert peer.facts == "CPU : AVX2 = 1"


def test_without_the_module_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        make_peer()


def test_a_file_that_it_cannot_load_is_named(api):
    api.llama_model_load_from_file = lambda path, params: None
    with pytest.raises(CheckpointError, match=rf"can't load .*{FILE.name}"):
        make_peer()


def test_a_file_that_is_not_there_and_a_module_that_is_not_installed_are_told_before_anything_is_timed(
    tmp_path, monkeypatch, api
):
    monkeypatch.setattr(engine.steps, "run", pytest.fail)
    with pytest.raises(CheckpointError, match=r"absent\.gguf, which is no file"):
        next(engine.run(model=FILE, llama_cpp_file=tmp_path / "absent.gguf"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        next(engine.run(model=FILE, llama_cpp_file=FILE))


def test_in_fewer_bits_only_llama_cpp_is_a_goal_for_its_file_may_have_as_few():
    assert engine.goals_of(1, None) == {"transformers generate": 2.0, "llama.cpp": 1.0}
    assert engine.goals_of(1, "int8") == {"llama.cpp": 1.0}
