"""`python -m hybrid_engine.bench` is `hybrid-engine bench`."""

from hybrid_engine.bench.commands import app

if __name__ == "__main__":
    app()
