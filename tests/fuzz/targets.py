"""What is fuzzed: of every format the samples, the words that mean something in it, its readers."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from click.testing import CliRunner

from signed_align import Checkpoint, Gauge, apply, merge, port
from signed_align.adapters.peft_methods import METHODS, REFUSALS
from signed_align.adapters.sae import ARCHITECTURES, NORMALISATIONS
from signed_align.claims import load_claim
from signed_align.cli import main
from signed_align.gauge import by_kind
from signed_align.inspection import inspect
from signed_align.provenance import Record
from signed_align.report import report
from tests.fuzz.guard import BrokenError, Guard, Verdict
from tests.fuzz.mutations import MUTATIONS, mutate_bytes
from tests.fuzz.samples import Files, World

Step = Callable[[], object]
Steps = Callable[[World, Path, Path, Random], list[Step]]
"""From a world, the input, where its output goes, and chance, to what is done with it."""


@dataclass(frozen=True)
class Target:
    """One format.

    Parameters
    ----------
    samples : callable
        Valid inputs, by name, each a directory of files.
    steps : callable
        What is done with an input. The last step is the one that may leave an output.
    whole : bool
        The input is the directory, not its first file.
    mutated : tuple of str
        Names, or ends of names, of the files that are mutated; all by default.
    words : sequence of str
        Names and values that mean something in the format.
    share : int
        How many of 1000 inputs of a long run go here.
    """

    samples: Callable[[World], Mapping[str, Files]]
    steps: Steps
    whole: bool = False
    mutated: tuple[str, ...] = ("",)
    words: Sequence[str] = ()
    share: int = 50


# ---- what is done --------------------------------------------------------------------------------


def _inspect(thing: Path) -> Step:
    """`inspect`: what it says can be printed, for people and as JSON."""

    def step() -> None:
        data, lines = inspect(str(thing))
        json.dumps(data)
        if len("\n".join(lines)) > 10**7:
            raise BrokenError("inspect says more than anybody reads")

    return step


def _command(*arguments: object) -> Step:
    """A command: its exit code is documented, its JSON is JSON, its error is one line."""

    def step() -> None:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exit_code not in (0, 2, 3, 4):
            raise BrokenError(f"exit code {result.exit_code}: {result.output[-500:]!r}")
        if "--json" in arguments:
            json.loads(result.stdout)

    return step


def _told(thing: Path, random: Random, always: Sequence[Step]) -> list[Step]:
    """Steps that begin by inspecting the thing; now and then by way of the command line."""
    first = _inspect(thing)
    if random.random() < 0.05:
        first = _command("inspect", thing, *random.choice([(), ("--json",)]))
    return [first, *always]


def _open(thing: Path) -> Step:
    def step() -> None:
        checkpoint = Checkpoint.open(thing)
        checkpoint.spaces, checkpoint.identity  # noqa: B018

    return step


def _apply(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    gauge = random.choice([world.gauge, world.residual])
    trust = random.random() < 0.8
    opened = [_open(thing)] if random.random() < 0.3 else []
    return _told(thing, random, [*opened, lambda: apply(gauge, thing, out, any_source=trust)])


def _port(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    options: dict[str, Any] = {"any_source": random.random() < 0.7, "verify": False}
    if random.random() < 0.15:
        options["hook"] = random.choice(["blocks.1.hook_resid_post", "blocks.0.mlp.hook_post"])
    gauge = random.choice([world.gauge, world.gauge, world.residual])
    place = out.with_suffix(thing.suffix) if thing.is_file() else out
    return _told(thing, random, [lambda: port(thing, gauge, place, **options)])


def _use_gauge(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    loaded: list[Gauge] = []
    # what is moved through it lies elsewhere
    artifact = world.root / "artifact.pt"
    if not artifact.exists():
        artifact.write_bytes(world.vectors["hooks"]["vector.pt"])

    def load() -> None:
        gauge = Gauge.load(thing)
        gauge.summary(), by_kind(gauge), gauge.inverse().then(gauge)
        loaded.append(gauge)

    def use() -> None:
        load()
        if random.random() < 0.5:
            apply(loaded[0], world.source, out, any_source=True)
        else:
            port(artifact, loaded[0], out.with_suffix(".pt"), any_source=True, verify=False)

    return _told(thing, random, [use])


def _merge(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    verify = None if random.random() < 0.1 else False
    return [lambda: merge(thing, out, verify=verify)]


def _claim(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    return [lambda: load_claim(thing)]


def _report(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    return [lambda: report(thing, out.with_suffix(".html"))]


def _record(world: World, thing: Path, out: Path, random: Random) -> list[Step]:
    def read() -> None:
        record = Record.of(thing)
        record.changed(thing), record.lines(), record.target

    steps = _apply if thing.is_dir() else _port
    return [read, *steps(world, thing, out, random)]


# ---- words ---------------------------------------------------------------------------------------

HOOKS = (
    "blocks.0.hook_resid_pre", "blocks.1.hook_resid_post", "blocks.0.mlp.hook_post", "hook_embed",
    "blocks.0.attn.hook_z", "blocks.0.attn.hook_q", "blocks.0.attn.hook_pattern",
    "ln_final.hook_scale", "model.layers.0", "model.layers.1.mlp.down_proj",
    "blocks.2.hook_resid_post", "unembed",
)  # fmt: skip
MODEL_WORDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rope_parameters",
    "layer_types", "architectures", "auto_map", "quantization_config", "quant_method",
    "tie_word_embeddings", "text_config", "llama", "LlamaForCausalLM", "mistral", "gemma3_text",
    "gpt2", "mixtral", "mamba", "sliding_window", "dtype", "torch_dtype", "bfloat16",
    "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight",
    "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight", "weight_map", "metadata",
    "model-00001-of-00002.safetensors", "../source/model.safetensors", "max_position_embeddings",
    "rms_norm_eps", "hidden_act", "silu", "attention_bias", "partial_rotary_factor",
    "num_experts", "Trainer", "TrainingArguments", "pipeline", "logging", "LlamaModel",
    "MistralForCausalLM",
)  # fmt: skip
PEFT_WORDS = (
    *METHODS, *REFUSALS, "peft_type", "r", "lora_alpha", "target_modules", "target_parameters",
    "bias", "modules_to_save", "layer_replication", "rank_pattern", "alpha_pattern", "use_dora",
    "revision", "init_lora_weights", "pissa", "all-linear", "all", "lora_only",
    "layers_to_transform", "fan_in_fan_out",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "base_model_name_or_path",
    "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
    "base_model.model.lm_head.weight",
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", "adapter_model",
    "auto_mapping", "base_model.model.model.embed_tokens.lora_embedding_A", "prompt_embeddings",
    "num_virtual_tokens",
)  # fmt: skip
SAE_WORDS = (
    *ARCHITECTURES, *NORMALISATIONS, *HOOKS, "architecture", "d_in", "d_out", "d_sae", "metadata",
    "hook_name", "hook_name_out", "hook_point", "hook_head_index", "model_name", "threshold",
    "W_skip", "W_enc", "W_dec", "b_dec", "normalize_activations", "model_from_pretrained_kwargs",
    "signed_align_moves", "scaling_factor", "attn_layers.0.weight", "mean", "matrix",
)  # fmt: skip
OPTIMIZER_WORDS = (
    "state", "param_groups", "params", "param_names", "exp_avg", "exp_avg_sq", "max_exp_avg_sq",
    "step", "momentum_buffer", "row_var", "col_var", "square_avg", "state1", "projector", "lr",
    "weight_decay", "model.norm.weight", "_orig_mod.model.norm.weight", "global_step",
    "log_history", "0", "1",
)  # fmt: skip
LIST_WORDS = (
    *HOOKS, "layer", "neuron", "neurons", "index", "indices", "hook", "activation", "value",
    "values", "mask", "head", "channel", "coordinate", "score", "model", "model_name", "token",
    "feature", "0", "1", "7", "8", "99", "rank", "sign", "weights", "std", "name", "top",
    "expert", "layers",
)  # fmt: skip
VECTOR_WORDS = (
    *HOOKS, "direction", "direction.0", "direction.7", "layer_activations", "layer_type", "mlp",
    "self_attn", "std", "mean", "mask", "norm", "bias", "weight", "W_enc", "exp_avg", "state",
    "0", "1", "hook", "model", "param_groups", "probe.weight", "probe.bias",
)  # fmt: skip
PROBE_WORDS = (
    "__loader__", "__class__", "__module__", "__id__", "content", "type", "file", "ObjectNode",
    "NdArrayNode", "CachedNode", "JsonNode", "ListNode", "DictNode", "TypeNode", "FunctionNode",
    "MethodNode", "ReduceNode", "numpy", "sklearn.linear_model._logistic", "LogisticRegression",
    "Pipeline", "sklearn.pipeline", "StandardScaler", "n_features_in_", "coef_", "intercept_",
    "steps", "schema.json", "os", "system", "PCA", "SVC", "kernel", "feature_names_in_",
    "passthrough",
)  # fmt: skip
GAUGE_WORDS = (
    "format", "version", "spaces", "source", "target", "provenance", "kind", "signed_permutation",
    "residual", "mlp:layers.0.mlp", "heads:layers.0.self_attn", "residual.perm", "residual.sign",
    "residual.margin", "config", "name", "fingerprint", "verdict", "inverted", "path", "method",
    "revision", "signed-align-gauge", *MODEL_WORDS[:20],
)  # fmt: skip
RECIPE_WORDS = (
    "merge_method", "models", "model", "parameters", "weight", "density", "base_model", "slices",
    "sources", "layer_range", "dtype", "out_dtype", "tokenizer_source", "tokenizer", "modules",
    "gauge", "objective", "reference", "spaces", "accept_weak", "signed_align",
    "signed_align_ties", "signed_align_slerp", "ties", "slerp", "linear", "passthrough",
    "task_arithmetic", "dare_ties", "model_stock", "t", "filter", "value", "normalize",
    "permutation", "signed", "none", "all", "residual", "bfloat16", "float32", "int8", "union",
    "base", "chat_template", "pad_to_multiple_of", "architecture", "nobody/nothing",
)  # fmt: skip
CLAIM_WORDS = (
    "claim", "hook", "k", "positive", "negative", "texts", "logits", "probe", "direction", "file",
    "top_mean_difference", "top_attribution", "top_weights", "ridge", "logistic", "negative.txt",
    "direction.json", "claim.json", "/dev/zero", "/dev/full", "/proc/self/mem", "..", *HOOKS,
)  # fmt: skip
REPORT_WORDS = (
    "paths", "alphas", "losses", "chord", "barrier_nats", "warnings", "kind", "kinds", "gauge",
    "model", "error", "exit_code", "verdict", "twins", "chance", "jaccard", "recovery", "merge",
    "curves", "grid", "ceiling", "machine", "date", "command", "python", "accuracy", "steps",
    "lora", "sae", "sign_accuracy", "positive_sign_fraction", "evidence", "spaces", "residual",
    "margin", "seconds", "out", "tensors",
)  # fmt: skip
RECORD_WORDS = (
    "format", "version", "steps", "files", "action", "source", "target", "gauge", "verdict",
    "finding", "name", "fingerprint", "hash", "moved.pt", "../../x", "signed-align-provenance",
    "port", "apply",
)  # fmt: skip

TARGETS: dict[str, Target] = {
    "safetensors": Target(
        lambda world: {"single": world.single}, _apply, whole=True, mutated=(".safetensors",),
        words=MODEL_WORDS, share=130,
    ),
    "index": Target(
        lambda world: {"sharded": world.sharded}, _apply, whole=True, mutated=(".index.json",),
        words=MODEL_WORDS, share=130,
    ),
    "config": Target(
        lambda world: {"single": world.single}, _apply, whole=True, mutated=("config.json",),
        words=MODEL_WORDS, share=15,
    ),
    "adapter": Target(
        lambda world: world.adapters, _port, whole=True, words=PEFT_WORDS, share=100
    ),
    "sae": Target(lambda world: world.dictionaries, _port, whole=True, words=SAE_WORDS, share=100),
    "gauge": Target(lambda world: world.gauges, _use_gauge, words=GAUGE_WORDS, share=70),
    "recipe": Target(lambda world: world.recipes, _merge, words=RECIPE_WORDS, share=12),
    "optimizer": Target(lambda world: world.optimizers, _port, words=OPTIMIZER_WORDS, share=50),
    "training": Target(
        lambda world: world.training, _port, whole=True, words=OPTIMIZER_WORDS, share=15
    ),
    "vector": Target(lambda world: world.vectors, _port, words=VECTOR_WORDS, share=110),
    "list": Target(lambda world: world.lists, _port, words=LIST_WORDS, share=110),
    "probe": Target(lambda world: world.probes, _port, words=PROBE_WORDS, share=30),
    "claim": Target(lambda world: world.claims, _claim, words=CLAIM_WORDS, share=100),
    "report": Target(
        lambda world: world.results, _report, whole=True, words=REPORT_WORDS, share=11
    ),
    "record": Target(
        lambda world: world.records, _record, mutated=("signed_align.json",), words=RECORD_WORDS,
        share=17,
    ),
}  # fmt: skip
"""By the name of the format."""


# ---- one input -----------------------------------------------------------------------------------

NEVER_READ = {"joblib", "pickle"}
"""Samples of a format that is always refused."""

Entry = bytes | str | None
"""What stands at a path: a file's content, what a link points to, or an empty directory."""


def mutated(target: Target, files: Files, random: Random) -> dict[str, Entry]:
    """The files of an input, one or two of them broken."""
    result: dict[str, Entry] = dict(files)
    names = [name for name in files if name.endswith(target.mutated)]
    for _ in range(random.choice([1, 1, 1, 1, 2])):
        name = random.choice(names)
        if random.random() < 0.03:
            result[name] = random.choice(
                [None, b"", "missing", "..", ".", name, "/etc/hostname", "/proc/self/mem"]
            )
            continue
        if random.random() < 0.02 and len(files) > 1:
            del result[name]
            names = [other for other in names if other in result] or list(result)
            continue
        data = result[name]
        if isinstance(data, bytes):
            mutation = MUTATIONS.get(Path(name).suffix, mutate_bytes)
            try:
                result[name] = mutation(data, random, target.words)
            except Exception:  # what was mutated before cannot always be taken apart
                result[name] = mutate_bytes(data, random)
    return result


def lay_out(entries: Mapping[str, Entry], directory: Path) -> None:
    """Write an input into an empty directory."""
    for name, entry in entries.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry is None:
            path.mkdir()
        elif isinstance(entry, str):
            os.symlink(entry, path)
        else:
            path.write_bytes(entry)


class Plain(Random):
    """No chance: options are those under which a sample is moved."""

    def random(self) -> float:
        """Neither rare nor certain."""
        return 0.5

    def choice(self, options: Sequence[Any]) -> Any:
        """The first."""
        return options[0]


class Bench:
    """A world, a place for one input at a time, and the guard that watches it."""

    def __init__(self, root: Path, guard: Guard) -> None:
        warnings.simplefilter("ignore")
        self.world = World(root / "world")
        self.guard = guard
        self._warm: set[str] = set()
        self.place = root / "inputs" / "deep"
        self.inside, self.output = self.place / "in", self.place / "out" / "result"

    def samples(self, name: str) -> Mapping[str, Files]:
        """The valid inputs of a target."""
        return TARGETS[name].samples(self.world)

    def clear(self) -> None:
        """Make room for an input."""
        shutil.rmtree(self.place.parent, ignore_errors=True)
        self.inside.mkdir(parents=True)
        self.output.parent.mkdir()

    def prepare(self, name: str, random: Random) -> list[Step]:
        """Lay out the next input of a target; returns what is to be done with it."""
        target = TARGETS[name]
        samples = self.samples(name)
        files = samples[random.choice(list(samples))]
        entries = mutated(target, files, random)
        return self.steps(name, files, entries, random)

    def steps(
        self, name: str, files: Files, entries: Mapping[str, Entry], random: Random
    ) -> list[Step]:
        """Lay out an input of a target; returns what is to be done with it."""
        target = TARGETS[name]
        self.clear()
        lay_out(entries, self.inside)
        whole = target.whole or (name == "record" and "config.json" in files)
        thing = self.inside if whole else self.inside / next(iter(files))
        return target.steps(self.world, thing, self.output, random)

    def warm(self, name: str) -> None:
        """Move every sample once: what a library only does on first use is done, all are valid.

        Raises whatever a sample raises that should be moved.
        """
        if name in self._warm:
            return
        self._warm.add(name)
        for sample, files in self.samples(name).items():
            if sample in NEVER_READ:
                continue
            for step in self.steps(name, files, dict(files), Plain()):
                step()

    def judge(self, steps: list[Step]) -> Verdict:
        """Do it, watched."""
        allowed = [self.output.parent, *self.world.allowed]
        return self.guard.judge(steps, self.place.parent, allowed, self.output)
