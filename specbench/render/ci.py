"""A comparison where a CI shows it: JUnit XML, and GitHub's annotations and job summary."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable

from specbench.analysis.compare import RowChange
from specbench.render.columns import printable
from specbench.render.compare import Result, as_markdown, cells, headline, remarks, sides

ANNOTATIONS = 10  # of a kind in one step: GitHub drops those beyond without a word
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(result: Result) -> str:
    """JUnit XML: a test case for each condition on each row, or for each row without conditions.

    Rows that cannot be compared are skipped tests, and say why.
    """
    suite = ET.Element("testsuite", name="specbench compare")
    properties = ET.SubElement(suite, "properties")
    for line in (*sides(result.comparison), *result.comparison.versions):
        name, _, value = line.partition(": ") if ": " in line else ("version", "", line)
        ET.SubElement(properties, "property", name=_xml(name), value=_xml(value))
    skipped = failures = 0
    for judgement in result.judgements:
        name = f"{judgement.condition.text}: {judgement.row.row.name}"
        case = _test_case(suite, judgement.row, name)
        if judgement.failed:
            failures += 1
            failure = ET.SubElement(
                case, "failure", message=_xml(judgement.text), type="regression"
            )
            failure.text = _xml(_details(judgement.row))
        else:
            ET.SubElement(case, "system-out").text = _xml(judgement.text)
    for row in result.comparison.rows:
        whole = not (row.refused or row.base is None or row.new is None)
        if whole and result.judgements:
            continue
        case = _test_case(suite, row, row.row.name)
        if not whole:
            skipped += 1
            why = "; ".join(row.refused) or row.verdict
            ET.SubElement(case, "skipped", message=_xml(f"not compared: {why}"))
        else:
            ET.SubElement(case, "system-out").text = _xml(_details(row))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    suite.set("skipped", str(skipped))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _test_case(suite: ET.Element, row: RowChange, name: str) -> ET.Element:
    class_name = f"specbench.{row.row.prompt_set}.{row.row.arm}"
    return ET.SubElement(suite, "testcase", classname=_xml(class_name), name=_xml(name))


def _details(row: RowChange) -> str:
    return "\n".join(" ".join(cells(change)) for change in row.changes)


def _xml(text: str) -> str:
    """*text* without what XML 1.0 has no way to say."""
    return NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


# --- GitHub --------------------------------------------------------------------------------------


def annotations(result: Result) -> str:
    """Workflow commands: an error for each failed condition, a warning for what weakens the rest."""
    errors = [(one.condition.text, f"{one.row.row.name}: {one.text}") for one in result.failed]
    warnings = [
        (one.condition.text, f"{one.row.row.name}: {one.text}")
        for one in result.judgements
        if one.undecided
    ]
    warnings += [
        ("specbench compare", f"{row.row.name}: only in BASE")
        for row in result.comparison.rows
        if row.new is None
    ]
    told = (*result.comparison.versions, *result.comparison.notes)
    warnings += [
        ("specbench compare", line)
        for line in remarks(result)
        if not any(line.endswith(one) for one in told) and not line.startswith("times hold")
    ]
    lines = [*_commands("error", errors), *_commands("warning", warnings)]
    lines.append(_command("notice", "specbench compare", headline(result)))
    return "".join(f"{line}\n" for line in lines)


def _commands(kind: str, said: list[tuple[str, str]]) -> Iterable[str]:
    shown = said if len(said) <= ANNOTATIONS else said[: ANNOTATIONS - 1]
    for title, message in shown:
        yield _command(kind, title, message)
    if more := len(said) - len(shown):
        yield _command(kind, "specbench compare", f"and {more} more: see the job's summary")


def _command(kind: str, title: str, message: str) -> str:
    return f"::{kind} title={_property(printable(title))}::{_data(printable(message))}"


def _data(text: str) -> str:
    """As the runner unescapes a command's message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """As the runner unescapes a command's property."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def summary(result: Result) -> str:
    """What is appended to the job's summary."""
    return "## specbench compare\n\n" + as_markdown(result) + "\n"
