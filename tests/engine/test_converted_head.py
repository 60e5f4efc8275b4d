"""A head that went to the layout of old containers and came back is loaded and drafts."""

import subprocess
import sys
from pathlib import Path

import pytest

from specbench import demo
from specbench.store import RunStore

pytestmark = pytest.mark.engine


def test_a_head_that_came_back_from_the_old_layout_is_loaded_and_drafts(tmp_path: Path) -> None:
    target, head = demo.resolve("demo:target"), demo.resolve("demo:eagle")
    for arguments in (
        [head, "old", "--target", target],
        ["old", "new", "--to", "current"],
    ):
        command = [sys.executable, "-m", "specbench", "models", "convert-eagle", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "one.jsonl").write_text(
        '{"text": "Write a Python function that adds two numbers."}\n', encoding="utf-8"
    )
    (tmp_path / "back.yaml").write_text(
        f"model: {target}\nbaseline: false\n"
        f"speculation: {{method: eagle, model: {tmp_path / 'new'}, k: 2}}\n"
        "prompts: one\nmax_tokens: 24\nsampling: {ignore_eos: true}\n"
        "engine: {args: {dtype: float32, max_model_len: 512, enforce_eager: true,\n"
        "  kv_cache_memory_bytes: 67108864}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "specbench", "run", "--config", "back.yaml", "--run-id", "t"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = RunStore.open(tmp_path / "results" / "t").requests("eagle-k2.one.t24.c1.r0")
    assert record.output_tokens == 24
    assert record.spec is not None
    # A head whose tensors were mixed up would load as well, and have next to nothing accepted.
    assert record.spec.draft_tokens
    assert record.spec.accepted > record.spec.draft_tokens / 4
