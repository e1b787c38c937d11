"""Schemathesis, on the server's own description of itself, finds nothing that makes it fail."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_no_request_makes_the_server_fail(gemma, tmp_path):
    described = gemma.http.get("/openapi.json").json()
    for body in described["components"]["schemas"].values():
        # A deadline of nothing is answered with 504, as it should be.
        body.get("properties", {}).pop("timeout_seconds", None)
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(tmp_path / "openapi.json"), "--url", gemma.url]
    command += ["--checks", "not_a_server_error", "--max-examples", "40", "--phases", "examples,coverage,fuzzing"]
    command += ["--suppress-health-check", "all", "--request-timeout", "60", "--generation-deterministic"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[done.stdout.find("FAILURES") :][:5000] + done.stderr[-2000:]
    assert gemma.http.get("/health").status_code == 200
