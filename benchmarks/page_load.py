"""How soon a report of 10,000 requests is there in a browser: its text, its first plot, all of it.

    python benchmarks/page_load.py [PAGE.html ...] [--loads 5]

Without a page, one is made of a made-up run. Several pages (before and after a change) are loaded in
turn. Milliseconds since the navigation began; a plot counts when the frame that has it was painted.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from playwright.sync_api import Browser, sync_playwright

from specbench.records import Prompt

REQUESTS = 10_000
ARMS = {"eagle": (1, 2, 3), "ngram": (3,)}
CODE = "def fold(items):\n    total = 0\n    for item in items:\n        total += item\n"
NAMES = ("chromium", "chromium-browser", "google-chrome")
NOTED = {
    "text": "first contentful paint",
    "dom": "DOMContentLoaded",
    "plot": "first plot painted",
    "drawn": "first plot interactive",
}
NOTE = """
window.noted = {};
const note = (name) => { window.noted[name] ??= performance.now(); };
const painted = (name) => requestAnimationFrame(() => requestAnimationFrame(() => note(name)));
new MutationObserver((_, self) => {
  const plot = document.querySelector(".plot");
  if (plot?.querySelector("svg")) painted("plot");
  if (plot?.dataset.drawn) { painted("drawn"); self.disconnect(); }
}).observe(document, { subtree: true, childList: true, attributes: true });
addEventListener("DOMContentLoaded", () => note("dom"));
new PerformanceObserver((list) => {
  const paint = list.getEntriesByName("first-contentful-paint")[0];
  if (paint) window.noted.text = paint.startTime;
}).observe({ type: "paint", buffered: true });
"""


def made_up_page(folder: Path) -> Path:
    """The page of a run of REQUESTS requests, as tests/conftest.py makes them up."""
    prompts = [
        Prompt(id=f"p/{i}", turns=(CODE * 3,), category=f"c{i % 8}") for i in range(REQUESTS // 5)
    ]
    run = _conftest().make_run(folder, prompts, say=_answer, arms=ARMS)
    page = folder / "report.html"
    command = [sys.executable, "-m", "specbench", "report", str(run.path)]
    subprocess.run([*command, "--format", "html", "-o", str(page)], check=True)
    return page


def _answer(arm: str, prompt: Prompt, _turn: int) -> str:
    return CODE + prompt.id + (" and so on" if arm == "vanilla" else " but not so")


def _conftest() -> ModuleType:
    path = Path(__file__).parents[1] / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location("made_up", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(browser: Browser, page: Path) -> dict[str, float]:
    """Open *page* once, in a window of 1280 x 800; when each of NOTED was there, in ms."""
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    opened.add_init_script(NOTE)
    opened.goto(page.as_uri())
    opened.wait_for_selector(".plot[data-drawn]")
    for _ in range(100):  # playwright's own waiting for a value needs eval, which the page forbids
        noted: dict[str, float] = opened.evaluate("window.noted")
        if noted.keys() >= NOTED.keys():
            break
        opened.wait_for_timeout(20)
    opened.close()
    return noted


def main() -> None:
    """Load each page in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--loads", type=int, default=5)
    asked = parser.parse_args()
    program = os.environ.get("SPECBENCH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)))
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = [page.resolve() for page in asked.pages] or [made_up_page(Path(folder))]
        browser = playwright.chromium.launch(
            executable_path=program, args=["--disable-gpu", *sandbox]
        )
        found: dict[Path, list[dict[str, float]]] = {page: [] for page in pages}
        for _ in range(asked.loads):
            for page in pages:
                found[page].append(load(browser, page))
        browser.close()
        for page, loads in found.items():
            print(f"{page.name}, {page.stat().st_size / 1e6:.1f} MB")
            for key, name in NOTED.items():
                each = [one[key] for one in loads]
                shown = " ".join(f"{ms:5.0f}" for ms in each)
                print(f"  {name:24} {shown}   median {statistics.median(each):5.0f} ms")


if __name__ == "__main__":
    main()
