"""What the training code saves is what vLLM loads: two steps on a tiny shape, then a real engine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbench import demo
from specbench.store import RunStore

pytestmark = pytest.mark.engine

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 2, 1, 32, 128


def tiny_target(folder: Path) -> None:
    """A random Llama of two layers with the demo target's tokenizer."""
    import torch
    from safetensors.torch import save_file

    source = Path(demo.resolve("demo:target"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"embed_tokens": (config["vocab_size"], HIDDEN), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.input_layernorm": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm": (HIDDEN,),
            f"layers.{i}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"layers.{i}.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            f"layers.{i}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
            f"layers.{i}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
    draw = torch.Generator().manual_seed(3)
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=draw) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for pattern in ("tokenizer*", "chat_template*", "generation_config.json"):
        for path in source.glob(pattern):
            shutil.copy(path, folder)


def test_a_head_of_two_steps_is_loaded_and_drafts(tmp_path: Path) -> None:
    from specbench.demo.train.eagle import train_head
    from specbench.demo.train.generate import generate_waves, read_chat_tokens
    from specbench.demo.train.prompts import TrainingPrompt
    from specbench.demo.train.target import Target

    target_folder, waves, head = (tmp_path / n for n in ("target", "waves", "head"))
    target_folder.mkdir()
    waves.mkdir()
    tiny_target(target_folder)
    target = Target.load(target_folder, 96)
    asked = [TrainingPrompt("code_raw", (500 + i, 11, 12), False, 1.0, 60) for i in range(48)]
    chat = read_chat_tokens(target_folder)
    generate_waves(target, chat, asked, waves, wave_size=48, say=lambda _: None)
    train_head(
        target=target_folder,
        data=waves,
        out=head,
        seconds=600,
        max_steps=2,
        seed=0,
        say=lambda _: None,
    )
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "one.jsonl").write_text('{"text": "Hello there."}\n', encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(
        f"model: {target_folder}\nbaseline: false\n"
        f"speculation: {{method: eagle, model: {head}, k: 2}}\n"
        "prompts: one\nmax_tokens: 8\nsampling: {ignore_eos: true}\n"
        "engine: {args: {dtype: float32, max_model_len: 512, enforce_eager: true,\n"
        "  kv_cache_memory_bytes: 16777216}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "specbench", "run", "--config", "tiny.yaml", "--run-id", "t"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = RunStore.open(tmp_path / "results" / "t").requests("eagle-k2.one.t8.c1.r0")
    assert record.output_tokens == 8
    assert record.spec is not None
    assert record.spec.draft_tokens
