"""Values of another size than keys, and latents that are parts of keys, go through the kernels of both devices."""

import pytest
import torch
from attention_families import FAMILIES as ATTENTION_FAMILIES
from delta_families import FAMILIES as DELTA_FAMILIES
from logits import check_close, random_tokens, their_logits

from hybrid_engine.kernels.attention import fallback, reference
from hybrid_engine.kernels.native.builder import find_compiler

MODELS = {
    # Sizes that the C++ takes, multiples of 16.
    "mimo": (ATTENTION_FAMILIES["mimo_v2_flash"], {"head_dim": 32, "v_head_dim": 16}),
    "kimi": (DELTA_FAMILIES["kimi_linear"], {"kv_lora_rank": 32, "qk_rope_head_dim": 16}),
}


@pytest.mark.parametrize("path", ["native", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers_without_any_help_of_torch(
    name, path, tiny, paged_run, request, monkeypatch
):
    if path == "triton":
        request.getfixturevalue("interpreted")
    elif find_compiler() is None:
        pytest.skip("no C++ compiler here")
    family, changes = MODELS[name]
    model_class, config = family()
    theirs, ours = tiny(model_class, type(config)(**{**config.to_dict(), **changes}))
    text, other = random_tokens(12), random_tokens(3, seed=2)
    for module, function in ((fallback, "attention"), (reference, "write_kv"), (reference, "qkv_norm_rope_write")):
        monkeypatch.setattr(module, function, refuse)
    run = paged_run(ours, num_requests=2)
    found = [run.step(step) for step in ({0: text[:9]}, {0: text[9:10], 1: other}, {0: text[10:]})]
    check_close(torch.cat([logits[0] for logits in found]), their_logits(theirs, text))
    check_close(found[1][1], their_logits(theirs, other))


def refuse(*_args, **_options):
    raise AssertionError("went through torch")
