"""A process that has imported vLLM once, from which engines are forked (CPU builds only).

    python prefork.py SOCKET

Importing vLLM takes 15 to 30 s of CPU on two cores, twice an engine (API server and engine core);
a sweep of eight engines would spend most of its time there. Each connection to SOCKET sends one
JSON line {argv, env, cwd, log, patience_s, secrets}; a guard (guard.py) and below it an engine are forked,
which then runs vLLM's own command line on argv. "pid N" and "exit STATUS" come back on the
connection; when it closes, the engine ends.

vLLM's CPU platform asks for `spawn` where its default elsewhere is `fork`; here the engine core is
forked as well. Nothing else of vLLM is changed. Run by the interpreter that has vLLM: only the
standard library here, and guard.py is loaded by its path (this folder holds a vllm.py, so it must
not be on sys.path).
"""

import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

# What an engine imports on its way up; what a version lacks is passed over. Not the n-gram
# proposer: it brings numba, whose llvmlite breaks the scan of all modules that vLLM 0.32 makes
# when its CPU worker starts.
PRELOAD = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle",
)


def main() -> None:
    """Import, then fork an engine for each connection, until standard input closes."""
    for name in PRELOAD:
        with suppress(ImportError):
            importlib.import_module(name)
    use_fork()
    guard = load_guard()
    gc.collect()
    gc.freeze()  # keeps forks from copying every page at their first collection
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards answer on their connection
    with socket.socket(socket.AF_UNIX) as listener:
        draft = sys.argv[1] + ".new"
        listener.bind(draft)
        listener.listen(16)
        os.rename(draft, sys.argv[1])
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(connection, guard)
            connection.close()


def serve(connection: socket.socket, guard: ModuleType) -> None:
    """In a fork: guard one engine and exit with its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def become() -> None:
        connection.close()
        run_command_line(request)

    fd = connection.fileno()
    status = guard.watch(
        become,
        control_fd=fd,
        status_fd=fd,
        patience_s=float(request["patience_s"]),
        at_end=lambda: guard.cover(request["log"], request["secrets"]),
    )
    os._exit(status)


def run_command_line(request: dict[str, Any]) -> None:
    """What `python -m vllm.entrypoints.cli.main ARGV` does, in this process."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["vllm", *request["argv"]]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def use_fork() -> None:
    """Have vLLM fork its engine core, which keeps the imports, instead of spawning it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and hasattr(module, "get_mp_context"):
            vars(module)["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def load_guard() -> ModuleType:
    """guard.py from beside this file."""
    path = Path(__file__).with_name("guard.py")
    spec = importlib.util.spec_from_file_location("specbench_guard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
