"""The dashboard in a real browser."""

import re
import shutil
import subprocess

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_the_dashboard_shows_groups_and_hits_in_a_browser(hello, tmp_path):
    for _ in range(2):
        hello.post("/v1/completions", prompt="a prompt that is asked twice, to be found")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=4000",
    ]
    command = [BROWSER, *options, "--dump-dom", f"{hello.url}/dashboard"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition("<script>")[0].partition("<body>")[2]))
    assert "0: full" in shown
    assert "1: window" in shown
    assert re.search(r"hit 40 never seen \d+", shown), shown
    assert "tiny" in shown
    assert "doesn't answer" not in shown
