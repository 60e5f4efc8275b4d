"""The page put together: figures, table, prompts and provenance into one HTML file."""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from specbench import __version__
from specbench.analysis.cases import Condition, MeasuredCase
from specbench.analysis.hygiene.checks import CHECKS, PAIR_CHECKS
from specbench.render.columns import MISSING, columns
from specbench.render.html import summary
from specbench.render.html.figures import (
    Absent,
    Figure,
    Scene,
)
from specbench.render.html.prompts import (
    MOST_CHARACTERS,
    MOST_REQUESTS,
    Budget,
    library,
    prompts_of,
)
from specbench.render.html.provenance import provenance
from specbench.render.html.published import beside
from specbench.render.html.sections import Section, sections_of
from specbench.render.html.still import AT_ONCE, still
from specbench.render.report import Findings, footer
from specbench.render.words import beside_lines, explanations, precision_lines
from specbench.store import RunStore

FLAGS_IN_SIGHT, REASONS_IN_SIGHT = 8, 5  # the others are a click away
# Before anything is painted, so that a dark page does not begin light.
THEME = (
    "document.documentElement.dataset.theme = "
    'matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";'
)


def page(store: RunStore, cases: Iterable[MeasuredCase], findings: Findings) -> str:
    """The whole page. *findings* are those of the whole run, not of its parts."""
    scenes = _scenes(store, list(cases), findings)
    budget = Budget()
    libraries = [library(scene, budget, _json) for scene in scenes]
    indexes = [index for index, _ in libraries]
    figures: dict[str, Any] = {}
    sections = [_section(about, scenes, figures) for about in sections_of(findings.rows)]
    why, more = _reasons(store, findings)
    css, js, plotly = _file("page.css"), _file("page.js"), _plotly()
    return _template().render(
        csp=_policy([THEME, js, plotly]),
        theme=Markup(THEME),
        css=Markup(css),
        js=Markup(js),
        plotly=Markup(plotly),
        run=store.document,
        version=__version__,
        unfinished=store.status() is None,
        headlines=[_divided(line) for line in findings.headlines],
        scenes=[
            {
                "name": scene.name,
                "tiles": summary.tiles(scene),
                "published": beside(scene.config, scene.condition.max_tokens),
            }
            for scene in scenes
        ],
        why=why,
        more=more,
        flagged=summary.flagged(findings.rows),
        in_sight=FLAGS_IN_SIGHT,
        problems=summary.problems(findings.rows),
        checks=len(CHECKS) + len(PAIR_CHECKS),
        sections=[section for section in sections if _has_figures(section)],
        absent=[
            (section["title"], list(dict.fromkeys(_whys(section))))
            for section in sections
            if not _has_figures(section)
        ],
        table=summary.table(findings.rows),
        meanings=footer(store.document, columns(findings.rows)),
        prompts=prompts_of(indexes),
        left_out=budget.left_out,
        most=MOST_REQUESTS,
        most_characters=MOST_CHARACTERS,
        figures=_json(figures),
        indexes=_json(indexes),
        blocks=[
            (f"texts-{i}-{j}", block)
            for i, (_, blocks) in enumerate(libraries)
            for j, block in enumerate(blocks)
        ],
        provenance=provenance(store),
    )


def _reasons(store: RunStore, findings: Findings) -> tuple[list[str], list[str]]:
    """Why it is so: what is in sight, and what is a click away where there is much of it."""
    curves = explanations([], findings.curves)
    first = [
        *precision_lines(store.document["config"].get("precision"), findings.rows),
        *beside_lines(findings.rows),
        *curves,
    ]
    rest = [line for line in explanations(findings.rows, findings.curves) if line not in curves]
    if len(first) + len(rest) <= REASONS_IN_SIGHT:
        return first + rest, []
    return first, rest


def _divided(headline: str) -> tuple[str, str]:
    """A headline without and within its brackets."""
    answer, bracket, details = headline.partition(" (")
    return answer, f"{bracket}{details}".strip()


def _scenes(store: RunStore, cases: Sequence[MeasuredCase], findings: Findings) -> list[Scene]:
    by_condition: dict[Condition, dict[str, list[MeasuredCase]]] = {}
    for case in cases:
        by_condition.setdefault(case.condition, {}).setdefault(case.arm, []).append(case)
    labels = list(dict.fromkeys(case.label for case in cases if case.k))
    return [
        Scene(
            condition=condition,
            labels=labels,
            rows=[row for row in findings.rows if row.condition == condition],
            curves=[curve for curve in findings.curves if curve.condition == condition],
            cases=arms,
            config=store.document["config"],
        )
        for condition, arms in by_condition.items()
    ]


def _section(section: Section, scenes: Sequence[Scene], figures: dict[str, Any]) -> dict[str, Any]:
    """A section's words and tables; what Plotly draws goes into *figures*."""
    of_scenes = []
    for place, scene in enumerate(scenes):
        made = [draw(scene) for draw in section.draws]
        shown = []
        for figure in (one for one in made if isinstance(one, Figure)):
            name = f"{figure.key}-{place}"
            figures[name] = {
                "data": figure.traces,
                "layout": figure.layout,
                "height": figure.height,
            }
            at_once = still(figure) if figure.key == AT_ONCE else ""
            shown.append(asdict(figure) | {"id": name, "still": at_once})
        absent = [one.why for one in made if isinstance(one, Absent)]
        of_scenes.append({"figures": shown, "absent": absent})
    words = {name: getattr(section, name) for name in ("key", "short", "title", "reading")}
    return words | {"scenes": of_scenes}


def _has_figures(section: Mapping[str, Any]) -> bool:
    return any(scene["figures"] for scene in section["scenes"])


def _whys(section: Mapping[str, Any]) -> list[str]:
    return [why for scene in section["scenes"] for why in scene["absent"]]


# --- the file ------------------------------------------------------------------------------------


@functools.cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["missing"] = MISSING
    return environment.from_string(_file("page.html.j2"))


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


@functools.cache
def _plotly() -> str:
    """Plotly's script, as a browser reads it out of the page (for its hash)."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    # Within a string of JavaScript the backslash means nothing; in HTML it keeps the element open.
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE)


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy: these scripts run, no other does, and nothing is fetched."""
    hashes = " ".join(map(_hash, scripts))
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _json(value: Mapping[str, Any] | Sequence[Any]) -> Markup:
    """*value* for a script element of type application/json: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
