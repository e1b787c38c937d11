"""What the server itself can be told; what the engine can be told stands in EngineSettings."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_engine.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server. Raises ConfigError for a value outside its range."""

    model_names: tuple[str, ...]
    """What clients call the model; the first one is reported."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """One of these is required as a bearer token; none: everybody may ask."""
    share_cache: bool = False
    """Let clients with different API keys hit each other's prefixes."""
    max_queue: int = 256
    """Answers that may wait beside those that run; whoever comes then gets status 429."""
    max_concurrency: int | None = None
    """Answers in flight, those that run and those that wait; None: as many as may run and wait."""
    max_prompts: int = 128
    """Prompts in one request for completions."""
    request_timeout_seconds: float | None = None
    """Time a request may take when it doesn't say so itself, and the most that it may ask for."""
    max_body_bytes: int = 16 * 2**20
    body_timeout_seconds: float = 60.0
    """Time that a client may take to send its request."""
    stream_interval_seconds: float = 0.02
    """Tokens of faster steps are sent together, at most so much late; 0: each step's at once. An answer's first token
    and its last are never late."""
    drain_seconds: float = 60.0
    """Time that requests in flight may still take after a signal to end."""
    cors_origins: tuple[str, ...] = ()
    """Origins from which browsers may ask; '*': any."""
    chat_template: str | None = None
    """Used instead of the checkpoint's own."""
    tool_parser: str = AUTO
    """The form in which the model writes tool calls; 'auto': by its chat template; 'none': text is text."""
    reasoning_parser: str = AUTO
    """The same for reasoning before the answer."""
    is_admin_open: bool = True
    """Whether the routes below /cache may be used, by whoever may ask at all."""
    has_access_log: bool = True
    cache_log: Path | None = None
    """A file to which is appended what `hybrid-engine replay` needs; None: nowhere."""

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served model names is empty: give the model at least one name")
        for name in ("max_prompts", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {self.max_concurrency}, must be at least 1, or None")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue is {self.max_queue}, must be at least 0")
        for name in ("request_timeout_seconds", "drain_seconds", "body_timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value}, must be above 0")
        if not (self.stream_interval_seconds >= 0 and math.isfinite(self.stream_interval_seconds)):
            raise ConfigError(f"stream_interval_seconds is {self.stream_interval_seconds}, must be at least 0")
        if not all(self.api_keys):
            raise ConfigError("an API key is empty: leave it out if everybody may ask")

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]


def tenant_of(api_key: str) -> str:
    """Return what stands for a client where its key must not: the same after a restart, useless to whoever reads it."""
    return hashlib.blake2b(api_key.encode(), digest_size=8, person=b"he-tenant").hexdigest()


def read_api_keys(keys: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Return the keys given and those in a file, one a line. Raises ConfigError when the file can't be read."""
    if file is None:
        return keys
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys can't be read: {error}") from error
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{file} holds no API key: write one a line, or leave the option out")
    return (*keys, *found)
