"""Every kind of output, read by the library that reads it: nothing missing, nothing left over.

What an output computes is asserted where its kind is tested; here it is that the reader takes all
of it without a complaint, whatever else lies beside it.
"""

import csv
import json
import pickle
import warnings
from types import SimpleNamespace

import gguf
import joblib
import numpy as np
import pytest
import skops.io
import torch
from mergekit.common import ModelReference
from mergekit.io.lazy_tensor_loader import LazyTensorLoader, ShardedTensorIndex
from peft import PeftConfig, PeftModel
from sae_lens import SAE
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerState

from signed_align import apply, merge, scramble
from signed_align.adapters.sae import ARCHITECTURES
from tests import test_merge, test_peft, test_sae, test_training, tiny
from tests.porting import port
from tests.test_recovery import add_tokenizer
from tests.test_steering import control_vector

HOOK = "blocks.1.hook_resid_post"
MLP = "blocks.1.mlp.hook_post"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model with a tokenizer, its twin in all spaces, and the gauge between them."""
    root = tmp_path_factory.mktemp("pair")
    model = tiny.build("llama", attention_bias=False, mlp_bias=False)
    source = add_tokenizer(tiny.save(model, root / "source"))
    gauge = scramble(source, root / "target", seed=3, spaces=["all"])
    return SimpleNamespace(source=source, target=root / "target", gauge=gauge)


def heard(action):
    """What an action returns, and the warnings it gives."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = action()
    return result, [str(warning.message) for warning in said]


def read_by_transformers(path):
    """Load a checkpoint; every key is there, and no other, and every shape fits."""
    AutoConfig.from_pretrained(path)
    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    complaints = {name: found for name, found in loading.items() if found}
    assert complaints == {}
    return model


def read_by_mergekit(path):
    """Open a checkpoint as mergekit does, and read every tensor of it."""
    reference = ModelReference.model_validate(str(path))
    assert reference.config(trust_remote_code=False).model_type
    index = ShardedTensorIndex.from_disk(str(path))
    loader = LazyTensorLoader(index)
    tensors = {name: loader.get_tensor(name) for name in index.tensor_paths}
    stored = {
        name: tensor
        for shard in path.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
    }
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)


# ---- checkpoints ---------------------------------------------------------------------------------

ONE_FILE, SHARDS = "5GB", "40KB"
CHECKPOINTS = {
    "llama": ONE_FILE,
    "mistral": SHARDS,
    "qwen2": SHARDS,
    "qwen3": ONE_FILE,
    "gemma2": SHARDS,
    "phi3": SHARDS,
    "gpt2": ONE_FILE,
    "gpt_neox": SHARDS,
    "olmo2": ONE_FILE,
}


@pytest.mark.parametrize(("model_type", "shard"), CHECKPOINTS.items())
def test_moved_checkpoints(tmp_path, model_type, shard):
    source = add_tokenizer(tiny.save(tiny.build(model_type), tmp_path / "source", shard=shard))
    gauge = scramble(source, tmp_path / "twin", seed=3, spaces=["all"])
    apply(gauge, tmp_path / "twin", tmp_path / "back", inverse=True)
    for output in (tmp_path / "twin", tmp_path / "back"):
        read_by_transformers(output)
        read_by_mergekit(output)
        vocabulary = AutoTokenizer.from_pretrained(output).get_vocab()
        assert vocabulary == AutoTokenizer.from_pretrained(source).get_vocab()


def test_mergekit_merges_what_was_moved(pair, tmp_path):
    twin = pair.target
    file = test_merge.recipe(tmp_path / "recipe.yml", "linear", {twin: {"weight": 1.0}})
    merge(file, tmp_path / "merged", test_merge.QUIET)
    before, after = tiny.load(twin), read_by_transformers(tmp_path / "merged").eval()
    assert tiny.relative_change(tiny.logits(before), tiny.logits(after)) <= 1e-5


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base, two fine-tunes of it, and one of them scrambled, as ``tests.test_merge`` has them."""
    root = tmp_path_factory.mktemp("family")
    for seed, name in enumerate(["base", "tuned", "second"]):
        model = tiny.build("qwen2", tie_word_embeddings=False)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * bool(seed) * torch.randn_like(parameter))
        tiny.save(model, root / name)
    scramble(root / "tuned", root / "twin", seed=5)
    return root


@pytest.mark.parametrize("method", test_merge.PLAIN)
def test_merged_models(family, tmp_path, method):
    """Every aligned method; what it merges to is tested in ``tests.test_merge``."""
    models = [family / "base", family / "twin"]
    if method in test_merge.THREE_MODELS:
        models.append(family / "second")
    if method == "passthrough":
        models = models[:1]
    values, base = test_merge.inputs_of(method, models)
    parameters = {"t": 0.5} if method in ("slerp", "nearswap") else None
    file = test_merge.recipe(
        tmp_path / "recipe.yml", f"signed_align_{method}", values, base, parameters
    )
    merge(file, tmp_path / "merged", test_merge.QUIET)
    read_by_transformers(tmp_path / "merged")
    read_by_mergekit(tmp_path / "merged")


# ---- adapters ------------------------------------------------------------------------------------

ONE_OF_EACH = {}
for _name, (_peft_type, *_) in {**test_peft.MOVING, **test_peft.RESIDUAL_ONLY}.items():
    ONE_OF_EACH.setdefault(_peft_type, _name)
pairs = test_peft.pairs


@pytest.mark.parametrize("peft_type", ONE_OF_EACH)
def test_adapters(pairs, tmp_path, peft_type):
    name = ONE_OF_EACH[peft_type]
    spaces = ("all",) if name in test_peft.MOVING else ("residual",)
    _, settings, *model = {**test_peft.MOVING, **test_peft.RESIDUAL_ONLY}[name]
    source, target, gauge = pairs(model[0] if model else "llama", spaces)
    test_peft.make(peft_type, settings, source, tmp_path / "adapter")
    port(tmp_path / "adapter", gauge, tmp_path / "ported")
    assert PeftConfig.from_pretrained(tmp_path / "ported").peft_type == peft_type
    _, before = heard(lambda: PeftModel.from_pretrained(tiny.load(source), tmp_path / "adapter"))
    _, after = heard(lambda: PeftModel.from_pretrained(tiny.load(target), tmp_path / "ported"))
    # of keys nothing may be said; of the rest no more than of the adapter that was ported
    assert not [message for message in after if "key" in message.lower()]
    assert sorted(set(after) - set(before)) == []
    with (
        safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as home,
        safe_open(tmp_path / "ported" / "adapter_model.safetensors", "pt") as away,
    ):
        assert sorted(home.keys()) == sorted(away.keys())
        assert home.metadata() == away.metadata()


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "coder" not in name])
def test_dictionaries(pair, tmp_path, architecture):
    made_on = pair.source
    test_sae.build(architecture, tmp_path / "sae", model=made_on)
    port(tmp_path / "sae", pair.gauge, tmp_path / "ported")
    home = SAE.load_from_disk(tmp_path / "sae")
    away, said = heard(lambda: SAE.load_from_disk(tmp_path / "ported"))
    assert said == []
    assert home.state_dict().keys() == away.state_dict().keys()
    assert type(home) is type(away)
    assert not all(
        torch.equal(one, other)
        for one, other in zip(home.state_dict().values(), away.state_dict().values(), strict=True)
    )


# ---- single files --------------------------------------------------------------------------------

VECTOR = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(1))
NAMED = {"hook": HOOK, "vector": VECTOR}


def probe():
    rows = np.random.default_rng(0).normal(size=(60, tiny.WIDTH))
    return LogisticRegression().fit(rows, rows[:, 0] > 0)


def write_pickle(content, path):
    path.write_bytes(pickle.dumps(content, protocol=4))


def read_pickle(path):
    with open(path, "rb") as file:
        return pickle.load(file)


def read_numpy(path):
    content = np.load(path, allow_pickle=False)
    return [content[name] for name in content] if path.suffix == ".npz" else content


def read_safetensors(path):
    return load_file(path)["vector"]


def read_gguf(path):
    (tensor,) = gguf.GGUFReader(path).tensors
    return np.array(tensor.data)


def read_table(path):
    with open(path, newline="") as file:
        return [row["neuron"] for row in csv.DictReader(file)]


def write_table(rows, path):
    path.write_text("layer,neuron\n" + "".join(f"{layer},{unit}\n" for layer, unit in rows))


# A file's name: how it is written, how its own library reads it, and the options of the port.
FILES = {
    "v.pt": (lambda path: torch.save(NAMED, path), torch.load, {}),
    "v.pth": (lambda path: torch.save(NAMED, path), torch.load, {}),
    "v.npy": (lambda path: np.save(path, VECTOR.numpy()), read_numpy, {"hook": HOOK}),
    "v.npz": (lambda path: np.savez(path, a=VECTOR.numpy()), read_numpy, {"hook": HOOK}),
    "v.safetensors": (
        lambda path: save_file({"vector": VECTOR}, path), read_safetensors, {"hook": HOOK}
    ),
    "v.gguf": (lambda path: control_vector(path, {1: VECTOR.numpy()}), read_gguf, {}),
    "p.skops": (lambda path: skops.io.dump(probe(), path), skops.io.load, {}),
    "p.joblib": (
        lambda path: joblib.dump(probe(), path), joblib.load, {"allow_pickle": True}
    ),
    "p.pkl": (lambda path: write_pickle(probe(), path), read_pickle, {"allow_pickle": True}),
    "n.json": (
        lambda path: path.write_text(json.dumps({"hook": MLP, "neurons": [3, 5]})),
        lambda path: json.loads(path.read_text()),
        {},
    ),
    "n.csv": (
        lambda path: write_table([(0, 3), (1, 5)], path),
        read_table,
        {"hook": "blocks.{layer}.mlp.hook_post"},
    ),
}  # fmt: skip


def values_of(content):
    """The numbers in what a reader gives, in a form that compares."""
    if isinstance(content, LogisticRegression):
        return content.coef_.tolist()
    if isinstance(content, dict):
        return [values_of(value) for value in content.values()]
    if isinstance(content, (list, tuple)):
        return [values_of(value) for value in content]
    return content.tolist() if hasattr(content, "tolist") else content


@pytest.mark.parametrize("name", FILES)
def test_single_files(pair, tmp_path, name):
    write, read, options = FILES[name]
    write(tmp_path / name)
    port(tmp_path / name, pair.gauge, tmp_path / f"ported-{name}", **options)
    home = read(tmp_path / name)
    away, said = heard(lambda: read(tmp_path / f"ported-{name}"))
    assert said == []
    assert type(home) is type(away)
    assert values_of(home) != values_of(away)


def test_training_state(tmp_path, capsys):
    """Trainer itself goes on from a checkpoint that was moved, to its end."""
    model = tiny.build("llama", num_hidden_layers=1)
    test_training.train(model, tmp_path / "home", stop=test_training.HALF + 1)
    checkpoint = tmp_path / "home" / f"checkpoint-{test_training.HALF}"
    gauge = scramble(checkpoint, tmp_path / "twin", seed=3, spaces=["all"])
    port(checkpoint, gauge, tmp_path / "moved")
    read_by_transformers(tmp_path / "moved")
    state = torch.load(tmp_path / "moved" / "optimizer.pt", weights_only=True)
    home = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert state["state"].keys() == home["state"].keys()
    steps = TrainerState.load_from_json(tmp_path / "moved" / "trainer_state.json").global_step
    assert steps == test_training.HALF
    losses, said = heard(
        lambda: test_training.train(
            test_training.fresh(), tmp_path / "away", resume=tmp_path / "moved",
            stop=test_training.HALF + 2,
        )
    )  # fmt: skip
    assert len(losses) == 2
    assert not [message for message in said if "key" in message.lower()]
    capsys.readouterr()
