"""Valid files of every format, small and made once; what is mutated."""

from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from signed_align import Gauge, apply, scramble
from signed_align.provenance import Record, end, gauge_summary
from tests import tiny

WIDTH, UNITS = 8, 12
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Files = dict[str, bytes]
"""The content of files by relative path; of one that is nested, with slashes."""


def torch_bytes(value: Any, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def tensors(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@dataclass
class World:
    """A tiny model, its twin in other coordinates, and the gauge between them, below ``root``."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("cache", "temporary"):
            (self.root / name).mkdir(parents=True)
        # charts that are proved, fonts that are found, and what libraries keep
        for name in ("XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(self.root / "cache")
        tempfile.tempdir = str(self.root / "temporary")
        model = tiny.build(
            "llama", vocab_size=24, hidden_size=WIDTH, intermediate_size=UNITS, head_dim=4,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            attention_bias=False, mlp_bias=False,
        )  # fmt: skip
        self.source, self.target = self.root / "source", self.root / "target"
        self.model = tiny.save(model, self.source) and model
        self.gauge = scramble(self.source, self.target, seed=1, spaces=["all"])
        self.gauge.save(self.root / "gauge.safetensors")
        self.residual = self.gauge.restricted(["residual"])

    @property
    def allowed(self) -> list[Path]:
        """Where a library may leave files of its own."""
        return [self.root / "cache", self.root / "temporary"]

    def read(self, directory: Path) -> Files:
        return {
            str(file.relative_to(directory)): file.read_bytes()
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }

    # ---- models ------------------------------------------------------------------------------

    @cached_property
    def single(self) -> Files:
        files = self.read(self.source)
        return {name: files[name] for name in ("config.json", "model.safetensors")}

    @cached_property
    def sharded(self) -> Files:
        directory = tiny.save(self.model, self.root / "sharded", shard="4KB")
        return self.read(directory)

    # ---- artifacts ---------------------------------------------------------------------------

    def _adapter(self, config: dict[str, Any], weights: dict[str, Tensor], name: str) -> Files:
        config = {"base_model_name_or_path": str(self.source), "task_type": "CAUSAL_LM", **config}
        data = save(weights) if name.endswith("safetensors") else torch_bytes(weights)
        return {"adapter_config.json": json_bytes(config), name: data}

    @cached_property
    def adapters(self) -> dict[str, Files]:
        base = "base_model.model.model.layers"
        lora = {
            f"{base}.0.self_attn.q_proj.lora_A.weight": (2, WIDTH),
            f"{base}.0.self_attn.q_proj.lora_B.weight": (8, 2),
            f"{base}.1.mlp.down_proj.lora_A.weight": (2, UNITS),
            f"{base}.1.mlp.down_proj.lora_B.weight": (WIDTH, 2),
        }
        config = {
            "peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_dora": False,
            "target_modules": ["q_proj", "down_proj"], "modules_to_save": None, "revision": None,
            "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
            "inference_mode": True, "init_lora_weights": True,
        }  # fmt: skip
        dora = {
            **lora,
            f"{base}.0.self_attn.q_proj.lora_magnitude_vector": (8,),
            f"{base}.1.mlp.down_proj.lora_magnitude_vector": (WIDTH,),
        }
        ia3 = {
            f"{base}.0.self_attn.k_proj.ia3_l": (4, 1),
            f"{base}.0.mlp.down_proj.ia3_l": (1, UNITS),
        }
        loha = {
            f"{base}.0.self_attn.q_proj.{name}": shape
            for name, shape in {
                "hada_w1_a": (8, 2), "hada_w1_b": (2, WIDTH), "hada_w2_a": (8, 2),
                "hada_w2_b": (2, WIDTH),
            }.items()
        }  # fmt: skip
        return {
            "lora": self._adapter(config, tensors(0, **lora), "adapter_model.safetensors"),
            "lora.bin": self._adapter(config, tensors(1, **lora), "adapter_model.bin"),
            "dora": self._adapter(
                {**config, "use_dora": True}, tensors(2, **dora), "adapter_model.safetensors"
            ),
            "ia3": self._adapter(
                {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"],
                 "feedforward_modules": ["down_proj"]},
                tensors(3, **ia3), "adapter_model.safetensors",
            ),
            "loha": self._adapter(
                {"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj"]},
                tensors(4, **loha), "adapter_model.safetensors",
            ),
            "prompt": self._adapter(
                {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
                tensors(5, prompt_embeddings=(3, WIDTH)), "adapter_model.safetensors",
            ),
        }  # fmt: skip

    @cached_property
    def dictionaries(self) -> dict[str, Files]:
        shapes = {"W_enc": (WIDTH, 16), "W_dec": (16, WIDTH), "b_enc": (16,), "b_dec": (WIDTH,)}
        metadata = {"model_name": str(self.source), "hook_name": "blocks.1.hook_resid_post"}
        config = {
            "architecture": "standard", "d_in": WIDTH, "d_sae": 16, "dtype": "float32",
            "device": "cpu", "normalize_activations": "none", "apply_b_dec_to_input": True,
            "metadata": metadata,
        }  # fmt: skip
        jumping = {**config, "architecture": "jumprelu"}
        old = {**config, "hook_point": metadata["hook_name"], "model_name": metadata["model_name"]}
        del old["metadata"]
        transcoder = {
            **config, "architecture": "transcoder", "d_out": WIDTH,
            "metadata": {**metadata, "hook_name": "blocks.0.ln2.hook_normalized",
                         "hook_name_out": "blocks.0.hook_mlp_out"},
        }  # fmt: skip
        weights = save(tensors(6, **shapes))
        return {
            "standard": {"cfg.json": json_bytes(config), "sae_weights.safetensors": weights},
            "jumprelu": {
                "cfg.json": json_bytes(jumping),
                "sae_weights.safetensors": save(tensors(7, **shapes, threshold=(16,))),
                "sparsity.safetensors": save(tensors(8, sparsity=(16,))),
            },
            "old": {"cfg.json": json_bytes(old), "sae_weights.safetensors": weights},
            "transcoder": {"cfg.json": json_bytes(transcoder), "sae_weights.safetensors": weights},
        }

    @cached_property
    def _optimizer(self) -> dict[str, Any]:
        names = [name for name, _ in self.model.named_parameters()]
        torch.manual_seed(0)
        state = {
            number: {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn_like(parameter),
                "exp_avg_sq": torch.rand_like(parameter),
            }
            for number, parameter in enumerate(self.model.parameters())
        }
        state = {number: {k: v.detach() for k, v in e.items()} for number, e in state.items()}
        group = {
            "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
            "params": list(range(len(state))), "param_names": names,
        }  # fmt: skip
        return {"state": state, "param_groups": [group]}

    @cached_property
    def optimizers(self) -> dict[str, Files]:
        named = self._optimizer
        group = {key: value for key, value in named["param_groups"][0].items() if key[-1] != "s"}
        numbered = {
            "state": named["state"],
            "param_groups": [{**group, "params": named["param_groups"][0]["params"]}],
        }
        return {
            "named": {"optimizer.pt": torch_bytes(named)},
            "numbered": {"optimizer.pt": torch_bytes(numbered)},
            "bin": {"optimizer.pt": torch_bytes(named, zipped=False)},
        }

    @cached_property
    def training(self) -> dict[str, Files]:
        state = {"global_step": 3, "epoch": 1.0, "log_history": [], "best_metric": None}
        scheduler = torch_bytes({"last_epoch": 3, "base_lrs": [0.1]})
        rest = {"trainer_state.json": json_bytes(state), "scheduler.pt": scheduler}
        return {
            "model": {**self.single, "optimizer.pt": torch_bytes(self._optimizer), **rest},
            "adapter": {**self.adapters["lora"], **rest},
        }

    @cached_property
    def vectors(self) -> dict[str, Files]:
        from gguf import GGUFWriter

        rows = tensors(9, a=(WIDTH,), b=(WIDTH,))
        hooked = {"blocks.0.hook_resid_post": rows["a"], "blocks.1.hook_resid_post": rows["b"]}
        layered = {"layer_activations": {0: rows["a"], 1: rows["b"]}, "layer_type": "decoder_block"}
        path = self.root / "vector.gguf"
        writer = GGUFWriter(path, "controlvector")
        writer.add_string("controlvector.model_hint", "llama")
        writer.add_uint32("controlvector.layer_count", 2)
        for layer in (0, 1):
            writer.add_tensor(f"direction.{layer}", rows["a"].numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        archive, array = io.BytesIO(), io.BytesIO()
        np.savez(archive, direction=rows["a"].numpy(), other=rows["b"].numpy())
        np.save(array, rows["a"].numpy())
        metadata = {"model": str(self.source), "hook": "blocks.1.hook_resid_post"}
        return {
            "hooks": {"vector.pt": torch_bytes(hooked)},
            "layers": {"vector.pt": torch_bytes(layered, zipped=False)},
            "gguf": {"vector.gguf": path.read_bytes()},
            "npz": {"vector.npz": archive.getvalue()},
            "npy": {"vector.npy": array.getvalue()},
            "safetensors": {"vector.safetensors": save({"direction": rows["a"]}, metadata)},
        }

    @cached_property
    def lists(self) -> dict[str, Files]:
        hook = "blocks.1.hook_resid_post"
        records = [
            {"hook": "blocks.0.mlp.hook_post", "neuron": 3, "activation": 0.5},
            {"hook": hook, "neuron": 7, "activation": -2},
        ]
        contents = {
            "records": records,
            "columns": {"hook": hook, "indices": [1, 5], "activations": [0.5, 2.0]},
            "by hook": {hook: [1, 3, 5], "blocks.0.mlp.hook_post": [[2, 0.5], [11, -1]]},
            "by index": {"hook": hook, "activations": {"3": 0.5, "7": -1.5}},
            "layers": {"hook": hook, "neurons": [3, 7]},
            "mask": {"hook": hook, "mask": [True, False] * 4},
        }
        files = {name: {"neurons.json": json_bytes(value)} for name, value in contents.items()}
        table = f"hook,neuron,activation\n{hook},3,0.5\n{hook},7,-2\n".encode()
        return {
            **files,
            "csv": {"neurons.csv": table},
            "tsv": {"neurons.tsv": table.replace(b",", b"\t")},
            "torch": {"neurons.pt": torch_bytes({hook: torch.tensor([1, 3])})},
        }

    @cached_property
    def probes(self) -> dict[str, Files]:
        import skops.io
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        rows, answers = np.random.default_rng(0).normal(size=(20, WIDTH)), np.arange(20) % 2
        probe = LogisticRegression().fit(rows, answers)
        pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, answers)
        return {
            "logistic": {"probe.skops": skops.io.dumps(probe)},
            "pipeline": {"probe.skops": skops.io.dumps(pipeline)},
            "joblib": {"probe.joblib": b"\x80\x04N."},
            "pickle": {"probe.pkl": b"\x80\x04N."},
        }

    # ---- texts -------------------------------------------------------------------------------

    @cached_property
    def gauges(self) -> dict[str, Files]:
        from dataclasses import replace

        margins = {space: torch.full((e.size,), 0.5) for space, e in self.gauge.elements.items()}
        recovered = replace(self.gauge, margins=margins)
        bare = Gauge(self.residual.elements, {}, replace(self.gauge.source, config={}))
        found = {}
        for name, gauge in (("all", self.gauge), ("margins", recovered), ("bare", bare)):
            gauge.save(self.root / f"{name}.safetensors")
            found[name] = {"gauge.safetensors": (self.root / f"{name}.safetensors").read_bytes()}
        return found

    @cached_property
    def recipes(self) -> dict[str, Files]:
        models = f"models:\n  - model: {self.source}\n    parameters:\n      weight: 1\n"
        models += f"  - model: {self.target}\n    parameters:\n      weight: 1\n"
        with_gauge = models + f"      gauge: {self.root / 'gauge.safetensors'}\n"
        base = f"base_model: {self.source}\n"
        texts = {
            "average": f"merge_method: signed_align\n{models}dtype: float32\n",
            "gauge": f"merge_method: signed_align\n{with_gauge}dtype: float32\n",
            "slerp": f"merge_method: signed_align_slerp\n{base}models:\n  - model: {self.source}\n"
            f"  - model: {self.target}\nparameters:\n  t: 0.5\ndtype: float32\n",
            "slices": f"merge_method: signed_align\n{base}slices:\n  - sources:\n    - model: "
            f"{self.source}\n      layer_range: [0, 2]\n    - model: {self.target}\n      "
            "layer_range: [0, 2]\nparameters:\n  weight: 0.5\ndtype: float32\n",
            "linear": f"merge_method: linear\n{models}dtype: float32\n",
        }
        return {name: {"recipe.yml": text.encode()} for name, text in texts.items()}

    @cached_property
    def claims(self) -> dict[str, Files]:
        hook = "blocks.1.hook_resid_post"
        texts = {"positive": ["good", "fine"], "negative": {"file": "negative.txt"}}
        contents = {
            "difference": {"claim": "top_mean_difference", "hook": hook, "k": 2, **texts},
            "attribution": {
                "claim": "top_attribution", "hook": hook, "k": 2, "texts": ["good", "fine"],
                "logits": [" great", " terrible"],
            },
            "weights": {
                "claim": "top_weights", "hook": hook, "k": 2, **texts, "probe": "ridge",
                "direction": {"file": "direction.json"},
            },
        }  # fmt: skip
        beside = {"negative.txt": b"bad\nawful\n", "direction.json": b"[0.5, 1, -2]"}
        return {name: {"claim.json": json_bytes(c), **beside} for name, c in contents.items()}

    @cached_property
    def results(self) -> dict[str, Files]:
        names = ("apply", "audit", "demo", "merge", "trajectories-smollm2", "seeds", "steering")
        files = {name: {f"{name}.json": (RESULTS / f"{name}.json").read_bytes()} for name in names}
        barrier = {"paths": json.loads(files["demo"]["demo.json"])["merge"]["paths"]}
        files["barrier"] = {
            "barrier.json": json_bytes({**barrier, "barrier_nats": 0.5, "warnings": []})
        }
        files["gauge"] = dict(self.gauges["margins"])
        return files

    @cached_property
    def records(self) -> dict[str, Files]:
        vector = self.root / "moved.pt"
        vector.write_bytes(self.vectors["hooks"]["vector.pt"])
        step = {
            "action": "port", "source": end(self.gauge.source), "target": end(self.gauge.target),
            "gauge": gauge_summary(self.gauge), "source_verified": False, "any_source": True,
        }  # fmt: skip
        record = Record().then(**step)
        record.save(vector, [vector])
        apply(self.gauge, self.source, self.root / "applied")
        beside = Record.place(vector)
        return {
            "file": {"moved.pt": vector.read_bytes(), beside.name: beside.read_bytes()},
            "directory": {
                **self.single,
                "signed_align.json": (self.root / "applied" / "signed_align.json").read_bytes(),
            },
        }
