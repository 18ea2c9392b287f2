"""Wall time of merging with `signed_align` and a given gauge against mergekit's `linear`."""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
import yaml
from common import alternate, record
from mergekit.options import MergeOptions
from transformers import LlamaConfig, LlamaForCausalLM

from signed_align import merge, scramble


def write_recipe(path: Path, method: str, models: list[dict]) -> Path:
    path.write_text(yaml.safe_dump({"merge_method": method, "models": models, "dtype": "bfloat16"}))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        root = Path(directory)
        config = LlamaConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            vocab_size=32000,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        size = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(root / "source")
        del model
        scramble(root / "source", root / "twin").save(root / "gauge.safetensors")
        source = {"model": str(root / "source"), "parameters": {"weight": 1}}
        twin = {"model": str(root / "twin"), "parameters": {"weight": 1}}
        aligned = {
            **twin,
            "parameters": {"weight": 1, "gauge": str(root / "gauge.safetensors")},
        }
        recipes = {
            "linear": write_recipe(root / "linear.yml", "linear", [source, twin]),
            "signed_align": write_recipe(root / "aligned.yml", "signed_align", [source, aligned]),
        }

        def timed(name: str) -> float:
            shutil.rmtree(root / "out", ignore_errors=True)
            start = time.monotonic()
            merge(
                recipes[name],
                root / "out",
                MergeOptions(quiet=True, write_model_card=False),
                verify=False,
            )
            return time.monotonic() - start

        timed("linear")  # imports and page cache
        linear, signed = alternate(
            lambda: timed("linear"), lambda: timed("signed_align"), arguments.rounds
        )
    record(
        "merge",
        {
            "checkpoint_gib": round(size / 2**30, 2),
            "linear_seconds": round(linear, 2),
            "signed_align_seconds": round(signed, 2),
            "time_ratio": round(signed / linear, 2),
        },
    )


if __name__ == "__main__":
    main()
