"""Peak memory of `signed-align apply` on a large sharded checkpoint, and time against a copy.

Both write to the disk: `apply` flushes what it wrote, and so does `cp -r` followed by `sync`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import alternate, record
from safetensors.torch import save_file
from transformers import LlamaConfig

from signed_align import Checkpoint, Gauge, SignedPermutation

WIDTH, INNER, VOCABULARY, LAYERS_PER_SHARD = 2048, 8192, 32000, 8


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


def layer(index: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{index}"
    return {
        f"{prefix}.self_attn.q_proj.weight": random_bf16(WIDTH, WIDTH),
        f"{prefix}.self_attn.k_proj.weight": random_bf16(WIDTH, WIDTH),
        f"{prefix}.self_attn.v_proj.weight": random_bf16(WIDTH, WIDTH),
        f"{prefix}.self_attn.o_proj.weight": random_bf16(WIDTH, WIDTH),
        f"{prefix}.mlp.gate_proj.weight": random_bf16(INNER, WIDTH),
        f"{prefix}.mlp.up_proj.weight": random_bf16(INNER, WIDTH),
        f"{prefix}.mlp.down_proj.weight": random_bf16(WIDTH, INNER),
        f"{prefix}.input_layernorm.weight": random_bf16(WIDTH),
        f"{prefix}.post_attention_layernorm.weight": random_bf16(WIDTH),
    }


def make_checkpoint(path: Path, layers: int) -> int:
    """Write random llama weights in shards; returns their size in bytes."""
    path.mkdir()
    LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        num_attention_heads=16,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    ends = {
        "model.embed_tokens.weight": random_bf16(VOCABULARY, WIDTH),
        "lm_head.weight": random_bf16(VOCABULARY, WIDTH),
        "model.norm.weight": random_bf16(WIDTH),
    }
    starts = range(0, layers, LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total = 0
    for number, start in enumerate([None, *starts], 1):
        tensors = ends
        if start is not None:
            tensors = {}
            for index in range(start, min(start + LAYERS_PER_SHARD, layers)):
                tensors |= layer(index)
        name = f"model-{number:05d}-of-{len(starts) + 1:05d}.safetensors"
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def timed(command: list[str], output: Path) -> float:
    """Seconds of a command that makes ``output``, which is removed again."""
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    shutil.rmtree(output)
    return seconds


def peak_bytes(command: list[str], output: Path) -> int:
    """Peak resident memory of a command, from a process that runs nothing else."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], check=True, capture_output=True, text=True
    )
    shutil.rmtree(output)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        root = Path(directory)
        size = make_checkpoint(root / "source", arguments.layers)
        gauge = Gauge(
            {"residual": SignedPermutation.random(WIDTH)},
            source=Checkpoint.open(root / "source").identity,
        )
        gauge.save(root / "gauge.safetensors")
        tool = [
            str(Path(sys.executable).parent / "signed-align"), "apply",
            str(root / "gauge.safetensors"), str(root / "source"), "-o", str(root / "moved"),
        ]  # fmt: skip
        copy = ["sh", "-c", f"cp -r '{root}/source' '{root}/copy' && sync '{root}/copy'/*"]
        peak = peak_bytes(tool, root / "moved")
        copied, moved = alternate(
            lambda: timed(copy, root / "copy"),
            lambda: timed(tool, root / "moved"),
            arguments.rounds,
        )
    record(
        "apply",
        {
            "checkpoint_gib": round(size / 2**30, 2),
            "largest_tensor_gib": round(VOCABULARY * WIDTH * 2 / 2**30, 3),
            "peak_memory_gib": round(peak / 2**30, 3),
            "cp_and_sync_seconds": round(copied, 2),
            "apply_seconds": round(moved, 2),
            "time_ratio": round(moved / copied, 2),
        },
    )


if __name__ == "__main__":
    main()
