"""Settings, frozen and checked when they are made. What is found out at run time is a result, not a setting."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.spec import ATTENTION_KINDS

POLICIES = ("fcfs", "priority")
EVICTION_POLICIES = ("valued", "lru", "flop_aware")
MAX_ASYNC_DEPTH = 2
BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SCHEDULER_COUNTS = (
    "max_num_scheduled_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "reserved_blocks",
    "ageing_steps",
    "max_overtaken_steps",
    "async_depth",
    "draft_slots",
)


def require_integers(config: object, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for a setting that is no integer; those in optional may be None."""
    for name in (*names, *optional):
        value = getattr(config, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer and (value is not None or name not in optional):
            raise ConfigError(f"{name} is {value!r}, must be an integer{', or None' if name in optional else ''}")


def require_path(name: str, value: object) -> None:
    """Raise ConfigError for a setting that is neither a path nor None."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
        raise ConfigError(f"{name} is {value!r}, must be a path")


def parse_bytes(size: int | str | None) -> int | None:
    """Read a size: bytes, or a text like '2GiB' or '512 MB'. Raises ConfigError for what it can't read."""
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if match is None or match[2] not in BYTE_UNITS:
        raise ConfigError(f"{size!r} is no size in bytes, must be a number or like '2GiB' or '512MB'")
    return int(float(match[1]) * BYTE_UNITS[match[2]])


@contextmanager
def errors_in_words_of(settings: Mapping[str, str]) -> Iterator[None]:
    """Let an error name each setting as the caller does, who may never have seen a config's own names.

    settings: the config's own name for each of the caller's.
    """
    names = {ours: name for name, ours in settings.items() if ours != name}
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"(?<!')\b(" + "|".join(names) + r")\b(?!')", lambda found: names[found[0]], str(error))
        raise type(error)(message) from None


@dataclass(frozen=True)
class CacheConfig:
    """What is kept between steps, and for whom it can be found."""

    block_size: int = 16
    """Tokens in a block of an attention group."""
    block_sizes: Mapping[str, int] = field(default_factory=dict)
    """Tokens in a block of the groups of a kind ('full_attention', 'sliding_window', 'chunked_local') where they are to
    differ from block_size."""
    memory_bytes: int | None = None
    """Bytes for all groups together; None: a quarter of the free memory, at most 4 GiB."""
    enable_prefix_caching: bool = True
    hash_key: bytes | None = None
    """Key of the block hashes; None draws one for this process, so that nobody can craft collisions."""
    checkpoint_interval: int = 4096
    """Tokens between the recurrent states that a long prefill leaves behind; 0: none but those with another reason."""
    max_evicted_keys: int = 65_536
    """Keys of evicted blocks remembered in each group, to tell 'evicted' from 'never seen'."""
    eviction_policy: str = "valued"
    """Which recorded checkpoint goes when memory is short, where layers are recurrent. See docs/EVICTION.md."""
    host_bytes: int = 0
    """Host memory for what the caches give up; 0: none. See docs/CONNECTORS.md."""
    disk_folder: str | None = None
    """Where what the caches give up outlives the process; None: nowhere."""
    disk_bytes: int = 16 * 2**30
    """Most bytes of the files of one model in that folder."""

    def __post_init__(self) -> None:
        required = ("block_size", "checkpoint_interval", "max_evicted_keys", "host_bytes", "disk_bytes")
        require_integers(self, *required, optional=("memory_bytes",))
        require_path("disk_folder", self.disk_folder)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching is {self.enable_prefix_caching!r}, must be True or False")
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}, must be at least 1 token")
        self._check_block_sizes()
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"eviction_policy is {self.eviction_policy!r}, must be one of {', '.join(EVICTION_POLICIES)}"
            )
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}, must be above 0, or None")
        if self.host_bytes < 0:
            raise ConfigError(f"host_bytes is {self.host_bytes}, must be at least 0 (0: no host tier)")
        if self.disk_bytes <= 0:
            raise ConfigError(
                f"disk_bytes is {self.disk_bytes}, must be above 0; leave disk_folder out for no disk tier"
            )
        if self.has_tiers and not self.enable_prefix_caching:
            raise ConfigError(
                "a host or disk cache keeps what prefix caching gives up, and enable_prefix_caching is off: turn it "
                "on, or leave the host and disk cache out"
            )

    @property
    def has_tiers(self) -> bool:
        """Whether anything is kept beyond the caches themselves."""
        return self.host_bytes > 0 or self.disk_folder is not None

    def _check_block_sizes(self) -> None:
        if not isinstance(self.block_sizes, Mapping):
            raise ConfigError(
                f"block_sizes is {self.block_sizes!r}, must map kinds to tokens: {{'sliding_window': 32}}"
            )
        for kind, size in self.block_sizes.items():
            if kind not in ATTENTION_KINDS:
                raise ConfigError(f"block_sizes names {kind!r}, must be one of {', '.join(ATTENTION_KINDS)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"block_sizes[{kind!r}] is {size!r}, must be a whole number of at least 1 token")


@dataclass(frozen=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_scheduled_tokens: int = 2048
    """Tokens computed in one step, over all requests."""
    max_num_batched_tokens: int | None = None
    """Input positions in one step, the drafts that each request might have had counted; None: no limit of its own."""
    max_num_seqs: int = 64
    """Requests that run at once."""
    long_prefill_token_threshold: int = 0
    """Tokens that one request may compute in a step; 0: as many as the budget leaves."""
    full_sequence_must_fit: bool = True
    """Admit a request only if all its known tokens fit, not just its first chunk."""
    watermark: float = 0.01
    """Share of each group's blocks that admission leaves free for running requests to grow into."""
    reserved_blocks: int = 0
    """Blocks of each group that admission leaves free beside the watermark."""
    policy: str = "fcfs"
    """'fcfs': in the order of arrival. 'priority': the lowest `Request.priority` first, then in that order."""
    ageing_steps: int = 1000
    """Under 'priority', steps of waiting that weigh as much as one unit of priority; 0: priority alone decides."""
    max_overtaken_steps: int = 32
    """Steps in which others may be admitted before a request that has no place yet; then all behind it wait."""
    async_depth: int = 0
    """Steps that may be launched before the oldest one's result is taken in; 0: one after the other."""
    draft_slots: int = 0
    """Most tokens guessed ahead for one request in a step."""

    def __post_init__(self) -> None:
        require_integers(self, *SCHEDULER_COUNTS, optional=("max_num_batched_tokens",))
        for name in ("max_num_scheduled_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, must be at least 0 (0: no limit)"
            )
        for name in ("reserved_blocks", "ageing_steps", "max_overtaken_steps", "draft_slots"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 0")
        if not 0 <= self.async_depth <= MAX_ASYNC_DEPTH:
            raise ConfigError(f"async_depth is {self.async_depth}, must be from 0 to {MAX_ASYNC_DEPTH}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r}, must be one of {', '.join(POLICIES)}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens <= self.draft_slots:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be above draft_slots "
                f"({self.draft_slots}): one request alone takes a token and its drafts"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}, must be at least 0 and below 1")


SPECULATION_METHODS = ("ngram", "draft_model")
MAX_SPECULATIVE_TOKENS = 16
"""Each needs a state slot of its own in every recurrent group, and late ones are hardly ever accepted."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Tokens guessed ahead, several of which one step can verify. They never change an answer, only its speed."""

    method: str = "ngram"
    """'ngram': what followed the last few tokens where they stood before; 'draft_model': a smaller model's answer."""
    num_speculative_tokens: int = 5
    """Most tokens guessed ahead of one request in a step; fewer are tried where they don't pay."""
    model: str | Path | None = None
    """The draft model: a checkpoint, smaller, with the same vocabulary."""
    prompt_lookup_max: int = 4
    """Longest n-gram that is looked up, in tokens."""
    prompt_lookup_min: int = 2
    """Shortest one."""
    draft_cache_memory_bytes: int | None = None
    """Cache memory of the draft model, on top of the other; None: a quarter as much."""

    def __post_init__(self) -> None:
        counts = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        require_integers(self, *counts, optional=("draft_cache_memory_bytes",))
        require_path("model", self.model)
        if self.method not in SPECULATION_METHODS:
            raise ConfigError(f"method is {self.method!r}, must be {' or '.join(map(repr, SPECULATION_METHODS))}")
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, must be from 1 to {MAX_SPECULATIVE_TOKENS}; "
                f"to guess nothing, give no SpeculativeConfig"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}: "
                f"must be 1 <= min <= max"
            )
        if (self.model is not None) != (self.method == "draft_model"):
            raise ConfigError(
                "method is 'draft_model': name the draft model as model="
                if self.model is None
                else f"model is {str(self.model)!r}, which method {self.method!r} has no use for: give "
                f"method='draft_model', or no model"
            )
        if self.draft_cache_memory_bytes is not None and self.draft_cache_memory_bytes <= 0:
            raise ConfigError(f"draft_cache_memory_bytes is {self.draft_cache_memory_bytes}, must be above 0, or None")


def speculation(method: str | None, num_tokens: int | None, draft_model: str | Path | None) -> SpeculativeConfig | None:
    """Return what three options of a command line ask for; None where none of them is given."""
    if method is None and num_tokens is None and draft_model is None:
        return None
    count = {} if num_tokens is None else {"num_speculative_tokens": num_tokens}
    return SpeculativeConfig(method or ("ngram" if draft_model is None else "draft_model"), model=draft_model, **count)
