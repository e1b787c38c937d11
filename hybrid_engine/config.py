"""Settings, frozen and checked when they are made. What is found out at run time is a result, not a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.spec import ATTENTION_KINDS

POLICIES = ("fcfs", "priority")
MAX_ASYNC_DEPTH = 2
SCHEDULER_COUNTS = (
    "max_num_scheduled_tokens",
    "max_num_batched_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "reserved_blocks",
    "ageing_steps",
    "max_overtaken_steps",
    "async_depth",
    "draft_slots",
)


def require_integers(config: object, *names: str) -> None:
    """Raise ConfigError for a setting that is neither an integer nor None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ConfigError(f"{name} is {value!r}, must be an integer")


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

    def __post_init__(self) -> None:
        require_integers(self, "block_size", "memory_bytes", "checkpoint_interval", "max_evicted_keys")
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}, must be at least 1 token")
        self._check_block_sizes()
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}, must be above 0, or None")

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
        require_integers(self, *SCHEDULER_COUNTS)
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
