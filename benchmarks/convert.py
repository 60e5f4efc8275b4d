"""What converting a file of prompts costs: seconds, prompts/s and peak memory, beside a bare loop.

    python benchmarks/convert.py [--prompts 100000] [--layout genai-perf eagle csv] [--repeats 5]

The bare loop is `for line in file: json.loads(line)`: what any reader of JSONL has to pay. Each
measurement is a process of its own, in turn (loop, conversion, loop, …); the least of the repeats
counts. `process` is all of `specbench convert FILE`: interpreter, imports and conversion. Memory is
the peak of a process's resident set, over the same with a tenth of the prompts.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = [
    "def",
    "return",
    "list",
    "of",
    "numbers",
    "tokens",
    "the",
    "write",
    "a",
    "function:",
    '"x"\n',
]

LOOP = """
import json, sys
with open(sys.argv[1], encoding="utf-8") as lines:
    for line in lines:
        json.loads(line)
"""
CONVERT = "from specbench.__main__ import main; main()"


def prompts_file(folder: Path, count: int, layout: str) -> Path:
    """Made-up prompts of some 420 characters, with quotes and line breaks, a tenth with an é."""
    draw = random.Random(0)
    texts = (
        " ".join(draw.choices(WORDS, k=80)) + (f" {n}" if n % 10 else " é") for n in range(count)
    )
    path = folder / f"{layout}-{count}.{'csv' if layout == 'csv' else 'jsonl'}"
    with path.open("w", encoding="utf-8", newline="\n") as out:
        if layout == "csv":
            out.write("id,prompt\n")
        for n, text in enumerate(texts):
            if layout == "csv":
                out.write(f'{n},"{text.replace(chr(34), chr(34) * 2)}"\n')
            elif layout == "eagle":
                record = {"question_id": n, "category": "c", "turns": [text]}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
            else:
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def cost(code: str, *args: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MiB of a Python process."""
    # a child of a child, as ru_maxrss of children is the largest of all of them
    probe = (
        "import json, resource, subprocess, sys, time\n"
        "began = time.perf_counter()\n"
        "subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True, stdout=2)\n"
        "wall = time.perf_counter() - began\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))"
    )
    command = [sys.executable, "-c", probe, code, *args]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wall, cpu, peak = json.loads(done.stdout)
    return wall, cpu, peak


def main() -> None:
    """Print a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--layout", nargs="+", default=["genai-perf", "eagle", "csv"])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    count = asked.prompts
    print("layout        wall_s  cpu_s  prompts/s  loop_cpu_s  ratio  peak_mib  grown_mib")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for layout in asked.layout:
            few, many = (prompts_file(folder, n, layout) for n in (count // 10, count))
            plain = prompts_file(folder, count, "genai-perf")
            loops, runs = [], []
            for _ in range(asked.repeats):
                loops.append(cost(LOOP, str(plain)))
                runs.append(cost(CONVERT, "convert", str(many), "--datasets", str(folder / "out")))
            small = cost(CONVERT, "convert", str(few), "--datasets", str(folder / "out"))
            wall, cpu, peak = (min(column) for column in zip(*runs, strict=True))
            loop = min(loops, key=lambda one: one[1])[1]
            print(
                f"{layout:12} {wall:7.2f} {cpu:6.2f} {count / wall:10.0f} {loop:11.2f} "
                f"{cpu / loop:6.1f} {peak:9.0f} {peak - small[2]:10.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
