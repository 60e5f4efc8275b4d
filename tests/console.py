"""The console script, run in the tests' own process: an import of everything costs a second."""

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from specbench.__main__ import main


@dataclass
class Done:
    """What a command left: its exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def specbench(
    *args: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    columns: int = 80,
    stdin: str = "",
) -> Done:
    """Run `specbench` *args* in *cwd*. conftest.py puts back what it does with signals."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": str(columns), "SPECBENCH_DEBUG": "", **(env or {})}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["specbench", *map(str, args)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.chdir(cwd)
        with pytest.raises(SystemExit) as end:
            main()
    code = end.value.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())
