"""Checks of the machine meanwhile: was it left alone, and did its clock stay the same?"""

from specbench.analysis.hygiene import CaseFacts, PairFacts

THROTTLED = 0.01  # of the samples
SOMEBODY = 0.10  # of a core, on average over the time with a request in flight
UNNAMED = 0.01  # of all cores: what the kernel does for us, and its two clocks, are as far apart
SHOWN = 3  # processes that a finding names
CLOCK_GAP = 0.05
CLOCK_SAMPLES = 10  # of each arm; fewer do not tell a clock
CLOCK_ERRORS = 3.0  # standard errors that the gap must exceed too


def throttled(facts: CaseFacts) -> str | None:
    """The GPU's clock was held down by heat or by its power limit."""
    seen = facts.meanwhile
    if seen is None or seen.throttled_share is None or seen.throttled_share <= THROTTLED:
        return None
    heat = f"; up to {seen.max_temperature_c:.0f} °C" if seen.max_temperature_c else ""
    return (
        f"the GPU was throttled in {seen.throttled_share:.0%} of the samples "
        f"({', '.join(seen.throttled_by)}{heat})"
    )


def somebody_else(facts: CaseFacts) -> str | None:
    """Another process, many small ones together, or another guest of the hypervisor took more than
    a tenth of a core.

    No scan names small or short ones: what they took is all that the cores did less what was ours
    and what is named. Two arms that were troubled unlike need no check of their own, for they
    differ by more than the limit only where one of them is over it.
    """
    seen = facts.meanwhile
    if seen is None:
        return None
    busy = [one for one in seen.others if one.cores > SOMEBODY]
    found = [f"{one.name} (pid {one.pid}) {one.cores:.1f} cores" for one in busy[:SHOWN]]
    if len(busy) > SHOWN:
        found.append(f"{len(busy) - SHOWN} more")
    rest = (seen.others_cores or 0.0) - sum(one.cores for one in busy)
    if rest > max(SOMEBODY, UNNAMED * (facts.machine.get("cores") or 1)):
        found.append(f"{rest:.1f} cores for processes too small or short to name, or the kernel")
    if seen.stolen_cores is not None and seen.stolen_cores > SOMEBODY:
        found.append(f"the hypervisor for other guests {seen.stolen_cores:.1f} cores (steal)")
    return f"others computed meanwhile: {', '.join(found)}" if found else None


def other_clock(pair: PairFacts) -> str | None:
    """The device ran at another clock for the baseline than for the arm."""
    sides = (pair.baseline.meanwhile, pair.arm.meanwhile)
    one, other = (side.clock if side else None for side in sides)
    if one is None or other is None or one.device != other.device:
        return None
    gap, error = abs(other.mhz - one.mhz), (one.error_mhz**2 + other.error_mhz**2) ** 0.5
    few = min(one.samples, other.samples) < CLOCK_SAMPLES
    if few or gap <= CLOCK_GAP * one.mhz or gap <= CLOCK_ERRORS * error:
        return None
    return (
        f"the {one.device} ran at {other.mhz:,.0f} MHz on average, at {one.mhz:,.0f} MHz for the "
        f"baseline ({other.mhz / one.mhz - 1:+.0%})"
    )
