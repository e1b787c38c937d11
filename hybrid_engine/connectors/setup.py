"""From settings to a connector: which tiers there are, and whose bytes they may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hybrid_engine.config import CacheConfig
from hybrid_engine.connectors.disk import DiskTier
from hybrid_engine.connectors.fingerprint import cache_facts
from hybrid_engine.connectors.folder import open_folder, read_or_make_key
from hybrid_engine.connectors.host import HostTier
from hybrid_engine.connectors.store import TieredStore
from hybrid_engine.connectors.tiered import TieredConnector
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import ConfigError


def with_folder_key(config: CacheConfig) -> CacheConfig:
    """Return the settings with the hash key of the disk tier's folder, unless the caller has fixed one.

    Another process, or the next start, must name equal prefixes equally. Raises ConfigError when the folder can't be
    used.
    """
    if config.disk_folder is None or config.hash_key is not None:
        return config
    return replace(config, hash_key=read_or_make_key(Path(config.disk_folder)))


def open_connector(
    config: CacheConfig, coordinator: Coordinator, *, model: nn.Module, model_config: Mapping[str, Any]
) -> TieredConnector | None:
    """Return the connector that the settings ask for, None where they ask for none.

    Raises ConfigError when the disk tier's folder can't be used.
    """
    if not config.has_tiers:
        return None
    disk = None
    if config.disk_folder is not None:
        assert config.hash_key is not None, "the folder's key comes before the coordinator"
        facts = cache_facts(
            model,
            model_config,
            coordinator.groups,
            match_unit_tokens=coordinator.match_unit_tokens,
        )
        folder = open_folder(Path(config.disk_folder), facts, hash_key=config.hash_key)
        try:
            disk = DiskTier(folder, secret=config.hash_key, capacity_bytes=config.disk_bytes)
        except OSError as error:
            raise ConfigError(f"disk_cache is {config.disk_folder}, which can't be read: {error}") from error
    host: HostTier[Any] | None = HostTier(config.host_bytes) if config.host_bytes else None
    return TieredConnector(coordinator, TieredStore(host=host, disk=disk))
