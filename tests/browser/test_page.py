"""The page in a real browser: safe whatever a model says, for everybody, and at once."""

import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from specbench.analysis.curves import curves
from specbench.analysis.rows import rows as make_rows
from specbench.records import Prompt
from specbench.render.html import page as as_page
from specbench.render.read import measured_cases
from specbench.render.report import Findings
from specbench.store import RunStore

pytestmark = [pytest.mark.browser, pytest.mark.engine]

Made = Callable[..., RunStore]
NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Fails where there is no Chromium: a skipped test would pass for one that was run."""
    found = os.environ.get("SPECBENCH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), "")
    if not found:
        pytest.fail("No Chromium here: apt-get install chromium, or set SPECBENCH_CHROMIUM.")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=[*QUIET, *sandbox])
        yield opened
        opened.close()


@dataclass
class Opened:
    """A page of a report, and all that it did which it must not do."""

    page: Page
    path: Path
    wrong: list[str] = field(default_factory=list)

    def wait(self, expression: str) -> None:
        """Until *expression* is true. Playwright's own way needs eval, which the page forbids."""
        for _ in range(200):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        pytest.fail(f"never came true: {expression}")

    def open_all(self, prompts: int = 20) -> None:
        """Scroll through everything, so that all is drawn, and open what is folded."""
        self.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        height = self.page.evaluate("document.documentElement.scrollHeight")
        for y in range(0, height + 1200, 500):
            self.page.evaluate(f"scrollTo(0, {y})")
            self.page.wait_for_timeout(30)
        self.page.wait_for_selector("#list details")
        self.page.evaluate(
            "[...document.querySelectorAll('#list details')]"
            f".slice(0, {prompts}).forEach(d => {{ d.open = true; }})"
        )
        self.wait(
            "[...document.querySelectorAll('.plot')]"
            ".every(p => p.closest('[hidden]') || p.dataset.drawn)"
        )


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a run, and fail in the end if it did what it must not."""
    pages: list[Opened] = []

    def build(
        store: RunStore,
        *,
        width: int = 1280,
        dark: bool = False,
        scripts: bool = True,
        before: str = "",
    ) -> Opened:
        """*before* is a script that is run before the page's own."""
        path = tmp_path / "report.html"
        if not path.exists():
            path.write_text(html_of(store), encoding="utf-8")
        page = browser.new_page(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
        )
        if before:
            page.add_init_script(before)
        one = Opened(page, path)
        page.on("console", lambda said: one.wrong.append(said.text) if _bad(said.type) else None)
        page.on("pageerror", lambda error: one.wrong.append(str(error)))
        page.on("dialog", lambda dialog: one.wrong.append(dialog.message))
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url == path.as_uri() or asked.url.startswith("data:")
                else one.wrong.append(asked.url)
            ),
        )
        page.goto(path.as_uri())
        pages.append(one)
        return one

    yield build
    for one in pages:
        one.page.close()
        assert one.wrong == []


def _bad(kind: str) -> bool:
    return kind in ("error", "warning")


def html_of(store: RunStore) -> str:
    """The page of a run."""
    cases = list(measured_cases(store))
    rows = make_rows(cases, baseline="vanilla", greedy=True)
    return as_page(store, cases, Findings(rows, curves(cases, baseline="vanilla")))


# --- runs to show ---

WORDS = "def fold(items):\n    total = 0\n    for item in items:\n        total += item\n    return total\n"
PROMPTS = [
    Prompt(
        id=f"HumanEval/{i}", turns=(f"Write function {i}.",), category=("coding", "maths")[i % 2]
    )
    for i in range(30)
]


def same(_arm: str, prompt: Prompt, _turn: int) -> str:
    return WORDS + prompt.id


def differs(arm: str, prompt: Prompt, turn: int) -> str:
    return same(arm, prompt, turn) + (" and so on" if arm == "vanilla" else " but not so")


def run_of_all_kinds(made_run: Made) -> RunStore:
    return made_run(
        PROMPTS, say=differs, arms={"eagle": (1, 2, 3), "ngram": (3,)}, concurrency=(1, 4)
    )


# --- hostile outputs -----------------------------------------------------------------------------

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "<svg/onload=window.hacked=1>",
    "<!--<script>",
    "</div></section></textarea></title></style><iframe srcdoc='<script>parent.hacked=1</script>'>",
    '"><a href="javascript:window.hacked=1">x</a>',
    "{{7*7}} ${7*7} %{x} <%= 7*7 %>",
    "\x00\x01\x1b[31m\x07\x7f\x9b2J",
    "\u202eright to left\u202c \u2066isolated\u2069 \u200f\u061c",
    "\u2028\u2029\ufeff\u200b\u2060\U000e0041",
    "a" + "\u0301" * 200,
    "x" * 5000,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d \u0645\u0631\u062d\u0628\u0627",
    "\r\n\ttab",
    "]]>&lt;script&gt;&#60;script&#62;",
]


def test_hostile_outputs_are_shown_and_never_taken_for_markup(made_run: Made, opened: Open) -> None:
    """Names, categories and prompts are hostile too; the first half differs between the arms."""
    prompts = [
        Prompt(id=f"{text[:80]} {i}", turns=(text,), category=text[:200])
        for i, text in enumerate(HOSTILE)
    ]
    odd = {prompt.id for prompt in prompts[::2]}

    def say(arm: str, prompt: Prompt, _turn: int) -> str:
        text = prompt.turns[0]
        return f"{text} {text}" if arm == "vanilla" or prompt.id not in odd else f"{text} else"

    one = opened(made_run(prompts, say=say))
    one.open_all()
    for plot in one.page.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
        plot.hover()
    assert one.page.evaluate("window.hacked") is None
    scripts = one.page.evaluate("[...document.scripts].map(s => s.id).sort()")
    assert scripts == ["", "", "", "figures", "indexes", "plotly", "texts-0-0"]
    inside = "#list :is(script, img, svg, iframe, a, style, object, embed, link, meta)"
    assert one.page.query_selector_all(inside) == []
    links = one.page.eval_on_selector_all("a", "all => all.map(a => a.getAttribute('href'))")
    assert [link for link in links if link and not link.startswith(("#", "https://"))] == []
    assert one.page.locator("#list .text").count() == 3 * len(HOSTILE)
    names = "all => all.map(name => name.textContent)"
    ticks = one.page.eval_on_selector_all('[data-figure="category-0"] .ytick text', names)
    assert ticks[:2] == [
        "</script><script>window.hacked = …",
        '<img src=x onerror="window.hacked…',
    ]


def test_what_cannot_be_seen_is_made_visible(made_run: Made, opened: Open) -> None:
    text = "a\x00b\x1b[31mc\x7fd\u202ee\u200bf\x85g"
    one = opened(made_run([Prompt(id="p", turns=(text,))], say=lambda *_: text))
    one.open_all()
    shown = one.page.inner_text("#list .asked .text")
    assert shown == "a␀b␛[31mc␡dU+202EeU+200BfU+0085g"


def test_a_text_is_there_to_the_letter(made_run: Made, opened: Open) -> None:
    text = "if a < b && c > d: print(\"&amp;\", '<b>')\n\tdone  twice  \U0001f600 \u4f60\u597d"
    one = opened(made_run([Prompt(id="p", turns=(text,))], say=lambda *_: text))
    one.open_all()
    answers = one.page.eval_on_selector_all("#list .text", "all => all.map(e => e.textContent)")
    assert answers == [text] * 3


# --- what it shows -------------------------------------------------------------------------------


def test_all_plots_are_drawn_and_follow_the_theme(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run))
    one.open_all()
    count = "document.querySelectorAll('[data-scene=\"0\"] .plot').length"
    assert one.page.evaluate(count) == 12 - 1  # prompts have one turn
    ink = "getComputedStyle(document.querySelector('#speedup .xtick text')).fill"
    light = one.page.evaluate(ink)
    one.page.emulate_media(color_scheme="dark")
    one.wait("document.querySelector('#speedup .plot').dataset.drawn === 'dark'")
    assert one.page.evaluate(ink) != light
    one.page.click("#theme")
    one.wait("document.querySelector('#speedup .plot').dataset.drawn === 'light'")
    assert one.page.evaluate(ink) == light


def test_a_plot_is_only_drawn_when_it_comes_near(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run))
    one.page.wait_for_timeout(500)
    far = "document.querySelector('#concurrency [data-scene=\"0\"] .plot').dataset.drawn"
    assert one.page.evaluate(far) is None
    one.page.evaluate("document.querySelector('#concurrency').scrollIntoView()")
    one.wait(f"{far} === 'light'")


def test_another_condition_is_a_choice_away(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run))
    one.page.select_option("#scene", "1")
    one.wait("document.querySelector('#speedup [data-scene=\"1\"] .plot').dataset.drawn")
    assert one.page.is_hidden('#speedup [data-scene="0"]')


def test_the_table_sorts_and_filters(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run))
    column = one.page.eval_on_selector_all(
        "#rows thead button", "all => all.findIndex(b => b.textContent === 'TPOT ms')"
    )
    button = one.page.locator("#rows thead button").nth(column)
    values = f"[...document.querySelectorAll('#rows tbody tr')].map(r => +r.children[{column}].dataset.v)"
    button.click()
    assert one.page.evaluate(values) == sorted(one.page.evaluate(values))
    assert button.locator("..").get_attribute("aria-sort") == "ascending"
    button.click()
    assert one.page.evaluate(values) == sorted(one.page.evaluate(values), reverse=True)
    one.page.fill("#filter", "ngram")
    assert one.page.inner_text("#table-count") == "2 of 10 rows"
    assert one.page.locator("#rows tbody tr:visible").count() == 2


def test_the_first_difference_is_marked_where_it_is(made_run: Made, opened: Open) -> None:
    one = opened(made_run(PROMPTS[:2], say=differs))
    one.page.locator("#prompts").scroll_into_view_if_needed()
    one.page.locator("#list summary").first.click()
    one.page.wait_for_selector("#list mark")
    marks = one.page.eval_on_selector_all("#list mark", "all => all.map(m => m.textContent)")
    assert marks == ["a", "b"]
    assert one.page.locator("#list .first").count() == 2
    assert "differs from token" in one.page.inner_text("#list summary >> nth=0")


def test_the_drafts_are_shown_in_the_text(made_run: Made, opened: Open) -> None:
    store = made_run(PROMPTS[:1], say=same)
    record = next(iter(store.requests("eagle-k3.c1")))
    assert record.spec is not None
    one = opened(store)
    one.page.locator("#prompts").scroll_into_view_if_needed()
    one.page.select_option("#arm", label="eagle k=3")
    one.page.locator("#list summary").first.click()
    one.page.wait_for_selector("#list .step")
    steps = one.page.locator("#list .pair > div").nth(1).locator(".step")
    titles = steps.evaluate_all("all => all.map(s => s.title)")
    assert titles[0] == "the prefill's token"
    assert titles[1:] == [
        f"one step: {took} of 3 drafted tokens accepted"
        for took in record.spec.per_step_accepted or ()
    ]
    texts = steps.evaluate_all("all => all.map(s => s.textContent.length)")
    assert texts == list(record.chunk_chars or ())


# --- for everybody -------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)], ids=["phone", "desk"])
def test_axe_finds_nothing_serious(made_run: Made, opened: Open, width: int, dark: bool) -> None:
    one = opened(run_of_all_kinds(made_run), width=width, dark=dark)
    one.open_all(prompts=2)
    one.page.evaluate("scrollTo(0, 0)")
    found = Axe().run(one.page).response["violations"]
    serious = [
        (rule["id"], [node["html"][:200] for node in rule["nodes"][:3]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_a_phone_scrolls_in_one_direction_only(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run), width=390)
    one.open_all()
    wide = "document.documentElement.scrollWidth - innerWidth"
    assert one.page.evaluate(wide) <= 0


def test_keys_reach_the_answer_the_table_and_the_outputs(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run))
    one.page.keyboard.press("Tab")
    assert one.page.evaluate("document.activeElement.className") == "skip"
    one.page.keyboard.press("Enter")
    assert one.page.evaluate("document.activeElement.id") == "main"
    one.page.locator("#prompts").scroll_into_view_if_needed()
    one.page.locator("#list summary").first.focus()
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector("#list .text")
    assert one.page.locator("#list .text").count() == 3
    one.page.keyboard.press("Tab")
    assert one.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Prompt"


def test_without_scripts_the_answer_and_all_figures_are_there_in_words(
    made_run: Made, opened: Open
) -> None:
    one = opened(run_of_all_kinds(made_run), scripts=False)
    assert "x as fast" in one.page.inner_text("h1")
    assert "need JavaScript" in one.page.inner_text("noscript")
    assert one.page.locator("#speedup table").count() == 2
    assert one.page.locator("#speedup .still:visible path").count() == 4 + 2  # markers, and keys


# --- the first plot, before Plotly ---

EACH_FRAME = """
window.frames_seen = [];
const look = () => {
  const plot = document.querySelector("#speedup .plot");
  if (plot?.children.length || window.frames_seen.length) {
    window.frames_seen.push({
      still: Boolean(plot.querySelector(".still path")),
      drawn: Boolean(plot.querySelector(".main-svg")),
      plotly: Boolean(window.Plotly),
    });
  }
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""


def test_the_first_plot_is_there_before_plotly_and_is_never_gone(
    made_run: Made, opened: Open
) -> None:
    """In each frame there is one plot: the still one until Plotly's takes its place."""
    one = opened(run_of_all_kinds(made_run), before=EACH_FRAME)
    one.wait("document.querySelector('#speedup .plot').dataset.drawn")
    one.page.wait_for_timeout(100)
    frames = one.page.evaluate("window.frames_seen")
    assert frames[0] == {"still": True, "drawn": False, "plotly": False}
    assert frames[-1] == {"still": False, "drawn": True, "plotly": True}
    assert all(frame["still"] != frame["drawn"] for frame in frames)


WITHOUT_PLOTLY = "Object.defineProperty(window, 'Plotly', { get: () => undefined, set: () => {} });"


def test_where_plotly_cannot_run_the_first_plot_stays(made_run: Made, opened: Open) -> None:
    one = opened(run_of_all_kinds(made_run), before=WITHOUT_PLOTLY)
    one.page.evaluate("document.querySelector('#acceptance').scrollIntoView()")
    sorry = "document.querySelector('#acceptance .plot').textContent"
    one.wait(f"{sorry}.includes('could not be drawn')")
    assert one.page.locator("#speedup .still:visible").count() == 1
    assert "could not" not in one.page.inner_text("#speedup")
    assert one.wrong
    assert all("reading 'react'" in said for said in one.wrong)
    one.wrong.clear()


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)], ids=["phone", "desk"])
def test_the_still_plot_stands_where_plotlys_will(
    made_run: Made, opened: Open, width: int, dark: bool
) -> None:
    """Each marker within 12 px, in the same colour, and nothing beyond the plot's box."""
    store = run_of_all_kinds(made_run)
    spots = """all => all.map(path => {
        const [box, plot] = [path, path.closest(".plot")].map(e => e.getBoundingClientRect());
        const [x, y] = [box.x + box.width / 2 - plot.x, box.y + box.height / 2 - plot.y];
        return [x, y, getComputedStyle(path).fill];
    })"""
    still = opened(store, width=width, dark=dark, before=WITHOUT_PLOTLY)
    first = '[data-figure="speedup-0"]'
    before = still.page.eval_on_selector_all(f"{first} .still > svg > svg > path", spots)
    box = still.page.locator(first).bounding_box()
    assert box is not None
    for part in still.page.locator(f"{first} .still *").all():
        inside = part.bounding_box()
        assert inside is not None
        assert inside["x"] >= box["x"] - 1
        assert inside["x"] + inside["width"] <= box["x"] + box["width"] + 1
        assert inside["y"] + inside["height"] <= box["y"] + box["height"] + 1
    still.page.wait_for_timeout(300)
    still.wrong.clear()
    drawn = opened(store, width=width, dark=dark)
    drawn.page.evaluate("document.querySelector('#speedup').scrollIntoView()")
    drawn.wait(f"document.querySelector('{first}').dataset.drawn")
    after = drawn.page.eval_on_selector_all(f"{first} .scatterlayer .point", spots)
    assert len(before) == len(after) == 4
    for (x1, y1, one), (x2, y2, other) in zip(before, after, strict=True):
        assert abs(x1 - x2) < 12
        assert abs(y1 - y2) < 12
        assert one == other


# --- at once -------------------------------------------------------------------------------------

REQUESTS, SECOND_MS = 10_000, 1000
TIMES = """() => {
    const page = performance.getEntriesByType("navigation")[0];
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    return [page.domContentLoadedEventEnd, paint.startTime];
}"""


def test_10_000_requests_open_in_under_a_second(
    made_run: Made, opened: Open, browser: Browser
) -> None:
    """The median of five, until it can be read and until all of it is there."""
    many = [
        Prompt(id=f"p/{i}", turns=(WORDS * 3,), category=f"c{i % 8}") for i in range(REQUESTS // 5)
    ]
    store = made_run(many, say=differs, arms={"eagle": (1, 2, 3), "ngram": (3,)})
    path = opened(store).path
    assert "are left out" not in path.read_text(encoding="utf-8")
    loaded: list[float] = []
    painted: list[float] = []
    for _ in range(5):
        page = browser.new_page()
        page.goto(path.as_uri())
        Opened(page, path).wait("performance.getEntriesByName('first-contentful-paint').length")
        for times, value in zip((loaded, painted), page.evaluate(TIMES), strict=True):
            times.append(value)
        page.close()
    print(f"DOM {sorted(loaded)} ms, first paint {sorted(painted)} ms, {path.stat().st_size} B")
    assert statistics.median(loaded) < SECOND_MS
    assert statistics.median(painted) < SECOND_MS
