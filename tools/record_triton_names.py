"""Record what the vLLM releases in Triton's containers take: specbench/triton/engine_names.json.

    python tools/record_triton_names.py vllm-0.7.0/ vllm-0.8.1/ ...

Each argument is an unpacked source archive of a release, oldest first; its PKG-INFO names it. A
name is recorded with the first and the last of these releases that knew it.
"""

import json
import re
import sys
from pathlib import Path

from specbench import vllm_names
from specbench.triton import versions

TARGET = Path(versions.__file__).with_name("engine_names.json")


def release_of(source: Path) -> str:
    """The release that the archive unpacked to *source* is."""
    found = re.search(r"^Version: (.+)$", (source / "PKG-INFO").read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{source}/PKG-INFO names no version")
    return found[1]


def spans(known: dict[str, frozenset[str]]) -> dict[str, list[str]]:
    """The first and the last release that knew each name; they must know it without a gap."""
    releases = list(known)
    found = {}
    for name in sorted(set().union(*known.values())):
        there = [release for release in releases if name in known[release]]
        first, last = there[0], there[-1]
        if releases.index(last) - releases.index(first) + 1 != len(there):
            raise SystemExit(f"{name} went and came back: {there}")
        found[name] = [first, last]
    return found


def main(sources: list[str]) -> None:
    """Write the spans over the releases."""
    fields, keys, methods = {}, {}, {}
    for folder in map(Path, sources):
        package, release = folder / "vllm", release_of(folder)
        names = vllm_names.installed(package)
        fields[release] = vllm_names.engine_fields(package)
        keys[release], methods[release] = names.speculation_keys, names.methods
        print(release, len(fields[release]), len(keys[release]), sorted(methods[release]))
    document = {
        "releases": list(fields),
        "engine_args": spans(fields),
        "speculation_keys": spans(keys),
        "methods": spans(methods),
    }
    text = json.dumps(document, indent=1)
    text = re.sub(r'\[\s+("[^"]+"),\s+("[^"]+")\s+\]', r"[\1, \2]", text)
    TARGET.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
