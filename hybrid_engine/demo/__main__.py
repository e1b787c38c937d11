"""What `python -m hybrid_engine.demo` and `make demo` run."""

import os
import sys

# Read once, when torch loads: threads that spin while they wait slow each other down on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console

from hybrid_engine.demo.recall import run_recall_demo
from hybrid_engine.demo.run import run_demo
from hybrid_engine.errors import HybridEngineError

if __name__ == "__main__":
    try:
        run_demo()
        Console().rule()
        run_recall_demo()
    except HybridEngineError as error:
        Console(stderr=True).print(f"[red]error: {error}[/red]", soft_wrap=True, highlight=False)
        sys.exit(2)
