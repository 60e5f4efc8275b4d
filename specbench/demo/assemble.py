"""Write the demo's checkpoints. Run by `trio` as a script, because it imports torch.

python assemble.py target GGUF OUT          a GGUF file to a plain bfloat16 Llama checkpoint
python assemble.py draft TARGET DELTA OUT   trained layers and the target's embedding, together
"""

import shutil
import sys
from pathlib import Path

# What the tokenizer must make of a chat with one word in it. A GGUF file holds no tokenizer.json:
# transformers builds one, and this shows that it built the right one.
PROBE, PROBE_IDS = (
    "hello",
    [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
        1,
        4093,
        198,
        28120,
        2,
        198,
        1,
        520,
        9531,
        198,
    ],
)


def assemble_target(gguf: Path, out: Path) -> None:
    """Dequantise *gguf* (Q4_1) in float32 and save it as bfloat16, with tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    chat = [{"role": "user", "content": PROBE}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    if list(ids) != PROBE_IDS:
        raise SystemExit(f"the tokenizer makes {list(ids)} of a chat that says {PROBE!r}")
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def assemble_draft(target: Path, delta: Path, out: Path) -> None:
    """Put the target's embedding beside the trained layers of *delta*."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    weights = load_file(delta / "model.safetensors")
    with safe_open(target / "model.safetensors", "pt") as file:
        weights["model.embed_tokens.weight"] = file.get_tensor("model.embed_tokens.weight")
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(delta / "config.json", out)
    for pattern in ("tokenizer*", "chat_template*", "generation_config.json"):
        for path in target.glob(pattern):
            shutil.copy(path, out)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["target", gguf, out]:
            assemble_target(Path(gguf), Path(out))
        case ["draft", target, delta, out]:
            assemble_draft(Path(target), Path(delta), Path(out))
        case _:
            raise SystemExit(__doc__)
