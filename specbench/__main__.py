"""The console script. `specbench --help` answers from help.txt before typer is imported.

Importing typer alone takes longer than a help page may (0.2 s); tests/test_cli.py proves that
help.txt is what typer prints.
"""

import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line."""
    if sys.argv[1:] in (["--help"], ["-h"]):
        sys.stdout.write(Path(__file__).with_name("help.txt").read_text(encoding="utf-8"))
        sys.exit(0)
    from specbench import cli

    cli.main()


if __name__ == "__main__":
    main()
