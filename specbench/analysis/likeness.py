"""May two runs be compared at all? What is unlike between them, and which versions differ.

Versions are what a nightly job wants to see: they are said. Other prompts and other hardware are
another measurement: they are refused.
"""

from collections.abc import Mapping
from typing import Any, Literal

from specbench.analysis.hygiene.setup import machine_differences
from specbench.analysis.snapshot import Snapshot, SnapshotRow

Kind = Literal["prompts", "sampling", "args", "hardware"]
KINDS: tuple[Kind, ...] = ("prompts", "sampling", "args", "hardware")
ALLOWABLE: tuple[Kind, ...] = (
    "sampling",
    "args",
    "hardware",
)  # without its prompts nothing is paired
SHOWN = 3


def unlike(
    base: Snapshot, new: Snapshot, row: SnapshotRow, other: SnapshotRow
) -> list[tuple[Kind, str]]:
    """What keeps two rows of one name from being compared, with its kind."""
    found: list[tuple[Kind, str | None]] = [
        ("prompts", _other_prompts(base, new, row, other)),
        ("sampling", _differences("sampling", base.sampling, new.sampling)),
        ("args", _other_setup(base, new, row)),
        ("hardware", _listed("hardware", machine_differences(base.hardware, new.hardware))),
    ]
    return [(kind, why) for kind, why in found if why]


def versions(base: Snapshot, new: Snapshot) -> list[str]:
    """The versions that differ, in words."""
    names = dict.fromkeys((*base.versions, *new.versions))
    return [
        f"{name} {base.versions.get(name, 'none')} in BASE, {new.versions.get(name, 'none')} in NEW"
        for name in names
        if base.versions.get(name) != new.versions.get(name)
    ]


def speculation(base: Snapshot, new: Snapshot) -> list[str]:
    """What is said of a label in both runs and is not the same: another draft head, for one."""
    found = []
    for label in base.speculation.keys() & new.speculation.keys():
        of_label = _differences(label, base.speculation[label], new.speculation[label])
        found += [of_label] if of_label else []
    return sorted(found)


def _other_prompts(
    base: Snapshot, new: Snapshot, row: SnapshotRow, other: SnapshotRow
) -> str | None:
    one, two = base.prompt_sets[row.prompt_set], new.prompt_sets[row.prompt_set]
    if not one.prompts or not two.prompts:
        return f"the prompts of {row.prompt_set} are not known: they were imported without"
    if one.sha256 != two.sha256:
        return (
            f"other prompts: {row.prompt_set} is {one.prompts} prompts ({one.sha256[:12]}) in BASE, "
            f"{two.prompts} ({two.sha256[:12]}) in NEW"
        )
    # Some that failed make another total; that is told by `missing`.
    tokens = (row.prompt_tokens, other.prompt_tokens)
    if not row.missing and not other.missing and None not in tokens and tokens[0] != tokens[1]:
        return (
            f"the same prompts became {tokens[0]} tokens in BASE, {tokens[1]} in NEW: another chat "
            "template or tokenizer?"
        )
    return None


def _other_setup(base: Snapshot, new: Snapshot, row: SnapshotRow) -> str | None:
    if base.model != new.model:
        return f"other models: {base.model} in BASE, {new.model} in NEW"
    if base.client != new.client:
        return f"other load generators: {base.client} in BASE, {new.client} in NEW"
    setups = [
        next((one.values for one in side.setups if row.arm in one.arms), None)
        for side in (base, new)
    ]
    if setups[0] is None or setups[1] is None:
        return None  # a replay, or a server that does not say
    return _differences("engine", setups[0], setups[1])


def _differences(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return _listed(
        what,
        [f"{n}: {one.get(n, 'not set')} against {other.get(n, 'not set')}" for n in names],
    )


def _listed(what: str, found: list[str]) -> str | None:
    if not found:
        return None
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"other {what}: {'; '.join(found[:SHOWN])}{more}"
