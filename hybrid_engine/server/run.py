"""Runs the server until a signal ends it, or the engine dies."""

from __future__ import annotations

import logging
import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from hybrid_engine.async_engine import AsyncEngine
from hybrid_engine.server.app import create_app
from hybrid_engine.server.settings import ServerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listener:
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls_certificate: Path | None = None
    tls_key: Path | None = None


def run_server(engine: AsyncEngine, settings: ServerSettings, listener: Listener) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight may then still end, a second signal cuts them off.

    Raises EngineDeadError when the engine died, after every request in flight was told.
    """
    _log_to_stderr()
    config = uvicorn.Config(
        create_app(engine, settings),
        host=listener.host,
        port=listener.port,
        ssl_certfile=listener.tls_certificate,
        ssl_keyfile=listener.tls_key,
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds),
        lifespan="on",
        log_config=None,
        access_log=False,
        # Longer than clients and proxies keep a connection that is idle: who closes first must not be us.
        timeout_keep_alive=75,
        server_header=False,
    )
    server = uvicorn.Server(config)

    def stop(*why: object) -> None:
        server.should_exit = True

    engine.on_death = stop
    # uvicorn has handlers of its own while it serves, and raises the signal again when all is done: a server that was
    # told to end and has drained ends with status 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run()
    if engine.failure is not None:
        raise engine.failure


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("httpx", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
