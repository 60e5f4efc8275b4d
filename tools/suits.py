"""Exit 0 if this interpreter suits `make`: 3.11 or newer, able to make a venv, and with a torch.

A machine may keep +cpu wheels of torch on its disk (PIP_FIND_LINKS), which are for one version of
Python each: then that version is the one to take.
"""

import glob
import os
import sys

try:
    import ensurepip  # noqa: F401  (python -m venv needs it)
except ImportError:
    sys.exit(1)
kept = glob.glob(os.environ.get("PIP_FIND_LINKS", "") + "/torch-*+cpu-*.whl")
tag = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
sys.exit(sys.version_info < (3, 11) or (bool(kept) and not any(tag in wheel for wheel in kept)))
