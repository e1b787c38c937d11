"""Models that transformers' own code runs: what is refused, and that two in one process don't meet."""

from __future__ import annotations

from itertools import pairwise

import generic_families
import pytest
import torch
import transformers as hf
from attention_families import COMMON, GENERIC
from safetensors.torch import load_file, save_file

from hybrid_engine.errors import CheckpointError, UnknownModelError
from hybrid_engine.models.registry import describe_model, load_model
from hybrid_engine.weights import open_checkpoint

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 99}


def test_the_layer_table_is_that_of_a_trace():
    _, config = GENERIC["deepseek_v3"]()
    layers = describe_model(config.to_dict()).layers
    assert [(row.kind, row.num_kv_heads, row.head_size, row.value_size) for row in layers] == [
        ("full_attention", 6, 16, 12)
    ] * 2
    _, config = GENERIC["flint"]()
    layers = describe_model(config.to_dict()).layers
    assert [row.kind for row in layers] == config.layer_types
    assert [row.window for row in layers] == [8, None, 8, 8, None]
    assert all(row.has_sinks for row in layers)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 6}, "0 of its 2 layers attend through"),
        (SMALL | {"model_type": "bailing_hybrid"}, "its layers are also linear_attention; here only full_attention"),
        (SMALL | {"model_type": "bert"}, "its layers look ahead, too"),
        (SMALL | {"model_type": "t5"}, "transformers has no causal language model of it|it has an encoder"),
        (SMALL | {"model_type": "falcon"}, "transformers doesn't make it with our attention"),
        (SMALL | {"model_type": "smollm3", "hidden_size": "x"}, "transformers doesn't read its config"),
        (
            SMALL
            | {"model_type": "smollm3"}
            | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0}},
            r"its rope \(dynamic\) turns keys by the length of the text",
        ),
    ],
    ids=["no interface", "recurrent", "looks ahead", "encoder", "no support", "bad config", "dynamic rope"],
)
def test_what_cannot_be_run_is_refused_by_name(config, reason):
    with pytest.raises(UnknownModelError, match=f"model_type '{config['model_type']}' has no file .*({reason})"):
        describe_model(config)


def test_a_model_that_counts_tokens_by_itself_is_refused_once_its_weights_are_there(tmp_path, save_tiny, monkeypatch):
    save_tiny(*GENERIC["starcoder2"](), tmp_path)
    plain = hf.Starcoder2Model.forward
    monkeypatch.setattr(hf.Starcoder2Model, "forward", lambda self, position_ids=None, **given: plain(self, **given))
    with pytest.raises(UnknownModelError, match=r"differ from those of a whole text by .* of their deviation"):
        load_model(open_checkpoint(tmp_path), dtype=torch.float32)


def test_a_model_whose_code_does_not_take_what_is_handed_over_is_refused(tmp_path, save_tiny):
    config = hf.OPTConfig(vocab_size=99, hidden_size=48, ffn_dim=56, num_hidden_layers=2, num_attention_heads=6)
    save_tiny(hf.OPTForCausalLM, config, tmp_path)
    with pytest.raises(UnknownModelError, match=r"'opt' has no file .*its code fails with our attention"):
        load_model(open_checkpoint(tmp_path), dtype=torch.float32)


def test_a_missing_tensor_is_named(tmp_path, save_tiny):
    save_tiny(*GENERIC["starcoder2"](), tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.c_fc.weight"
    save_file({one: tensor for one, tensor in load_file(file).items() if one != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load_model(open_checkpoint(tmp_path), dtype=torch.float32)


def test_two_models_in_turn_do_not_meet(tiny, paged_run):
    pairs = [tiny(*GENERIC[name]()) for name in ("starcoder2", "smollm3")]
    tokens = torch.randint(0, COMMON["vocab_size"], (20,)).tolist()
    runs = [paged_run(ours) for _, ours in pairs]
    pieces: list[list[torch.Tensor]] = [[], []]
    for piece in (tokens[:9], tokens[9:10], tokens[10:]):
        for index, run in enumerate(runs):
            pieces[index].append(run.step({0: piece})[0])
    for (theirs, _), found in zip(pairs, pieces, strict=True):
        with torch.inference_mode():
            expected_TV = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat(found), expected_TV, rtol=0, atol=1e-3 * expected_TV.std().item())


@pytest.mark.slow
@pytest.mark.parametrize("kind", generic_families.NAMES)
def test_every_decoder_that_is_known_to_run_gives_the_logits_of_transformers_in_pieces(kind, tiny, paged_run):
    theirs, ours = tiny(*generic_families.GENERIC[kind]())
    tokens = torch.randint(0, 99, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    run = paged_run(ours, max_tokens=100)
    pieces = [run.step({0: tokens[start:stop]})[0] for start, stop in pairwise((0, 50, 51, 90, 100))]
    with torch.inference_mode():
        expected_TV = theirs(torch.tensor([tokens]), use_cache=False).logits[0].float()
    torch.testing.assert_close(torch.cat(pieces), expected_TV, rtol=0, atol=1e-3 * expected_TV.std().item())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", generic_families.DIFFERENT)
def test_a_decoder_that_the_check_finds_different_is_refused(kind, dtype, tmp_path, save_tiny):
    save_tiny(*generic_families.maker(kind)(), tmp_path)
    with pytest.raises(UnknownModelError, match=r"differ from those of a whole text by"):
        load_model(open_checkpoint(tmp_path), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", generic_families.NAMES)
def test_every_decoder_that_is_known_to_run_passes_the_check_in_bfloat16(kind, tmp_path, save_tiny):
    save_tiny(*generic_families.GENERIC[kind](), tmp_path)
    assert load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16).info.architecture == kind
