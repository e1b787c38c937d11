"""A server on a port of its own, in a thread, as people run it."""

import json
import threading
import time

import httpx2
import uvicorn
from openai import OpenAI

from hybrid_engine.async_engine import AsyncEngine
from hybrid_engine.engine import Engine
from hybrid_engine.server.app import create_app
from hybrid_engine.server.settings import ServerSettings


class LiveServer:
    """Serves an engine until it is stopped."""

    def __init__(self, engine: Engine, **settings) -> None:
        self.engine = engine
        self.app = create_app(AsyncEngine(engine), ServerSettings(("tiny",), **settings))
        self.service = self.app.state.service
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_level="warning", lifespan="on", timeout_keep_alive=75)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive())
        assert self._server.started
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._clients: dict[tuple, OpenAI] = {}
        self.http = httpx2.Client(base_url=self.url, timeout=30)

    def client(self, api_key: str = "none", **options) -> OpenAI:
        """Return OpenAI's client for this server, which is slow to make."""
        key = (api_key, *options.items())
        if key not in self._clients:
            options = {"max_retries": 0, "timeout": 30} | options
            self._clients[key] = OpenAI(base_url=f"{self.url}/v1", api_key=api_key, **options)
        return self._clients[key]

    def post(self, path: str, **body):
        """Post JSON and return the response."""
        # Written here: the client's own JSON refuses texts that are none, which is what some tests send.
        return self.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    def metric(self, start: str) -> float:
        """Return the value of the one metric whose line starts so; 0 where there is none."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(start)]
        assert len(lines) <= 1, lines
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    def stop(self) -> None:
        """Stop as after a signal."""
        self.http.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def wait_until(condition, seconds: float = 30) -> None:
    """Wait for a condition; fail when it doesn't come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
