"""All the layouts that prompt files come in, and which one a record is of.

A new layout is one entry in a dict of its family. docs/prompts.md says what each of them keeps.
"""

from specbench.prompts.bench_layouts import BENCH_LAYOUTS
from specbench.prompts.chat_layouts import CHAT_LAYOUTS
from specbench.prompts.fields import Malformed, Record
from specbench.prompts.layout import Layout
from specbench.prompts.perf_layouts import PERF_LAYOUTS

LAYOUTS: dict[str, Layout] = PERF_LAYOUTS | BENCH_LAYOUTS | CHAT_LAYOUTS


def detect(record: Record) -> str:
    """The layout of a record; Malformed when none or more than one claims it."""
    claiming = [name for name, layout in LAYOUTS.items() if layout.claims(record)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        raise Malformed(f"could be {' or '.join(claiming)}; say which with --from")
    has = ", ".join(f"`{key}`" for key in list(record)[:8]) or "nothing"
    known = "no `text`, `text_input`, `prompt`, `turns`, `conversations` or `messages`"
    raise Malformed(f"{known}; it has {has} (--column names the one with the prompts)")
