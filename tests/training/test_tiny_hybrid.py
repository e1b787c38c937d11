"""The training of the tiny hybrid: its scan, its model beside transformers', and resuming."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, JambaForCausalLM

from hybrid_engine.kernels.ssm import reference
from hybrid_engine.kernels.ssm.meta import StateMeta
from hybrid_engine.tokenizer import load_tokenizer
from training.tiny_hybrid import export, scan
from training.tiny_hybrid import tokenizer as tokenizers
from training.tiny_hybrid.batches import batch, encode
from training.tiny_hybrid.evaluate import Sample, accuracy, recall_sample
from training.tiny_hybrid.model import TinyJamba
from training.tiny_hybrid.settings import DENSE, MIXED, ModelSettings, Recipe, Stage
from training.tiny_hybrid.tasks import Piece, copy_task, english_task, pairs_task, recall_task
from training.tiny_hybrid.train import Training, train

Task = Callable[[random.Random, int], list[Piece]]
META = StateMeta(
    query_starts=torch.tensor([0, 11], dtype=torch.int32),
    slots_R=torch.tensor([0]),
    has_history_R=torch.tensor([False]),
    capture_ends_C=torch.tensor([], dtype=torch.int64),
    capture_requests_C=torch.tensor([], dtype=torch.int64),
    capture_slots_C=torch.tensor([], dtype=torch.int64),
)
SMALL = ModelSettings(
    vocab_size=2048, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, mamba_dt_rank=3
)


def scan_inputs(num_tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    rows, inner, size = 2, 3, 4
    return {
        "dt_RTI": torch.rand(rows, num_tokens, inner).double(),
        "u_RTI": torch.randn(rows, num_tokens, inner).double(),
        "A_IN": -torch.rand(inner, size).double() * 4,
        "B_RTN": torch.randn(rows, num_tokens, size).double(),
        "C_RTN": torch.randn(rows, num_tokens, size).double(),
    }


@pytest.fixture(params=[1, 3, 100], ids=["a token a chunk", "chunks of 3", "one chunk"])
def chunk_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(scan.CHUNK_ELEMENTS, "cpu", request.param * 2 * 3 * 4)
    return request.param


@pytest.mark.usefixtures("chunk_tokens")
def test_the_scan_is_that_of_the_kernels() -> None:
    inputs = scan_inputs(11)
    y_RTI = scan.selective_scan(**inputs)
    for row in range(2):
        one = {name: x if name == "A_IN" else x[row] for name, x in inputs.items()}
        dt, u = one["dt_RTI"], one["u_RTI"]
        wanted = reference.mamba1_scan(
            u / dt,
            torch.log(torch.expm1(dt)),
            A_IN=one["A_IN"],
            B_TN=one["B_RTN"],
            C_TN=one["C_RTN"],
            D_I=torch.zeros(3).double(),
            z_TI=None,
            dt_bias_I=None,
            state_SIN=torch.zeros(1, 3, 4).double(),
            meta=META,
        )
        torch.testing.assert_close(y_RTI[row], wanted)


@pytest.mark.usefixtures("chunk_tokens")
def test_the_gradients_of_the_scan_are_those_of_small_differences() -> None:
    inputs = {name: x.requires_grad_() for name, x in scan_inputs(7).items()}
    assert torch.autograd.gradcheck(
        lambda dt, u, A, B, C: scan.selective_scan(dt, u, A_IN=A, B_RTN=B, C_RTN=C), tuple(inputs.values())
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers.load()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model whose weights are far from their beginning, so that no norm and no bias is idle."""
    torch.manual_seed(0)
    model = TinyJamba(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    folder = tmp_path_factory.mktemp("exported")
    export.export(model, tokenizer, folder)
    return folder


@torch.inference_mode()
def test_an_exported_model_computes_what_transformers_computes(exported: Path) -> None:
    theirs = JambaForCausalLM.from_pretrained(exported)
    tokens = torch.randint(SMALL.vocab_size, (2, 50), generator=torch.Generator().manual_seed(0))
    logits = theirs(tokens).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(export.load(exported)(tokens)[0], logits, atol=1e-4, rtol=1e-4)


def test_the_exported_tokenizer_is_the_same_in_transformers_and_in_the_engine(
    exported: Path, tokenizer: Tokenizer
) -> None:
    text = "The code of Velko is 4071.\nNaïve, isn't it?"
    wanted = tokenizer.encode(text).ids
    assert AutoTokenizer.from_pretrained(exported)(text)["input_ids"] == wanted
    assert load_tokenizer(exported)(text)["input_ids"] == wanted
    assert tokenizer.decode(wanted) == text


def test_the_chat_template_writes_what_is_trained_on(exported: Path) -> None:
    messages = [{"role": "system", "content": " A."}, {"role": "user", "content": "B?"}]
    text = load_tokenizer(exported).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|system|> A.<|end|><|user|>B?<|end|><|assistant|>"


def test_the_tokenizer_is_the_one_that_its_script_makes(tokenizer: Tokenizer) -> None:
    assert tokenizers.train_tokenizer().to_str() == tokenizer.to_str()


def small_recipe(num_steps: int = 6) -> Recipe:
    return Recipe(model=SMALL, stages=(Stage(32, 4, 2, MIXED), Stage(64, 2, num_steps - 2, DENSE)), warmup_steps=2)


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole = Training(small_recipe(), tokenizer)
    train(whole, tmp_path)
    first = Training(small_recipe(), tokenizer)
    for _ in range(3):
        first.run_step()
    first.save(tmp_path)
    first.run_step()  # what a killed run did after its last checkpoint is done again
    second = Training(small_recipe(), tokenizer)
    second.load(tmp_path)
    train(second, tmp_path)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_a_checkpoint_of_another_recipe_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    Training(small_recipe(), tokenizer).save(tmp_path)
    with pytest.raises(ValueError, match="is of another recipe"):
        Training(small_recipe(num_steps=7), tokenizer).load(tmp_path)


def test_some_steps_on_one_batch_bring_the_loss_down(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    training, same = (
        Training(small_recipe(num_steps=40), tokenizer),
        batch(tokenizer, seed=1, step=0, stage=Stage(64, 2, 1, DENSE)),
    )
    monkeypatch.setattr("training.tiny_hybrid.train.batch", lambda *_, **__: same)
    figures = [training.run_step()["loss"].item() for _ in range(40)]
    assert figures[-1] < 0.5 * figures[0]


@pytest.mark.parametrize("task", [recall_task, copy_task, pairs_task, english_task])
def test_a_sample_is_about_as_long_as_wanted(task: Task, tokenizer: Tokenizer) -> None:
    lengths = [len(encode(tokenizer, task(random.Random(seed), 512))[0]) for seed in range(50)]
    assert 400 < sum(lengths) / 50 < 560


def test_only_answers_count_fully(tokenizer: Tokenizer) -> None:
    pieces = recall_task(random.Random(2), 256)
    said = re.findall(r"<\|assistant\|>(.+?)<\|end\|>", "".join(piece.text for piece in pieces))
    tokens, weights = encode(tokenizer, pieces)
    counted = tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight == 1.0])
    assert said
    assert counted == "".join(said)


@pytest.mark.parametrize("distance", [128, 1000])
def test_a_recall_sample_has_its_fact_at_the_distance(distance: int, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        sample = recall_sample(random.Random(seed), distance, tokenizer)
        said = sample.prompt.index(sample.answer)
        behind = len(tokenizer.encode(sample.prompt[said:], add_special_tokens=False).ids)
        assert distance <= behind < distance + 60
        assert sample.prompt.count(sample.answer) == 1


def test_an_answer_counts_only_when_all_its_tokens_are_right(tokenizer: Tokenizer) -> None:
    class Parrot(torch.nn.Module):
        """Says whatever comes next in the text, but for one token."""

        wrong = -1
        lm_head = torch.nn.Linear(1, 1)

        def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
            following = tokens.roll(-1, 1)
            if self.wrong >= 0:
                following[:, self.wrong] = 5
            return torch.nn.functional.one_hot(following, 2048).float(), None

    sample = Sample("<|begin|>Say 12:", " 12.")
    end = len(tokenizer.encode(sample.prompt + sample.answer, add_special_tokens=False).ids)
    parrot = Parrot()
    assert accuracy(parrot, tokenizer, [sample]) == 1.0
    for parrot.wrong in (end - 1, end - 2):
        assert accuracy(parrot, tokenizer, [sample]) == 0.0
