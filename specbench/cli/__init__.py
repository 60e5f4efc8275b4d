"""Commands, flags, help and exit codes. Nothing else exits or prints colour.

Exit codes: 0 done · 1 a regression was found · 2 the user's to mend · 3 an engine or load
generator failed (also when part of a sweep did) · 130 interrupted.

Heavy imports stay inside the commands: `specbench --help` must feel instant.
"""

from specbench.cli.root import app, main

# Each adds its commands to the app, in the order of the help page.
from specbench.cli import (  # noqa: F401  # isort: skip
    convert,
    run,
    report,
    compare,
    whatif,
    verify,
    doctor,
    triton,
    runs,
    interchange,
    init,
)

__all__ = ["app", "main"]
