"""Run an installed wheel from outside the checkout: the kernels compile, a tiny random model answers, the shipped one
recalls.

usage: python smoke.py CHECKOUT    (the folder that nothing may be imported from)
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

import hybrid_engine
from hybrid_engine import LLM, SamplingParams
from hybrid_engine.kernels.native.builder import find_compiler

VOCAB_SIZE = 64


def main() -> None:
    checkout = Path(sys.argv[1]).resolve()
    home = Path(hybrid_engine.__file__).resolve()
    assert checkout not in home.parents, f"imported from the checkout: {home}"
    print(f"hybrid_engine {hybrid_engine.__version__} from the wheel")
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        # Empty: the kernels must compile from what the wheel brought.
        os.environ["XDG_CACHE_HOME"] = str(cache)
        make_model(Path(folder))
        for dtype in ("float32", "bfloat16"):
            answer(Path(folder), dtype)
        recall()
        check_native_kernels(cache)


def make_model(folder: Path) -> None:
    """Write a random Gemma 3 of two layers, one of each kind, and a tokenizer of 64 words."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=32,
        max_position_embeddings=512,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def answer(folder: Path, dtype: str) -> None:
    """Answer two prompts twice; the second time must come from the cache and say the same."""
    llm = LLM(folder, dtype=dtype, cache_memory_bytes="64MiB")
    prompts = [[index % VOCAB_SIZE for index in range(start, start + 100)] for start in (3, 30)]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, again = (llm.generate(prompts, sampling, progress=False) for _ in range(2))
    assert all(len(output.outputs[0].token_ids) == 8 for output in first)
    assert all(output.num_cached_tokens >= 96 for output in again), [output.cache for output in again]
    if dtype == "float32":
        assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
    print(f"{dtype}: {[output.outputs[0].token_ids for output in first]}")


def recall() -> None:
    """Ask the model that the wheel brings for something that it can only know from the prompt."""
    llm = LLM(cache_memory_bytes="64MiB")
    messages = [
        {"role": "system", "content": " The code of Belora is 4071. The ship of Moki is grifen."},
        {"role": "user", "content": "What is the code of Belora?"},
    ]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16), progress=False)
    assert output.outputs[0].text == " 4071.", output.outputs[0].text
    print(f"tiny-hybrid: {output.outputs[0].text}")


def check_native_kernels(cache: Path) -> None:
    """Say which kernels were compiled; with a compiler at hand some must have been."""
    built = sorted(path.name for path in cache.rglob("*.so"))
    print(f"compiled: {', '.join(built) or 'nothing'}")
    assert built or find_compiler() is None, "there is a compiler, but no kernel was compiled"


if __name__ == "__main__":
    main()
