"""Write the trained model as a checkpoint that transformers and the engine load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.tiny_hybrid.model import TinyJamba
from training.tiny_hybrid.settings import ModelSettings, jamba_config
from training.tiny_hybrid.tokenizer import with_chat

WEIGHTS = "model.safetensors"


def export(model: TinyJamba, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (rounded to bfloat16), config and tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    if model.settings.tie_word_embeddings:
        del state["lm_head.weight"]
    rounded = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
    config = jamba_config(model.settings)
    _write(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", {**ids, "do_sample": False})
    with_chat(tokenizer).save_pretrained(folder)


def load(folder: Path) -> TinyJamba:
    """The exported model, in float32."""
    config = json.loads((folder / "config.json").read_text())
    settings = ModelSettings(**{name: config[name] for name in ModelSettings.__dataclass_fields__})
    model = TinyJamba(settings)
    weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    if settings.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.eval()


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
