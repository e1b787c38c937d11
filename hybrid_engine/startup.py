"""From a model's path and a few settings to an engine that runs.

`plan_engine` says what would be set up, from the config alone; `start_engine` does it. Both are one computation, so
that what `hybrid-engine plan` prints is what runs.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine import tiny_hybrid
from hybrid_engine.config import (
    CacheConfig,
    SchedulerConfig,
    SpeculativeConfig,
    errors_in_words_of,
    parse_bytes,
    require_integers,
    require_path,
)
from hybrid_engine.connectors.setup import open_connector, with_folder_key
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.detokenizer import fast_tokenizer
from hybrid_engine.drafting import Drafter
from hybrid_engine.engine import Engine
from hybrid_engine.errors import CapacityError, ConfigError
from hybrid_engine.exactness import check_exact
from hybrid_engine.groups.spec import group_layers, with_block_sizes
from hybrid_engine.kernels.dispatch import has_triton
from hybrid_engine.kernels.linear import check_quantization
from hybrid_engine.models.base import ModelInfo
from hybrid_engine.models.registry import check_quantizable, describe_model, load_model
from hybrid_engine.plan import MemoryPlan, plan_memory
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.speculation.adaptive import AdaptiveDrafter
from hybrid_engine.speculation.draft_model import DraftModelDrafter
from hybrid_engine.speculation.ngram import NgramDrafter
from hybrid_engine.structured import Grammars
from hybrid_engine.tokenizer import load_tokenizer
from hybrid_engine.weights import Checkpoint, open_checkpoint
from hybrid_engine.weights.checkpoint import read_json

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_MEMORY_SHARE = 4
"""The caches take this part (a quarter) of the free memory when no size is given …"""
MAX_DEFAULT_MEMORY_BYTES = 4 * 2**30
"""… but not more than this."""
GPU_MEMORY_SHARE = 0.8
"""What the caches take of a GPU's memory that the weights leave; the rest is for what a step needs."""
DRAFT_MEMORY_SHARE = 4
"""A draft model's caches take this part (a quarter) of the other's when no size is given."""
VERIFICATION_COST = 0.08
"""What another token in a step costs, as a share of the step."""


class EngineSettings(TypedDict, total=False):
    """What `LLM(model, …)` and the command line take, all of it optional."""

    tokenizer: str | Path | None
    """A folder or file to read it from; None: with the model."""
    dtype: str
    """'float32', 'bfloat16', or 'auto' (default): the checkpoint's own, bfloat16 where it is float16 or quantised."""
    quantization: str | None
    """'int8': linear weights in 8 bits; 'w8a8': what they multiply as well; None: in dtype. On a CPU."""
    exact: bool
    """Whether logits have the same bits in whatever steps a text is computed, and beside whatever else."""
    max_model_len: int | None
    """Most tokens of a prompt and its answer; None: as far as the model and the memory reach."""
    cache_memory_bytes: int | str | None
    """Bytes, or a text like '2GiB'; None: a quarter of the free memory, at most 4 GiB; on a GPU most of it."""
    block_size: int
    """Tokens in a cache block (16)."""
    block_sizes: Mapping[str, int]
    """Tokens in a block of the layers of a kind where they are to differ: {'sliding_window': 32}."""
    enable_prefix_caching: bool
    eviction_policy: str
    """Which checkpoint goes where layers are recurrent and memory is short: 'valued' (default), 'lru', 'flop_aware'."""
    host_cache_bytes: int | str | None
    """Host memory for cached prefixes that the caches give up, bytes or a text; None or 0: none."""
    disk_cache: str | Path | None
    """A folder in which they outlive the process, and that several processes may share; None: none."""
    disk_cache_bytes: int | str | None
    """Most bytes of one model's files in that folder; None: 16 GiB."""
    max_num_seqs: int
    """Requests that run at once."""
    max_num_batched_tokens: int
    """Tokens computed in one step, over all requests."""
    long_prefill_token_threshold: int
    """Tokens that one request may compute in a step; 0: as many as the step has room for."""
    async_depth: int | None
    """Steps launched beyond the one that is waited for; None: 0, since a CPU gains nothing by it."""
    speculative: SpeculativeConfig | None
    """How tokens are guessed ahead; None: they are not."""
    scheduling_policy: str
    """'fcfs' (default): in the order of arrival. 'priority': prompts with a lower 'priority' first."""
    device: str
    """'cpu' (default), 'cuda' or 'cuda:1': where the model and its caches lie."""
    num_threads: int | None
    """Threads of the kernels, for the whole process; None: as torch has it."""
    seed: int
    """What requests without a seed draw theirs from."""


@dataclass(frozen=True)
class EngineConfig:
    """The same settings, checked, in the parts that they belong to."""

    model: str | Path
    """A folder with safetensors or one GGUF file, a .gguf file, or (to plan only) a config.json."""
    tokenizer: str | Path | None = None
    dtype: str = "auto"
    quantization: str | None = None
    exact: bool = False
    max_model_len: int | None = None
    device: str = "cpu"
    num_threads: int | None = None
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}, must be 'auto', {' or '.join(map(repr, DTYPES))}")
        if not isinstance(self.device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device is {self.device!r}, must be 'cpu', 'cuda' or the like of 'cuda:1'")
        check_quantization(self.quantization, device_type=self.device.partition(":")[0])
        require_integers(self, "seed", optional=("max_model_len", "num_threads"))
        require_path("tokenizer", self.tokenizer)
        for name in ("max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1, or None")
        if self.speculative is not None and not isinstance(self.speculative, SpeculativeConfig):
            raise ConfigError(f"speculative is {self.speculative!r}, must be a SpeculativeConfig, or None")


# The caller's name for a setting and, where it differs, the config's own.
CACHE_SETTINGS = {
    "cache_memory_bytes": "memory_bytes",
    "block_size": "block_size",
    "block_sizes": "block_sizes",
    "enable_prefix_caching": "enable_prefix_caching",
    "eviction_policy": "eviction_policy",
    "host_cache_bytes": "host_bytes",
    "disk_cache": "disk_folder",
    "disk_cache_bytes": "disk_bytes",
}
BYTE_SETTINGS = ("cache_memory_bytes", "host_cache_bytes", "disk_cache_bytes")
SCHEDULER_SETTINGS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_scheduled_tokens",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "async_depth": "async_depth",
    "scheduling_policy": "policy",
}


def make_config(model: str | Path, **settings: Unpack[EngineSettings]) -> EngineConfig:
    """Put settings into one config. Raises ConfigError for one that doesn't exist or is out of its range."""
    for name in settings:
        if name not in EngineSettings.__annotations__:
            near = difflib.get_close_matches(name, EngineSettings.__annotations__, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(EngineSettings.__annotations__)}"
            raise ConfigError(f"{name!r} is no setting; {hint}")
    has_default = (*BYTE_SETTINGS, "async_depth")
    given: dict[str, Any] = {
        name: value for name, value in settings.items() if value is not None or name not in has_default
    }
    given |= {name: parse_bytes(given[name]) for name in BYTE_SETTINGS if name in given}
    require_path("disk_cache", given.get("disk_cache"))
    if given.get("disk_cache") is not None:
        given["disk_cache"] = str(Path(given["disk_cache"]).expanduser())
    elif "disk_cache_bytes" in given:
        raise ConfigError(
            f"disk_cache_bytes is {given['disk_cache_bytes']} and there is no disk_cache: name its folder"
        )
    cache = {ours: given.pop(name) for name, ours in CACHE_SETTINGS.items() if name in given}
    scheduler = {ours: given.pop(name) for name, ours in SCHEDULER_SETTINGS.items() if name in given}
    if isinstance(given.get("speculative"), SpeculativeConfig):
        scheduler["draft_slots"] = given["speculative"].num_speculative_tokens
    with errors_in_words_of(CACHE_SETTINGS | SCHEDULER_SETTINGS):
        return EngineConfig(model, cache=CacheConfig(**cache), scheduler=SchedulerConfig(**scheduler), **given)


@dataclass(frozen=True)
class EnginePlan:
    """What an engine is made of, found out from the model's config and the settings."""

    info: ModelInfo
    dtype: torch.dtype
    quantization: str | None
    memory: MemoryPlan
    capacity_tokens: int
    """Most tokens of one request that the caches hold when nothing else runs."""
    max_model_len: int


def plan_engine(model_config: Mapping[str, Any], config: EngineConfig) -> EnginePlan:
    """Find out what an engine would be made of; no weights are read.

    Raises CapacityError when the memory can't hold what was asked, ConfigError when the model doesn't reach that far.
    """
    check_quantizable(model_config, config.quantization)
    info = describe_model(dict(model_config))
    dtype = _resolve_dtype(model_config, config.dtype)
    wanted_len = _wanted_len(info, config.max_model_len)
    specs = info.cache_specs(block_size=config.cache.block_size, element_bytes=dtype.itemsize)
    memory = plan_memory(
        group_layers(with_block_sizes(specs, config.cache.block_sizes)),
        config.cache.memory_bytes
        or default_memory_bytes(config.device, weight_bytes=info.num_parameters * dtype.itemsize),
    )
    capacity = memory.capacity_tokens
    if config.max_model_len is not None and capacity < config.max_model_len:
        raise CapacityError(
            f"max_model_len is {config.max_model_len:,}, the cache memory ({memory.memory_bytes:,} bytes) holds "
            f"{capacity:,} tokens of one request: lower max_model_len, or give more cache_memory_bytes"
        )
    if capacity < wanted_len:
        logger.warning(
            "max_model_len is %d, below the model's %d: the cache memory (%d bytes) holds no more",
            *(capacity, wanted_len, memory.memory_bytes),
        )
    return EnginePlan(info, dtype, config.quantization, memory, capacity, min(wanted_len, capacity))


def start_engine(config: EngineConfig) -> tuple[Engine, EnginePlan]:
    """Load a model and make an engine that runs it."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    check_device(config.device)
    checkpoint = open_checkpoint(config.model)
    check_exact(config.exact, checkpoint.config, device_type=config.device.partition(":")[0])
    plan = plan_engine(checkpoint.config, config)
    tokenizer = load_tokenizer(Path(config.tokenizer or checkpoint.path))
    how = {"device": config.device, "quantization": plan.quantization, "exact": config.exact}
    model = load_model(checkpoint, dtype=plan.dtype, **how)
    eos_token_ids = plan.info.eos_token_ids
    grammars = Grammars(fast_tokenizer(tokenizer), vocab_size=plan.info.vocab_size, eos_token_ids=eos_token_ids)
    cache = with_folder_key(config.cache)
    coordinator = Coordinator(plan.memory.groups, plan.memory.layout, config=cache)
    connector = open_connector(cache, coordinator, model=model, model_config=checkpoint.config)
    runner = ModelRunner(
        model,
        plan.memory.groups,
        plan.memory.layout,
        device=config.device,
        grammars=grammars,
        store=connector.store if connector else None,
    )
    drafter = None if config.speculative is None else _make_drafter(config.speculative, config, plan, tokenizer)
    engine = Engine(
        Scheduler(config.scheduler, coordinator, connector=connector, drafter=drafter),
        runner,
        tokenizer,
        vocab_size=plan.info.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
        tiers=connector,
        grammars=grammars,
    )
    return engine, plan


def _make_drafter(
    speculative: SpeculativeConfig, config: EngineConfig, plan: EnginePlan, tokenizer: PreTrainedTokenizerBase
) -> Drafter:
    """Make what guesses ahead, the draft model with an engine of its own loaded."""
    if speculative.model is None:
        drafter: Drafter = NgramDrafter(
            min_tokens=speculative.prompt_lookup_min, max_tokens=speculative.prompt_lookup_max
        )
        return AdaptiveDrafter(drafter, cost=VERIFICATION_COST)
    checkpoint = open_checkpoint(tiny_hybrid.find_model(speculative.model))
    draft_info = describe_model(dict(checkpoint.config))
    _check_vocabulary(speculative.model, draft_info, plan.info, tokenizer, checkpoint)
    memory_bytes = speculative.draft_cache_memory_bytes or plan.memory.used_bytes // DRAFT_MEMORY_SHARE
    draft_config = replace(
        config,
        model=speculative.model,
        dtype="auto",
        max_model_len=min(plan.max_model_len, draft_info.max_position_embeddings),
        cache=replace(config.cache, memory_bytes=memory_bytes),
        scheduler=replace(config.scheduler, async_depth=0, draft_slots=0),
    )
    try:
        draft_plan = plan_engine(checkpoint.config, draft_config)
    except CapacityError as error:
        raise CapacityError(f"draft model {speculative.model}: {error} (draft_cache_memory_bytes)") from error
    model = load_model(checkpoint, dtype=draft_plan.dtype, device=config.device, quantization=draft_plan.quantization)
    coordinator = Coordinator(draft_plan.memory.groups, draft_plan.memory.layout, config=draft_config.cache)
    drafter = DraftModelDrafter(
        Scheduler(draft_config.scheduler, coordinator),
        ModelRunner(model, draft_plan.memory.groups, draft_plan.memory.layout, device=config.device),
        max_model_len=draft_plan.max_model_len,
    )
    # A draft reads all weights of the draft model, a step without drafts all weights of the other.
    share = draft_info.num_parameters / plan.info.num_parameters
    return AdaptiveDrafter(drafter, cost=VERIFICATION_COST + share)


def _check_vocabulary(
    path: str | Path, draft_info: ModelInfo, info: ModelInfo, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint
) -> None:
    """Raise ConfigError unless a token id means the same to both models."""
    if draft_info.vocab_size != info.vocab_size:
        raise ConfigError(
            f"the draft model {path} has a vocabulary of {draft_info.vocab_size:,} tokens, the model one of "
            f"{info.vocab_size:,}: a draft model must have the same one"
        )
    theirs, ours = load_tokenizer(Path(checkpoint.path)).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        differing = sorted(theirs.items() ^ ours.items(), key=lambda item: item[1])
        raise ConfigError(
            f"the draft model {path} has another tokenizer: {len(differing):,} entries differ, such as "
            f"{differing[0][0]!r} = {differing[0][1]}; a draft model must have the same vocabulary"
        )


def read_model_config(model: str | Path) -> dict[str, Any]:
    """Read a model's config from a config.json, a folder that holds one, a .gguf file or a folder that holds one.

    Raises CheckpointError when there is none or it holds something else.
    """
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.exists():
        return open_checkpoint(path).config
    return read_json(file)


def check_device(device: str) -> None:
    """Raise ConfigError when the device isn't there or nothing here can compute on it."""
    if device == "cpu":
        return
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {device!r}, torch {torch.__version__} sees {torch.cuda.device_count()} NVIDIA GPUs: install a "
            f"build of torch for CUDA, or use device 'cpu'"
        )
    if not has_triton():
        raise ConfigError(f"device is {device!r}, which needs Triton: install triton, or use device 'cpu'")


def default_memory_bytes(device: str = "cpu", *, weight_bytes: int = 0) -> int:
    """Return what the caches take when no size is given.

    A quarter of the free memory, at most 4 GiB; on a GPU, four fifths of what the weights leave.
    """
    if device != "cpu":
        check_device(device)
        free = torch.cuda.mem_get_info(device)[0] - weight_bytes
        if free <= 0:
            raise CapacityError(f"the weights take {weight_bytes:,} bytes, {device} has {free + weight_bytes:,} free")
        return int(free * GPU_MEMORY_SHARE)
    return min(_free_memory_bytes() // DEFAULT_MEMORY_SHARE, MAX_DEFAULT_MEMORY_BYTES)


def _wanted_len(info: ModelInfo, max_model_len: int | None) -> int:
    reach = info.max_position_embeddings
    if max_model_len is not None and max_model_len > reach:
        raise ConfigError(f"max_model_len is {max_model_len:,}, the model reaches {reach:,} tokens: ask at most that")
    return max_model_len or reach


def _resolve_dtype(model_config: Mapping[str, Any], dtype: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    stored = model_config.get("dtype") or model_config.get("torch_dtype")
    return DTYPES.get(str(stored), torch.bfloat16)


def _free_memory_bytes() -> int:
    """Return what this process can still take: of the machine's memory and, in a container, of its limit."""
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (meminfo := Path("/proc/meminfo")).exists():
        free += [int(kib) * 1024 for kib in re.findall(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free.append(max(int(text) - int(used.read_text()), 0))
    return min(free)
