"""Begin the sampler beside a run and end it with the run."""

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from specbench.engines.process import Child
from specbench.errors import EngineError
from specbench.store import RunStore

SWITCH = "SPECBENCH_TELEMETRY"  # "off" in the environment: nothing is sampled
STOP_S = 1.0


@contextmanager
def sampled(
    store: RunStore,
    *,
    say: Callable[[str], None],
    engine_url: str | None = None,
    environments: Iterable[Mapping[str, str]] = (),
) -> Iterator[None]:
    """Sample the machine into *store* for as long as the block lasts.

    An engine that is already up at *engine_url* is sampled if it is on this machine, but then nobody
    knows whose work is whose. *environments* are those of the engines, for the GPUs that they see.
    A sampler that does not start is said and is no reason to measure nothing.
    """
    if os.environ.get(SWITCH) == "off" or (engine_url and not is_here(engine_url)):
        yield
        return
    argv = [sys.executable, "-m", "specbench.telemetry", str(store.telemetry_file().absolute())]
    argv += ["--root", str(os.getpid())]
    if (gpus := visible_gpus(environments)) is not None:
        argv += ["--gpus", gpus]
    if engine_url:
        argv += ["--shared"]
    log = store.path / "telemetry.log"
    here = {"PYTHONPATH": str(Path(__file__).parents[2])}  # this specbench, installed or not
    with ExitStack() as stack:
        try:
            stack.enter_context(Child(argv, log=log, cwd=store.path, env=here, patience_s=STOP_S))
        except EngineError as error:
            say(f"the machine is not sampled: {error.message}")
        yield
    if log.is_file() and not log.stat().st_size:
        log.unlink()


def visible_gpus(environments: Iterable[Mapping[str, str]]) -> str | None:
    """The GPUs that engines with these *environments* see, as CUDA_VISIBLE_DEVICES; None for all."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = [env.get("CUDA_VISIBLE_DEVICES", own) for env in environments] or [own]
    if any(one is None for one in said):
        return None
    names = [name.strip() for one in said if one for name in one.split(",")]
    return ",".join(dict.fromkeys(names))


def is_here(url: str) -> bool:
    """Whether a server's address is this machine's own, without asking a name server."""
    host = urlsplit(url).hostname or ""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
