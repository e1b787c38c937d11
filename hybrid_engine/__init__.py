"""hybrid-engine: inference for models that mix full attention, sliding windows and recurrent state."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from hybrid_engine.llm import LLM
    from hybrid_engine.outputs import RequestOutput
    from hybrid_engine.sampling_params import SamplingParams, StructuredOutputsParams

_HOME = {
    "LLM": "hybrid_engine.llm",
    "RequestOutput": "hybrid_engine.outputs",
    "SamplingParams": "hybrid_engine.sampling_params",
    "StructuredOutputsParams": "hybrid_engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the bookkeeping can be imported without torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
