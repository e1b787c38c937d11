"""The page in a real browser, at two widths."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from prefix_reports import GIB, small_report, small_run

from hybrid_engine.bench.prefix_report.page import to_html

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

MEASURE = """<script>
const overlaps = [], empty = [];
for (const svg of document.querySelectorAll("svg")) {
  const box = svg.getBoundingClientRect();
  if (box.width < 200 || box.height < 100) empty.push(svg.getAttribute("aria-label"));
  const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
  for (const [one, a] of texts) {
    if (a.left < box.left - 1 || a.right > box.right + 1) overlaps.push(one + " leaves the plot");
    for (const [other, b] of texts) {
      const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
      if (a !== b && !apart) overlaps.push(one + " meets " + other);
    }
  }
}
const found = {
  overlaps, empty,
  plots: document.querySelectorAll("svg").length,
  ink: getComputedStyle(document.querySelector("svg text")).fill,
  cut: [...document.querySelectorAll("table")].filter(t => t.scrollWidth > t.parentElement.clientWidth + 1).length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
};
document.body.setAttribute("data-found", JSON.stringify(found));
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
@pytest.mark.parametrize("width", [1400, 1200, 500])
def test_the_page_has_room_for_all_that_it_shows(tmp_path, width):
    long_name = "a trace with a name that is as long as names of files on a disk can be" + "_and_longer" * 8
    runs = [
        small_run(policy, trace=trace, memory_bytes=size * GIB)
        for trace in ("a", long_name)
        for size in (4, 9, 10)
        for policy in ("lru", "value")
    ]
    page = tmp_path / "page.html"
    page.write_text(to_html(small_report(*runs)).replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        f"--window-size={width},900",
    ]
    command = [BROWSER, *options, "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', shown)[1]))
    assert found["plots"] == 2 * (1 + 6 + 6 + 3)
    assert not found["empty"]
    assert not found["overlaps"]
    assert found["overflow"] <= 0
    assert width < 1200 or not found["cut"], "tables are to be moved sideways on narrow screens alone"
    assert found["ink"].startswith("rgb("), "text has the page's colour"
