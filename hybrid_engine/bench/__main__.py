"""`python -m hybrid_engine.bench` is `hybrid-engine bench`."""

from hybrid_engine.bench.commands import app

app()
