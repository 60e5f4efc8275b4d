"""Units as Ray tasks: one task a unit, with the CPUs and GPUs that it needs. Only here is Ray known.

Ray retries nothing by itself (max_retries=0): what was measured is known to fanout.py alone.
"""

import io
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specbench.errors import UserError
from specbench.executors.fanout import NODES_S, News, on
from specbench.executors.units import Needs, whole_node_cpus
from specbench.run import Executor

SAME = "each host needs the same specbench and Python as here"
CONNECT_S = 10.0
INSTALL = "Install it here and on the hosts: pip install 'specbench[ray]'."
STOP_S = 8.0  # for engines to end by themselves; then workers are killed, and guards end them


def _unit(order: str, share: str) -> Iterator[str]:
    """The task. By reference in this module, so that a host needs the same specbench."""
    import ray

    from specbench.executors.task import carry_out

    notes = [*_as_without_ray()]
    yield from carry_out(order, share, node=ray.get_runtime_context().get_node_id(), notes=notes)


def _as_without_ray() -> Iterator[str]:
    """Undo what Ray does to its workers, which engines would inherit; what cannot be, in words.

    It sets OMP_NUM_THREADS, and runs workers at a niceness of 15 more than its raylet's.
    """
    with suppress(OSError):
        of_raylet = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if not any(one.startswith(b"OMP_NUM_THREADS=") for one in of_raylet):
            os.environ.pop("OMP_NUM_THREADS", None)
    own, raylets = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, os.getppid()))
    if own > raylets:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, raylets)
        except PermissionError:
            yield (
                f"note: Ray runs workers, and with them the engines, at a niceness of {own}, and "
                "this user may not lower it: where anything else runs on the host, export "
                "RAY_worker_niceness=0 before `ray start`"
            )


class RayCluster:
    """A running Ray cluster, as a context manager around the connection; see fanout.Cluster."""

    def __init__(self, address: str | None = None) -> None:
        self._ray: Any = None
        self._stack = ExitStack()
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self._running: dict[Any, int] = {}
        self._orders: dict[str, Any] = {}
        self._asked: dict[int, int] = {}  # CPUs, by the tickets that wait for a whole node
        self._look_at = 0.0
        self._tickets = 0

    def __enter__(self) -> Self:
        """See connect."""
        self.connect()
        return self

    def connect(self) -> None:
        """Connect, if it is not yet; leaving the context gives the connection up.

        Raises:
            UserError: Ray is not installed, or there is no such cluster.
        """
        if self._ray is not None:
            return
        if self._address.startswith("ray://"):
            raise UserError(
                "--address is a Ray Client's (ray://), through which no results can be streamed.",
                hint="Run specbench on a node of the cluster, with --address auto.",
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            with ExitStack() as stack:
                ray = self._connected(stack)
                self._stack = stack.pop_all()
        finally:
            for number, handler in handlers.items():  # Ray puts its own in their place
                signal.signal(number, handler)
        self._ray, self._task = ray, ray.remote(_unit)

    def _connected(self, stack: ExitStack) -> Any:  # noqa: ANN401  (a module that may be absent)
        try:
            import ray
        except ImportError as error:
            raise UserError(f"--executor ray needs Ray ({error}).", hint=INSTALL) from None
        # It prints what befalls nodes on standard output, which is for the run's path alone.
        stack.enter_context(redirect_stdout(io.StringIO()))
        try:
            _must_listen(self._address)
            ray.init(
                address=self._address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace="specbench",
            )
        except (OSError, RuntimeError, ValueError) as error:
            said = getattr(error, "strerror", None) or _first_sentence(str(error)) or "no answer"
            raise UserError(
                f"There is no Ray cluster at {self._address}: {said}.",
                hint="Start one (`ray start --head`), or name its --address HOST:PORT.",
            ) from None
        return ray

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        self._ray.shutdown()
        self._stack.close()

    @property
    def executor(self) -> Executor:
        """What `run.execute` takes."""
        return on(self)

    def submit(self, order: str, share: str, needs: Needs, name: str, host: str | None) -> int:
        """See fanout.Cluster."""
        cpus = whole_node_cpus(self._totals("CPU")) if needs.whole_node else needs.cpus
        task = self._task.options(
            num_returns="streaming",
            max_retries=0,
            num_cpus=cpus,
            num_gpus=needs.gpus,
            name=f"specbench {name}",
            scheduling_strategy=self._strategy(host),
        )
        if order not in self._orders:
            self._orders[order] = self._ray.put(order)
        self._tickets += 1
        if needs.whole_node:
            self._asked[self._tickets] = cpus
        self._running[task.remote(self._orders[order], share)] = self._tickets
        return self._tickets

    def _strategy(self, host: str | None) -> Any:  # noqa: ANN401  (one of Ray's)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in self._ray.nodes() if host is not None else ():
            if node["Alive"] and node["NodeManagerHostname"] == host:
                return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        return "DEFAULT"

    def news(self, timeout_s: float) -> Sequence[News]:
        """See fanout.Cluster."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(
            list(self._running), num_returns=1, timeout=timeout_s, fetch_local=False
        )
        found = []
        for unit in ready:
            ticket = self._running[unit]
            self._asked.pop(ticket, None)
            news = self._next(unit, ticket)
            if news.over:
                del self._running[unit]
            found.append(news)
        return found or self._of_nodes_gone()

    def _of_nodes_gone(self) -> list[News]:
        """The units that wait for a whole node as large as none is left: to be sent again."""
        if not self._asked or time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + NODES_S
        largest = max(self._totals("CPU"), default=0)
        found = []
        for unit, ticket in list(self._running.items()):
            if self._asked.get(ticket, 0) > largest > 0:
                self._ray.cancel(unit)
                del self._running[unit], self._asked[ticket]
                found.append(News(ticket, over=True, lost="the nodes that were large enough died"))
        return found

    def _next(self, unit: Any, ticket: int) -> News:  # noqa: ANN401  (Ray's generator of references)
        try:
            return News(ticket, lines=self._ray.get(next(unit)))
        except StopIteration:
            return News(ticket, over=True)
        except self._ray.exceptions.RayTaskError as error:
            why = str(error).strip().splitlines()[-1]
            return News(ticket, over=True, lost=f"{why} ({SAME})", ran=True)
        except self._ray.exceptions.RayError as error:
            return News(ticket, over=True, lost=_first_sentence(str(error)))

    def lacks(self, needs: Needs) -> str | None:
        """See fanout.Cluster."""
        nodes = self._nodes()
        cpus = 1 if needs.whole_node else needs.cpus
        if any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= needs.gpus for n in nodes):
            return None
        shown = ", ".join(f"{n.get('CPU', 0):g} CPUs and {n.get('GPU', 0):g} GPUs" for n in nodes)
        return f"no node of the cluster has that ({shown or 'it has none'})"

    def cancel(self) -> None:
        """See fanout.Cluster. Returns when the engines are down, or their workers killed."""
        exceptions = self._ray.exceptions
        for force in (False, True):
            for unit in self._running:
                with suppress(exceptions.RayError, ValueError):
                    self._ray.cancel(unit, force=force)
            deadline = time.monotonic() + STOP_S
            while self._running and (left_s := deadline - time.monotonic()) > 0:
                ready, _ = self._ray.wait(
                    list(self._running), num_returns=1, timeout=left_s, fetch_local=False
                )
                for unit in ready:
                    self._drop_next(unit)
        self._running.clear()

    def _drop_next(self, unit: Any) -> None:  # noqa: ANN401  (Ray's generator of references)
        try:
            self._ray.get(next(unit))
        except (StopIteration, self._ray.exceptions.RayError):
            del self._running[unit]

    def _totals(self, resource: str) -> list[float]:
        return [resources.get(resource, 0) for resources in self._nodes()]

    def _nodes(self) -> list[dict[str, float]]:
        """What each node that is alive has in all."""
        nodes = self._ray.nodes()
        return [node["Resources"] for node in nodes if node["Alive"]]


def _must_listen(address: str) -> None:
    """Raise OSError at once where nothing listens: Ray tries for minutes.

    "auto" is what the last `ray start` on this machine left in its file.
    """
    if address == "auto":
        left = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        address = left.read_text(encoding="utf-8").strip() if left.is_file() else ""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _first_sentence(text: str) -> str:
    """What Ray says first, without the lines that name its own tools."""
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")
