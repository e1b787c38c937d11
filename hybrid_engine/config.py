"""Settings, frozen and checked when they are made. What is found out at run time is a result, not a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.spec import ATTENTION_KINDS


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
    max_num_seqs: int = 64
    """Requests that run at once."""
    long_prefill_token_threshold: int = 0
    """Tokens that one request may compute in a step; 0: as many as the budget leaves."""
    full_sequence_must_fit: bool = True
    """Admit a request only if all its known tokens fit, not just its first chunk."""
    watermark: float = 0.01
    """Share of each group's blocks that admission leaves free for running requests to grow into."""

    def __post_init__(self) -> None:
        require_integers(self, "max_num_scheduled_tokens", "max_num_seqs", "long_prefill_token_threshold")
        for name in ("max_num_scheduled_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, must be at least 0 (0: no limit)"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}, must be at least 0 and below 1")
