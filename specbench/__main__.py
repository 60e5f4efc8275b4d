"""The console script. `specbench --help` answers from help.txt before typer is imported.

Importing typer alone takes longer than a help page may (0.2 s); tests/test_cli.py proves that
help.txt is what typer prints. Nothing is imported before `main` that takes time: a Ctrl-C in it would
end in a traceback.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Run the command line."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until interrupts.raise_interrupts
    if sys.argv[1:] in (["--help"], ["-h"]):
        from pathlib import Path

        sys.stdout.write(Path(__file__).with_name("help.txt").read_text(encoding="utf-8"))
        sys.exit(0)
    from specbench import cli

    cli.main()


if __name__ == "__main__":
    main()
