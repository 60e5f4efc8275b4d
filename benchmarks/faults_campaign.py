"""One job of the kill campaign: runs begun, killed, resumed and killed again until they are done."""

import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults_checks as checks
import faults_place as places
import faults_process as processes
from faults_tally import Tally

GONE_WITHIN_S = 10.0
TELL_EVERY_S = 60.0
MOST_ATTEMPTS = 80  # at one run; more of them and it makes no headway
SIGNALS = {
    "INT": signal.SIGINT,
    "TERM": signal.SIGTERM,
    "HUP": signal.SIGHUP,
    "KILL": signal.SIGKILL,
}
FORKED_SHARE = 0.9  # of replayed attempts; the others start an interpreter
SECOND_SHARE = 0.25  # of signals that are followed by another
AFTER_FIRST_SHARE = 0.4  # of kills of engines, whose start takes most of a run
AFTER_FIRST_S = 5.0
EARLY_SHARE, EARLY = 0.4, 0.35  # and those in the first part of a run, which is that start
DEADLY = ("INT", "TERM", "HUP", "KILL", "pty")


@dataclass
class Attempt:
    """One start of specbench on a run's folder, and what is to happen to it."""

    run: Path
    running: processes.Running
    what: str
    forked: bool
    began: dict[str, bytes]  # the requests.jsonl of before

    @property
    def has_measured(self) -> bool:
        """Whether a request has been stored since it began."""
        return checks.requests_of(self.run) != self.began

    @property
    def said(self) -> str:
        """Its standard output and error so far."""
        return self.running.err.read_text(encoding="utf-8", errors="replace")


@dataclass
class Campaign:
    """One job: its place, its dice and what it found."""

    place: places.Place
    rng: random.Random
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    tally: Tally = field(default_factory=Tally)
    lengths_s: dict[tuple[str, bool], float] = field(default_factory=dict)
    references: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    token: str = ""
    told_s: float = 0.0

    def run(self, kills: int, seconds: float) -> Tally:
        """Begin runs and kill them until *kills* happened or the time is over."""
        deadline_s, number = time.monotonic() + seconds, 0
        while self.tally.kills < kills and time.monotonic() < deadline_s:
            self._one_run(f"r{number}", kills, deadline_s)
            number += 1
        return self.tally

    # --- one run ---------------------------------------------------------------------------------

    def _one_run(self, run_id: str, kills: int, deadline_s: float) -> None:
        variant = self.rng.choice(list(self.place.variants))
        reference = self._reference(self.place.variants[variant])
        env = self.place.environment(self.rng)
        run = self._folder(run_id)
        if self.place.witness:
            self.place.witness.unlink(missing_ok=True)
        for _ in range(MOST_ATTEMPTS):
            is_over = self.tally.kills >= kills or time.monotonic() > deadline_s
            if self._attempt(run, variant, env, disturb=not is_over) == 0:
                break
            if time.monotonic() > self.told_s + TELL_EVERY_S:
                self.told_s = time.monotonic()
                self.tell(f"  so far {dict(self.tally.times)}, {self.tally.runs} runs finished")
        else:
            self._fault("done", f"stuck: {run_id} is not done after {MOST_ATTEMPTS} attempts")
            return
        sent = checks.answered(self.place.witness) if self.place.witness else None
        found = checks.finished(run, reference, sent, whole=self._is_replay)
        for fault in found:
            self._fault("done", f"{run_id} ({variant}): {fault}")
        self.tally.runs += 1
        if not found:
            shutil.rmtree(run)

    def _reference(self, variant: str) -> list[dict[str, Any]]:
        """The table of a run of *variant* that nobody disturbs; how long that takes is noted."""
        if variant not in self.references:
            for forked in (True, False) if self._is_replay else (False,):
                run_id = f"undisturbed-{variant}-{forked}"
                self.lengths_s[(variant, forked)] = self._undisturbed(variant, run_id, forked)
            self.references[variant] = checks.table(self._folder(run_id), whole=self._is_replay)
        return self.references[variant]

    def _undisturbed(self, variant: str, run_id: str, forked: bool) -> float:
        arguments = ["run", "--config", f"{variant}.yaml", "--run-id", run_id]
        env = self.place.environment(random.Random(0))
        running = self._start(arguments, env, forked)
        while (code := running.poll()) is None:
            time.sleep(0.005)
        length_s = time.monotonic() - running.began_s
        said = running.err.read_text(encoding="utf-8", errors="replace")
        assert code == 0, f"an undisturbed run ended with {code}:\n{said[-3000:]}"
        left = processes.wait_until_gone(running, self.token, GONE_WITHIN_S)
        assert not left, [processes.command_of(one) for one in left]
        return length_s

    @property
    def _is_replay(self) -> bool:
        return self.place.kind == "replayed"

    def _folder(self, run_id: str) -> Path:
        return self.place.folder / "results" / run_id

    def _start(
        self,
        arguments: list[str],
        env: dict[str, str],
        forked: bool,
        terminal: str | None = None,
        ignored: tuple[int, ...] = (),
    ) -> processes.Running:
        self.token = f"f{self.rng.getrandbits(64):x}"
        err = self.place.folder / "said"
        err.write_bytes(b"")
        from specbench.__main__ import main

        return processes.start(
            arguments if forked else ["-m", "specbench", *arguments],
            cwd=self.place.folder,
            env={**env, processes.TOKEN: self.token},
            err=err,
            terminal=terminal,
            main=main if forked else None,
            ignored=ignored,
        )

    def _fault(self, what: str, fault: str) -> None:
        self.tally.faults.append((what, fault))
        self.tell(f"  {what}: {fault[:4000]}")

    # --- one attempt -----------------------------------------------------------------------------

    def _attempt(
        self, run: Path, variant: str, env: dict[str, str], *, disturb: bool
    ) -> int | None:
        """Start or go on with *run*, do something to it, look at what is left; its exit code."""
        rng = self.rng
        arguments = ["run", "--config", f"{variant}.yaml", "--run-id", run.name]
        if (run / "run.json").exists():
            arguments = ["run", "--resume", f"results/{run.name}"]
        forked = self._is_replay and rng.random() < FORKED_SHARE
        what = rng.choice(DEADLY)
        if rng.random() < (0.04 if self._is_replay else 0.3):
            what = "nohup" if self._is_replay else rng.choice(("child", "child", "lid", "nohup"))
        on_terminal = what in ("pty", "nohup") or rng.random() < 0.2
        terminal = rng.choice(("all", "but stderr")) if on_terminal else None
        ignored = (signal.SIGHUP,) if what == "nohup" else ()
        before = checks.requests_of(run)
        running = self._start(arguments, env, forked, terminal, ignored)
        attempt = Attempt(run, running, what, forked, before)
        length_s = self.lengths_s[(self.place.variants[variant], forked)]
        if disturb:
            self._wait(attempt, rng.uniform(0, length_s))
        else:
            self._wait_for_the_end(running)
        if running.poll() is None and not disturb:
            self._fault("done", f"stuck: not done after {self.place.limit_s} s: {attempt.said}")
            running.kill(signal.SIGABRT)  # says where it stands: PYTHONFAULTHANDLER
            processes.end_all(processes.wait_until_gone(running, self.token, GONE_WITHIN_S))
            self.tell(attempt.said[-6000:])
        elif running.poll() is None:
            self._disturb(attempt)
        else:
            self._look(attempt, "nothing", time.monotonic(), {0, 3})
        code = running.poll()
        running.close_terminal()
        return code

    def _wait(self, attempt: Attempt, wait_s: float) -> None:
        """Until the moment has come: at any time of the run, or soon after its first request."""
        roll, later_s = self.rng.random(), self.rng.uniform(0, AFTER_FIRST_S)
        after_first = not self._is_replay and roll < AFTER_FIRST_SHARE
        if after_first:
            wait_s = self.place.limit_s
        elif not self._is_replay and roll < AFTER_FIRST_SHARE + EARLY_SHARE:
            wait_s *= EARLY
        end_s = attempt.running.began_s + wait_s
        while attempt.running.poll() is None and time.monotonic() < end_s:
            time.sleep(0.002 if self._is_replay else 0.01)
            if after_first and attempt.has_measured:
                after_first, end_s = False, time.monotonic() + later_s

    def _wait_for_the_end(self, running: processes.Running) -> None:
        """Until it ends by itself; it may still run when it has taken far too long."""
        end_s = time.monotonic() + self.place.limit_s
        while running.poll() is None and time.monotonic() < end_s:
            time.sleep(0.01)

    def _disturb(self, attempt: Attempt) -> None:
        """Do it, and look at what comes of it."""
        running, rng, what = attempt.running, self.rng, attempt.what
        counted = self._count(attempt) if self.place.kind == "real" else {}
        self.tally.measuring += attempt.has_measured
        self.tally.forks += attempt.forked
        before = checks.requests_of(attempt.run)
        done_ns = time.monotonic_ns()
        if what == "child" and (victim := processes.kill_one_below(running, rng)):
            what = f"child: {victim}"
        elif what == "lid":
            processes.close_the_lid(rng.uniform(0.2, 2))
        elif what in ("pty", "nohup"):
            running.close_terminal()
        else:
            what = "KILL" if what == "child" else what
            running.kill(SIGNALS[what], group=what == "INT" and rng.random() < 0.5)
        self.tally.times[what] += 1
        allowed = {0, 130, *(-number for number in SIGNALS.values())}
        if what in DEADLY:
            if rng.random() < SECOND_SHARE:
                self._second_signal(running)
            self._look(attempt, what, done_ns / 1e9, allowed)
            self.tally.late += running.poll() == 0
        else:  # it should go on, and end by itself
            self._wait_for_the_end(running)
            if running.poll() is None:
                running.kill(signal.SIGABRT)
            self._look(attempt, what, time.monotonic(), {0} if what == "nohup" else {0, 3})
        self._compare(attempt, what, before, done_ns, counted)

    def _look(self, attempt: Attempt, what: str, since_s: float, allowed: set[int]) -> None:
        """Wait for the end of all processes; look at the exit code and at what was said."""
        running = attempt.running
        left = processes.wait_until_gone(
            running, self.token, since_s + GONE_WITHIN_S - time.monotonic()
        )
        if left:
            commands = [processes.command_of(one) for one in left]
            running.kill(signal.SIGABRT)  # says where it stands: PYTHONFAULTHANDLER
            time.sleep(0.5)
            self._fault(
                what, f"orphans: {commands} after {GONE_WITHIN_S} s; {attempt.said[-3000:]}"
            )
            processes.end_all(left)
        gone_s = time.monotonic() - since_s
        self.tally.slowest_s[what] = max(gone_s, self.tally.slowest_s.get(what, 0))
        ours, pythons = checks.tracebacks(attempt.said)
        self.tally.pythons += pythons
        for text in ours:
            self._fault(what, f"traceback: {text}")
        code = running.poll()
        if code not in allowed and not pythons:
            self._fault(what, f"wrong exit: {code} of {attempt.run.name}: {attempt.said[-3000:]}")
        for path in (self.place.folder / "tmp").iterdir():
            self.tally.temporary[what] += 1
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _compare(
        self,
        attempt: Attempt,
        what: str,
        before: dict[str, bytes],
        done_ns: int,
        counted: dict[tuple[str, int], int],
    ) -> None:
        """Hold the run's folder against what witnesses say."""
        faults = list(checks.after_a_kill(attempt.run, before))
        if (attempt.run / "run.json").exists() and self.place.witness and what in DEADLY:
            sent = checks.answered(self.place.witness)
            began_ns = round(attempt.running.began_s * 1e9)
            losses, oldest_s = checks.unstored(attempt.run, sent, began_ns, done_ns)
            self.tally.oldest_s = max(self.tally.oldest_s, oldest_s)
            faults += losses
        if counted:
            faults += checks.uncounted(attempt.run, counted, warm_up=1)
        for fault in faults:
            self._fault(what, fault)

    # --- what can happen -------------------------------------------------------------------------

    def _second_signal(self, running: processes.Running) -> None:
        """An impatient user, or a service manager that sends two."""
        pause_s = self.rng.choice((self.rng.uniform(0, 0.05), self.rng.uniform(0, 1.5)))
        end_s = time.monotonic() + pause_s
        while running.poll() is None and time.monotonic() < end_s:
            time.sleep(0.001)
        if running.poll() is None:
            self.tally.seconds += 1
            running.kill(self.rng.choice(list(SIGNALS.values())))

    def _count(self, attempt: Attempt) -> dict[tuple[str, int], int]:
        """What the engines have counted; then wait for what is on its way to our disk."""
        if not attempt.has_measured or self.rng.random() < 0.5:
            return {}
        found = checks.counted(attempt.run)
        time.sleep(checks.STORED_WITHIN_S)
        return found
