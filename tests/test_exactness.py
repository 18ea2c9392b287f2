"""There and back through a gauge of every space: byte by byte the same, in every dtype.

Fifty random models of twenty-five types: other seeds, widths, vocabularies, depths, tied or not, in
one file or in shards. NaNs with their payloads, infinities, negative zeros and subnormal numbers
come back as they were, since nothing but places and sign bits changes on the way.
"""

import json
import random
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from signed_align import apply, scramble
from signed_align.miniature import _randomise, miniature_config
from tests import tiny
from tests.test_recovery import add_tokenizer

# Dtypes by name, and the integers that their bits are read as.
DTYPES = {
    "float32": (torch.float32, torch.int32),
    "bfloat16": (torch.bfloat16, torch.int16),
    "float16": (torch.float16, torch.int16),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8),
}

# Bits that arithmetic would not keep: NaNs (quiet and signalling, with a payload), infinities,
# negative zero, the least and the largest subnormal number, each with either sign.
PATTERNS = {
    "float32": (0x7FC00001, 0x7F812345, 0x7F800000, 0x00000000, 0x00000001, 0x007FFFFF),
    "bfloat16": (0x7FC1, 0x7F81, 0x7F80, 0x0000, 0x0001, 0x007F),
    "float16": (0x7E01, 0x7C55, 0x7C00, 0x0000, 0x0001, 0x03FF),
    "float8_e4m3fn": (0x7F, 0x7E, 0x00, 0x01, 0x07),
    "float8_e5m2": (0x7D, 0x7E, 0x7F, 0x7C, 0x00, 0x01, 0x03),
}

QUICK = ("llama", "qwen2_moe", "gemma2", "gpt2", "gpt_neox", "phi3", "jamba", "falcon")
FAMILIES = (
    *QUICK,
    *("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3_text", "phi", "olmo"),
    *("olmo2", "bloom", "granite", "starcoder2", "stablelm", "cohere", "smollm3", "opt"),
)


@dataclass(frozen=True)
class Case:
    """A random model: its type, and what its seed chooses."""

    family: str
    seed: int

    def __str__(self) -> str:
        return f"{self.family}-{self.seed}"

    def config(self):
        chooser = random.Random(f"{self.family} {self.seed}")
        layers = 1 if self.seed else chooser.choice([2, 3])
        settings = miniature_config(
            AutoConfig.for_model(self.family, num_hidden_layers=layers)
        ).to_dict()
        factor = chooser.choice([1, 2])
        for name in ("hidden_size", "n_embd", "word_embed_proj_dim"):
            if settings.get(name) == 48:
                settings[name] = 48 * factor
        for name in ("intermediate_size", "ffn_dim", "n_inner"):
            if isinstance(settings.get(name), int):
                settings[name] += 4 * chooser.randrange(8)
        settings["vocab_size"] = chooser.randrange(140, 300)
        settings["tie_word_embeddings"] = chooser.random() < 0.5
        settings.pop("model_type")
        return AutoConfig.for_model(self.family, **settings)

    def save(self, path):
        """The model in float32 with a tokenizer, in shards for every other seed and type."""
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(self.config(), attn_implementation="eager").eval()
        _randomise(model, torch.Generator().manual_seed(self.seed))
        sharded = (FAMILIES.index(self.family) + self.seed) % 2
        model.save_pretrained(path, max_shard_size="60KB" if sharded else "5GB")
        return add_tokenizer(path)


QUICK_CASES = [Case(family, number % 2) for number, family in enumerate(QUICK)]
CASES = [Case(family, seed) for family in FAMILIES for seed in (0, 1)]


def shards(path):
    return sorted(path.glob("*.safetensors"))


def bits_of(path, name):
    """Every floating-point tensor's bits, by name."""
    dtype, integers = DTYPES[name]
    tensors = {key: value for file in shards(path) for key, value in load_file(file).items()}
    return {key: value.view(integers) for key, value in tensors.items() if value.dtype == dtype}


def magnitudes(path, name):
    """All the numbers of a checkpoint without their signs, sorted."""
    clear = torch.iinfo(torch.int8 if DTYPES[name][1] == torch.uint8 else DTYPES[name][1]).max
    return torch.cat([(bits & clear).flatten() for bits in bits_of(path, name).values()]).sort()[0]


def store_as(path, name, seed):
    """Cast every floating-point tensor, and strew bits that arithmetic would change into a third.

    Where it reaches, each pattern is strewn with either sign.
    """
    dtype, integers = DTYPES[name]
    width = 8 * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    patterns = [*chain.from_iterable((bits, bits | 1 << (width - 1)) for bits in PATTERNS[name])]
    signed = [bits - (1 << width) * (bits >> (width - 1)) for bits in patterns]
    values = torch.tensor(patterns if integers is torch.uint8 else signed).to(integers)
    number = 0
    for file in shards(path):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            tensors[key] = tensor.to(dtype)
            if number % 3 == 0:
                flat = tensors[key].view(integers).view(-1)
                places = torch.randperm(len(flat), generator=generator)[: len(values)]
                flat[places] = values[: len(places)]
            number += 1
        save_file(tensors, file, metadata={"format": "pt"})
    config = path / "config.json"
    if not name.startswith("float8"):  # transformers has no models of eight bits without a scheme
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": name}))


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.iterdir())}


def check_there_and_back(source, name, tmp_path, seed):
    """Scrambled, applied again, and applied backwards: what each law says of the files."""
    before = contents(source)
    gauge = scramble(source, tmp_path / "twin", seed=seed, spaces=["all"])
    apply(gauge, source, tmp_path / "again")
    apply(gauge, tmp_path / "twin", tmp_path / "back", inverse=True)
    twin, again, back = (contents(tmp_path / step) for step in ("twin", "again", "back"))
    weights = [file for file in before if file.endswith(".safetensors")]
    assert {file: back[file] for file in before} == before
    assert {file: again[file] for file in before} == {file: twin[file] for file in before}
    others = set(before) - set(weights)
    assert others >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file: twin[file] for file in others} == {file: before[file] for file in others}
    # Nothing but places and sign bits has changed, and of nearly every matrix they have.
    assert torch.equal(magnitudes(source, name), magnitudes(tmp_path / "twin", name))
    home, away = bits_of(source, name), bits_of(tmp_path / "twin", name)
    matrices = [key for key in home if home[key].ndim > 1]
    moved = [key for key in matrices if not torch.equal(home[key], away[key])]
    assert len(moved) >= 0.9 * len(matrices)
    assert any(not element.is_identity for element in gauge.elements.values())
    return gauge


def check(case, tmp_path):
    clean = case.save(tmp_path / "clean")
    gauge = scramble(clean, tmp_path / "twin", seed=case.seed, spaces=["all"])
    assert {space.partition(":")[0] for space in gauge.elements} > {"residual"}
    before, after = tiny.logits(tiny.load(clean)), tiny.logits(tiny.load(tmp_path / "twin"))
    assert tiny.relative_change(before, after) <= 1e-5
    for name in DTYPES:
        source = case.save(tmp_path / name / "source")
        store_as(source, name, case.seed)
        check_there_and_back(source, name, tmp_path / name, case.seed)


@pytest.mark.parametrize("case", QUICK_CASES, ids=str)
def test_a_model_moves_there_and_back_byte_by_byte(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK_CASES], ids=str)
def test_fifty_models_move_there_and_back_byte_by_byte(case, tmp_path):
    check(case, tmp_path)


def test_the_models_are_fifty_of_twenty_types_and_more():
    assert len(CASES) == len({str(case) for case in CASES}) == 50
    assert len({case.family for case in CASES}) >= 20
    assert set(QUICK_CASES) < set(CASES)
