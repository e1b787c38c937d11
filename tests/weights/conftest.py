"""A tiny Gemma 3 and a tiny Llama, saved as safetensors and as GGUF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.models.base import ForwardBatch, LayerCache

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
GEMMA3 = SIZES | {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32}
LLAMA = SIZES | {"num_hidden_layers": 2, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}

METADATA = {
    "context_length": 256,
    "embedding_length": 96,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
}


def random_model(model_class, config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    return model


@pytest.fixture(scope="session")
def gemma() -> torch.nn.Module:
    return random_model(Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA3))


@pytest.fixture(scope="session")
def llama() -> torch.nn.Module:
    return random_model(LlamaForCausalLM, LlamaConfig(**LLAMA))


@pytest.fixture
def folder(gemma, tmp_path) -> Path:
    """Return a folder with the tiny Gemma in one safetensors file."""
    gemma.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def shards(gemma, tmp_path) -> Path:
    """Return a folder with the tiny Gemma in several shards."""
    gemma.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, object],
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a file with the gguf package. kinds: the tensors that are quantised; the others are float32."""
    writer = gguf.GGUFWriter(path, architecture)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        name = key if "." in key and key.split(".")[0] in ("tokenizer", "split") else f"{architecture}.{key}"
        adders[type(value)](name, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        array = tensor.detach().float().numpy()
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def gguf_writer() -> Callable[..., Path]:
    return write_gguf


def gguf_names(state: Mapping[str, torch.Tensor], arch: gguf.MODEL_ARCH, num_layers: int) -> dict[str, torch.Tensor]:
    """Name tensors as the gguf package does for this architecture."""
    names = gguf.get_tensor_name_map(arch, num_layers)
    named = {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor for name, tensor in state.items()}
    assert None not in named
    return named


@pytest.fixture(scope="session")
def gemma_tensors(gemma) -> dict[str, torch.Tensor]:
    """Return the tiny Gemma as llama.cpp stores it: norms are 1 + weight."""
    state = {name: tensor.detach() for name, tensor in gemma.state_dict().items() if name != "lm_head.weight"}
    shifted = {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in state.items()}
    return gguf_names(shifted, gguf.MODEL_ARCH.GEMMA3, GEMMA3["num_hidden_layers"])


@pytest.fixture(scope="session")
def llama_tensors(llama) -> dict[str, torch.Tensor]:
    """Return the tiny Llama as llama.cpp stores it: rows of queries and keys interleaved."""

    def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
        halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    state = {name: tensor.detach() for name, tensor in llama.state_dict().items()}
    heads = {"q_proj": 4, "k_proj": 2}
    stored = {
        name: interleaved(tensor, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else tensor
        for name, tensor in state.items()
    }
    return gguf_names(stored, gguf.MODEL_ARCH.LLAMA, LLAMA["num_hidden_layers"])


@pytest.fixture
def gguf_metadata() -> dict[str, object]:
    """Return the values that every architecture's file has, for the tiny sizes and 7 layers."""
    return METADATA | {"block_count": 7, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1_000_000.0}


@pytest.fixture
def paged_run_logits() -> Callable[[torch.nn.Module, list[int]], torch.Tensor]:
    """Return a function that gives a text's logits in one forward over a cache of one block."""

    @torch.inference_mode()
    def run(model, token_ids: list[int]) -> torch.Tensor:
        layer = model.info.layers[0]
        shape = (1, layer.num_kv_heads, len(token_ids), layer.head_size)
        meta = AttentionMeta.build(
            num_queries=[len(token_ids)], num_keys=[len(token_ids)], block_tables=[[0]], block_size=len(token_ids)
        )
        batch = ForwardBatch(
            token_ids_T=torch.tensor(token_ids),
            positions_T=torch.arange(len(token_ids)),
            metas=(meta,) * len(model.info.layers),
            caches=tuple(LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in model.info.layers),
        )
        return model.logits(model(batch))

    return run


@pytest.fixture
def gemma_gguf(gemma_tensors, gguf_metadata, tmp_path) -> Path:
    metadata = gguf_metadata | {
        "attention.sliding_window": 8,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.bos_token_id": 2,
    }
    return write_gguf(tmp_path / "gemma.gguf", "gemma3", gemma_tensors, metadata)


@pytest.fixture
def llama_gguf(llama_tensors, gguf_metadata, tmp_path) -> Path:
    metadata = gguf_metadata | {
        "block_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": 32,
    }
    return write_gguf(tmp_path / "llama.gguf", "llama", llama_tensors, metadata)
