"""`hybrid-engine serve` in a process of its own, as people run it."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
from live_server import wait_until


class Served:
    """A server in a process of its own, seen from outside."""

    def __init__(self, *arguments: str, script: str | None = None) -> None:
        """script: Python that runs instead of the command line's own entry."""
        start = ["-m", "hybrid_engine.cli"] if script is None else ["-c", script]
        command = [sys.executable, *start, "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self._port() or self.process.poll() is not None, 120)
        assert self._port(), "".join(self.lines)
        self.url = f"http://127.0.0.1:{self._port()}"

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)

    def _port(self) -> str | None:
        return next((hit[1] for line in self.lines if (hit := re.search(r"running on http://\S+:(\d+)", line))), None)

    def cache(self) -> dict:
        """What /cache says."""
        return httpx2.get(f"{self.url}/cache", timeout=60).json()

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        cache = self.cache()
        held = sum(group["num_held"] for group in cache["groups"])
        return cache["num_answers_in_flight"] == cache["num_running"] == cache["num_waiting"] == held == 0

    def rss_bytes(self) -> int:
        """Memory that the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def num_files(self) -> int:
        """Files and sockets that the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_threads(self) -> int:
        """Threads of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait(30)
