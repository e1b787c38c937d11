"""Decoding of large models with random weights, made on the GPU: this engine without a tokenizer, and transformers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.bench.scheduler import make_request
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.base import Model
from hybrid_engine.models.layers.linear import Embedding, FusedLinear
from hybrid_engine.models.layers.moe import MoeMlp
from hybrid_engine.models.registry import build_model
from hybrid_engine.plan import plan_memory
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_pipeline import StepPipeline

PROMPT_TOKENS = 512
WARM_STEPS, TIMED_STEPS = 4, 48
WEIGHT_SCALE = 0.02
NUM_REQUESTS = (1, 16, 64)

GEMMA3_4B = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 256,
}
GRANITE4_7B = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_local_experts": 0,
    "num_hidden_layers": 32,
    "layer_types": ["attention" if index % 8 == 5 else "mamba" for index in range(32)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "tie_word_embeddings": True,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
MODELS = {
    "Gemma 3 4B shaped": (GEMMA3_4B, None),
    "Granite 4 H shaped, 7B, dense": (GRANITE4_7B, None),
    "Qwen 3 30B shaped, 128 experts": (QWEN3_30B, None),
    "Gemma 3 4B shaped, fp8": (GEMMA3_4B, "fp8"),
    "Qwen 3 30B shaped, 128 experts, fp8": (QWEN3_30B, "fp8"),
}
"""Each one's config, and how its weights are kept."""


@dataclass(frozen=True)
class Step:
    """A decode step of some number of requests."""

    seconds: float
    """From one step's start to the next one's, scheduling included."""
    idle_share: float
    """What part of that the GPU has nothing to do."""
    peer_seconds: float | None
    read_bytes: float
    """Of weights, at least: experts that nobody chose are not read."""


@dataclass(frozen=True)
class DecodeSpeed:
    """What was found of one model."""

    name: str
    weight_bytes: float
    """All that it holds."""
    steps: dict[int, Step]
    """By the number of requests."""
    note: str


def decode_speeds(device: torch.device) -> Iterator[DecodeSpeed]:
    """Time all models, one after the other."""
    for name, (config, quantization) in MODELS.items():
        yield decode_speed(name, config, device, quantization)
        torch.cuda.empty_cache()


def decode_speed(
    name: str, config: Mapping[str, Any], device: torch.device, quantization: str | None = None
) -> DecodeSpeed:
    """Time one model's decode steps, then those of transformers on a model of the same shape in bfloat16."""
    model = random_model(config, device, quantization)
    reads = {num_requests: read_bytes(model, num_requests) for num_requests in NUM_REQUESTS}
    weight_bytes = read_bytes(model, None)
    ours = {num_requests: time_decoding(model, num_requests, device) for num_requests in NUM_REQUESTS}
    del model
    torch.cuda.empty_cache()
    theirs: dict[int, float] = {}
    note = "transformers was not timed again"
    if quantization is None:
        theirs, note = _time_transformers(config, device)
    steps = {n: Step(*ours[n], peer_seconds=theirs.get(n), read_bytes=reads[n]) for n in NUM_REQUESTS}
    return DecodeSpeed(name, weight_bytes, steps, f"prompts of {PROMPT_TOKENS}, {TIMED_STEPS} steps; {note}")


def random_model(config: Mapping[str, Any], device: torch.device, quantization: str | None = None) -> Model:
    """A model whose weights are drawn on the device."""
    torch.manual_seed(0)
    model = build_model(config, dtype=torch.bfloat16, device=device)
    model.keep_weights_as(quantization)
    with torch.inference_mode():
        for weight, take in model.weights():
            dtype = torch.float32 if weight.is_float32 else model.dtype
            take(weight, torch.randn(weight.shape, dtype=dtype, device=device) * WEIGHT_SCALE)
    model.check_layers()
    return model.eval()


def read_bytes(model: Model, num_requests: int | None) -> float:
    """Return the bytes of matrices that a decode step must read, or that there are: routers choose evenly."""
    total = 0.0
    for module in model.modules():
        if isinstance(module, FusedLinear) or (isinstance(module, Embedding) and (module.is_head or not num_requests)):
            total += module.packed.num_bytes
        elif isinstance(module, MoeMlp):
            experts = module.experts
            missed = (1 - module.num_chosen / experts.down.num_experts) ** (num_requests or math.inf)
            total += (1 - missed) * (experts.gate_up.num_bytes + experts.down.num_bytes)
    return total


def time_decoding(
    model: Model, num_requests: int, device: torch.device, *, prompt_tokens: int = PROMPT_TOKENS
) -> tuple[float, float]:
    """Return the seconds of a decode step and the share of it in which the GPU waits."""
    scheduler, runner = make_engine(model, num_requests, device, prompt_tokens)
    pipeline = StepPipeline(runner, depth=scheduler.config.async_depth)

    def step() -> None:
        while not pipeline.is_full and (plan := scheduler.schedule()).request_ids:
            pipeline.launch(plan)
        scheduler.update(*pipeline.take())

    while scheduler.num_waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        step()
    for _ in range(WARM_STEPS):
        step()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    _synchronize(device)
    seconds = (time.perf_counter() - start) / TIMED_STEPS
    assert scheduler.num_running == num_requests, f"{scheduler.num_running} of {num_requests} requests run"
    return seconds, max(0.0, 1 - _busy_seconds(runner, device) / seconds)


def make_engine(
    model: Model, num_requests: int, device: torch.device, prompt_tokens: int
) -> tuple[Scheduler, ModelRunner]:
    """A scheduler with these requests waiting, each of other tokens, and a runner."""
    groups = group_layers(model.info.cache_specs(block_size=16, element_bytes=model.dtype.itemsize))
    layout = plan_memory(groups, _cache_bytes(device)).layout
    coordinator = Coordinator(groups, layout, config=CacheConfig(enable_prefix_caching=False))
    # On a GPU steps begin before the tokens of the one before are known.
    depth = 1 if device.type == "cuda" else 0
    config = SchedulerConfig(max_num_seqs=num_requests, max_num_scheduled_tokens=2048, async_depth=depth)
    scheduler = Scheduler(config, coordinator)
    draw = random.Random(0)
    for index in range(num_requests):
        prompt = draw.choices(range(model.info.vocab_size), k=prompt_tokens)
        scheduler.add_request(make_request(str(index), prompt, coordinator))
    return scheduler, ModelRunner(model, groups, layout, device=device)


def _cache_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 64 << 20


def _busy_seconds(runner: ModelRunner, device: torch.device) -> float:
    """Return how long the GPU works at a step: the last graph alone, played over and over."""
    graphs = runner._graphs
    if graphs is None:
        return 0.0
    graph = list(graphs._recordings.values())[-1].graph
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(TIMED_STEPS):
        graph.replay()
    end.record()
    _synchronize(device)
    return start.elapsed_time(end) / 1e3 / TIMED_STEPS


def _time_transformers(config: Mapping[str, Any], device: torch.device) -> tuple[dict[int, float], str]:
    """Return the seconds of a decode step of transformers' generate by the number of requests, and a note."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values), dtype=torch.bfloat16
        ).eval()
    model.generation_config.eos_token_id = None
    found = {}
    for num_requests in NUM_REQUESTS:
        ids_RT = torch.randint(0, config["vocab_size"], (num_requests, PROMPT_TOKENS), device=device)
        few, many = (_generate_seconds(model, ids_RT, count, device) for count in (1, 1 + TIMED_STEPS))
        found[num_requests] = (many - few) / TIMED_STEPS
    return found, "transformers generate with a dynamic cache, its time for one token taken off"


def _generate_seconds(model: Any, ids_RT: torch.Tensor, num_tokens: int, device: torch.device) -> float:
    best = float("inf")
    for _ in range(2):  # the first one sets things up
        _synchronize(device)
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids_RT, attention_mask=torch.ones_like(ids_RT), max_new_tokens=num_tokens, do_sample=False)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
