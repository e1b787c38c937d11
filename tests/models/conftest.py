"""Running a model without an engine, and tiny checkpoints made with transformers' own classes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_engine.groups.spec import LayerSpec, MambaSpec
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.dispatch import file_of
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.base import ForwardBatch, LayerCache, Model, StateCache
from hybrid_engine.models.generic import Generic
from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint


class PagedRun:
    """Requests of a model, their keys and values in blocks that lie in no order; each group has its own tables.

    The caches start as NaN, so that a slot read before it is written shows. A request's state lies in its first block
    of a recurrent group.
    """

    def __init__(self, model: Model, *, num_requests: int = 1, max_tokens: int = 64, block_size: int = 4) -> None:
        self.model = model
        self.device = (
            next(model.parameters()).device if isinstance(model, Generic) else model.embedding.packed.data.device
        )
        self.block_size = block_size
        num_blocks = -(-max_tokens // block_size)
        self.token_ids: list[list[int]] = [[] for _ in range(num_requests)]
        order = random.Random(0)
        self.specs = list(model.info.cache_specs(block_size=block_size, element_bytes=model.dtype.itemsize).values())
        self.tables: dict[LayerSpec, list[list[int]]] = {}
        for spec in dict.fromkeys(self.specs):
            blocks = list(range(1, num_requests * num_blocks + 1))
            order.shuffle(blocks)
            self.tables[spec] = [blocks[i * num_blocks : (i + 1) * num_blocks] for i in range(num_requests)]
        self.caches = tuple(self._empty(num_requests * num_blocks + 1, spec) for spec in self.specs)

    def _empty(self, num_blocks: int, spec: LayerSpec) -> LayerCache | StateCache:
        dtype = self.model.dtype
        if isinstance(spec, MambaSpec):
            conv_shape, ssm_shape = (num_blocks, *spec.conv_shape), (num_blocks, *spec.ssm_shape)
            return StateCache(self._nan(conv_shape, dtype), self._nan(ssm_shape, torch.float32))
        k_shape = (num_blocks, spec.num_kv_heads, self.block_size, spec.head_size)
        return LayerCache(self._nan(k_shape, dtype), self._nan((*k_shape[:-1], spec.value_size), dtype))

    def _nan(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def step(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Compute each request's next tokens, all in one batch: float32 logits [tokens, V] by request."""
        positions = [range(len(self.token_ids[r]), len(self.token_ids[r]) + len(new)) for r, new in chunks.items()]
        for request, new in chunks.items():
            self.token_ids[request].extend(new)
        num_queries = [len(new) for new in chunks.values()]
        metas = {spec: self._meta(spec, chunks) for spec in self.tables}
        batch = ForwardBatch(
            token_ids_T=torch.tensor([token for new in chunks.values() for token in new], device=self.device),
            positions_T=torch.tensor([position for span in positions for position in span], device=self.device),
            metas=tuple(metas[spec] for spec in self.specs),
            caches=self.caches,
        )
        logits_TV = self.model.logits(self.model(batch)).cpu()
        return dict(zip(chunks, logits_TV.split(num_queries), strict=True))

    def _meta(self, spec: LayerSpec, chunks: Mapping[int, Sequence[int]]) -> AttentionMeta | StateMeta:
        num_queries = [len(new) for new in chunks.values()]
        num_keys = [len(self.token_ids[request]) for request in chunks]
        tables = [self.tables[spec][request] for request in chunks]
        if isinstance(spec, MambaSpec):
            has_history = [keys > queries for keys, queries in zip(num_keys, num_queries, strict=True)]
            return StateMeta.build(
                num_queries=num_queries,
                slots=[table[0] for table in tables],
                has_history=has_history,
                put=lambda array: torch.from_numpy(array).to(self.device),
            )
        return AttentionMeta.build(
            num_queries=num_queries,
            num_keys=num_keys,
            block_tables=tables,
            block_size=self.block_size,
            device=self.device,
        )


@pytest.fixture(scope="session")
def paged_run() -> type[PagedRun]:
    return PagedRun


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, device) -> Callable[..., tuple[torch.nn.Module, Model]]:
    """Return a maker of pairs: transformers' tiny random model of a config, and ours loaded from what it saved."""
    made: dict[tuple[str, str], tuple[torch.nn.Module, Model]] = {}

    def make(model_class, config) -> tuple[torch.nn.Module, Model]:
        # Experts are packed for the kernels that run when the model is loaded, which `interpreted` changes.
        key = config.to_json_string(), file_of(device)
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny")
            save_random(model_class, config, folder)
            theirs = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            made[key] = theirs, load_model(open_checkpoint(folder), dtype=torch.float32, device=device)
        return made[key]

    return make


def save_random(model_class, config, folder: Path, **options) -> None:
    """Save a model in which all is random that is saved: norms and biases too, which start as zeros or ones."""
    torch.manual_seed(0)
    model = model_class(config)
    saved = model.state_dict().keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
        for name, buffer in model.named_buffers():
            is_derived = name.endswith(("_decay", "slope_rate"))  # from the config, by MiniMax
            if name in saved and buffer.is_floating_point() and not is_derived:
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder, **options)


@pytest.fixture(scope="session")
def save_tiny() -> Callable[..., None]:
    return save_random


@pytest.fixture(scope="session")
def excerpt(repository: Path) -> str:
    """Return about 20 KB of War and Peace."""
    return (repository / "tests" / "data" / "war_and_peace_excerpt.txt").read_text(encoding="utf-8")
