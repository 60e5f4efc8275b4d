"""Whose host answered: a ratio of times that two hosts took says nothing of speculation.

A request names the start of its engine, and the engine its host. A host that is not known (an old run,
a server that was up) is taken for the same one.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key
from specbench.records import EngineFacts

R = TypeVar("R", bound=Request)
Hosts = Mapping[int, str]  # of engine starts, where they are known


def hosts_of(engines: Iterable[EngineFacts]) -> dict[int, str]:
    """The host of each start of one arm's engine."""
    return {engine.start: engine.host for engine in engines if engine.host is not None}


def are_apart(one: Request, other: Request, hosts: Hosts, other_hosts: Hosts) -> bool:
    """Whether two requests were answered on different hosts."""
    here, there = hosts.get(one.start), other_hosts.get(other.start)
    return here is not None and there is not None and here != there


def on_one_host(
    baseline: Mapping[Key, R], arm: Mapping[Key, Request], hosts: Hosts, arm_hosts: Hosts
) -> Mapping[Key, R]:
    """*baseline* without what *arm* was answered on another host than; by keys, as pairs are made."""
    if len({*hosts.values(), *arm_hosts.values()}) < 2:
        return baseline
    return {
        key: one
        for key, one in baseline.items()
        if key not in arm or not are_apart(one, arm[key], hosts, arm_hosts)
    }
