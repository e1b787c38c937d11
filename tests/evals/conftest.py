"""The trained hybrid, which answers what documents say, and what makes samples for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybrid_engine.evals.prompts import Prompts
from hybrid_engine.evals.samples import Builder
from hybrid_engine.evals.texts import Texts
from hybrid_engine.llm import LLM


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(cache_memory_bytes="256MiB", max_num_seqs=32)


@pytest.fixture(scope="session")
def make_builder(llm) -> Callable[..., Builder]:
    """Make a builder; its texts stay, so that they are read once."""
    texts = Texts()

    def make(prompt_format: str = "chat-system", **settings) -> Builder:
        return Builder(Prompts(llm, prompt_format), texts, **{"seed": 1} | settings)

    return make


@pytest.fixture(scope="session")
def builder(make_builder) -> Builder:
    return make_builder()
