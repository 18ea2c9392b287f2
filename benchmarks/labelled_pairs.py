"""Pairs of small models of which it is known what relates them: the set `diagnose` is judged by.

Every family has a base that is trained for a while on sentences from a random Markov chain, so that
its embedding is not white noise. The other model of a pair is made from it, or trained from another
seed on the same sentences.
"""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from signed_align import Chart, scramble
from signed_align.chart import RESIDUAL

WIDTH = 64
TOKENS = 512
SPECIAL = ["<pad>", "<s>", "<unk>"]
FIRST_WORD = len(SPECIAL) + len(ascii_letters)
POSITIONS = 128
FOLLOWERS = 8
"""How many words may follow a word of the Markov chain."""

SHAPE: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": TOKENS,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"head_dim": 16},
    "mistral": SHAPE | {"head_dim": 16},
    "qwen2": SHAPE | {"tie_word_embeddings": True},
    "qwen3": SHAPE | {"head_dim": 16},
    "phi3": SHAPE,
    "gemma": SHAPE | {"head_dim": 16},
    "gpt2": GPT2_SHAPE,
}
OTHER_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "mistral": ("llama", {}),
    "qwen2": ("qwen2", {"intermediate_size": 128}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {"hidden_size": 96}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gpt2": ("gpt2", {"n_layer": 3}),
}
"""By family, what the model of another architecture is instead: its type, and settings."""


@dataclass(frozen=True)
class Labelled:
    """A pair, what it is, and what it has to be called.

    ``label`` says how it was made; ``coordinates`` is what the tokens that both have must show of
    a pair with different vocabularies.
    """

    family: str
    label: str
    source: Path
    target: Path
    verdict: str
    coordinates: str | None = None

    @property
    def name(self) -> str:
        """Family and label."""
        return f"{self.family}: {self.label}"


# ---- models and sentences ------------------------------------------------------------------------


def all_words(count: int = TOKENS) -> list[str]:
    """The tokens of a vocabulary, by row: letters, and words of a capital and a small letter."""
    pairs = (x + y for x in ascii_uppercase for y in ascii_lowercase)
    return [*SPECIAL, *ascii_letters, *islice(pairs, count - FIRST_WORD)]


def sentences(count: int, length: int = 24, seed: int = 0, chain: int = 0) -> Tensor:
    """Token ids of sentences from a Markov chain, of shape (count, length)."""
    table = torch.Generator().manual_seed(1000 + chain)
    followers = torch.randint(FIRST_WORD, TOKENS, (TOKENS, FOLLOWERS), generator=table)
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(FIRST_WORD, TOKENS, (count,), generator=generator)]
    while len(words) < length:
        chosen = torch.randint(FOLLOWERS, (count,), generator=generator)
        words.append(followers[words[-1], chosen])
    return torch.stack(words, dim=1)


def text(count: int = 60) -> list[str]:
    """Sentences in letters, which the tokenizer reads."""
    words = all_words()
    return ["".join(words[token] for token in ids) for ids in sentences(count, seed=77).tolist()]


def save_tokenizer(path: Path, words: list[str]) -> None:
    """A tokenizer with these tokens."""
    vocabulary = {token: row for row, token in enumerate(words)}
    merges = [(word[0], word[1]) for word in words if len(word) == 2]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>"
    ).save_pretrained(path)


def save(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model with the tokenizer of its rows."""
    copy.deepcopy(model).to(dtype).save_pretrained(path)
    save_tokenizer(path, all_words(model.config.vocab_size))
    return path


def build(model_type: str, seed: int, settings: dict[str, Any]) -> Any:
    """A random model, norm gains and biases included."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def train(model: Any, steps: int, rate: float, *, seed: int = 0, chain: int = 0) -> Any:
    """Train a copy of a model on sentences of a Markov chain, with AdamW."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(steps):
        ids = sentences(16, seed=10_000 * (seed + 1) + step, chain=chain)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def load(path: Path) -> Any:
    """A saved model."""
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


# ---- rotations -----------------------------------------------------------------------------------

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                        "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "ln_1": ("attn.c_attn",),
    "ln_2": ("mlp.c_fc",),
}  # fmt: skip
"""By the name of a norm inside a block, what reads through it."""


def untied(model: Any) -> Any:
    """The same model with an unembedding of its own."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    free = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    free.load_state_dict(weights)
    return free.eval()


@torch.no_grad()
def folded(model: Any) -> Any:
    """The same function with the gains, and biases, of norms in what reads through them."""
    model = untied(model)
    bodies = model.transformer if hasattr(model, "transformer") else model.model
    blocks = bodies.h if hasattr(bodies, "h") else bodies.layers
    for block in blocks:
        for name, readers in READERS.items():
            norm = getattr(block, name, None)
            for path in readers if norm is not None else ():
                if any(path == name for name, _ in block.named_modules()):
                    _fold(model, norm, block.get_submodule(path))
            if norm is not None:
                _reset(model, norm)
    last = bodies.ln_f if hasattr(bodies, "ln_f") else bodies.norm
    gain = _gain(model, last)
    model.lm_head.weight.mul_(gain)
    if getattr(last, "bias", None) is not None:  # the head has none to take it
        last.bias.div_(gain)
    _reset(model, last, bias=False)
    return model


def _gain(model: Any, norm: Any) -> Tensor:
    gain: Tensor = norm.weight.clone()
    return 1 + gain if model.config.model_type == "gemma" else gain


def _fold(model: Any, norm: Any, reader: Any) -> None:
    conv = type(reader).__name__ == "Conv1D"
    bias = getattr(norm, "bias", None)
    if bias is not None:
        reader.bias.add_(bias @ reader.weight if conv else reader.weight @ bias)
    gain = _gain(model, norm)
    reader.weight.mul_(gain[:, None] if conv else gain)


def _reset(model: Any, norm: Any, *, bias: bool = True) -> None:
    norm.weight.fill_(0.0 if model.config.model_type == "gemma" else 1.0)
    if bias and getattr(norm, "bias", None) is not None:
        norm.bias.zero_()


def random_rotation(size: int, seed: int, *, keep_mean: bool) -> Tensor:
    """A random orthogonal matrix; ``keep_mean`` keeps the direction that LayerNorm takes off."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    if not keep_mean:
        return torch.linalg.qr(matrix)[0]
    matrix[:, 0] = 1
    basis = torch.linalg.qr(matrix)[0]
    inner = torch.eye(size, dtype=torch.float64)
    inner[1:, 1:] = random_rotation(size - 1, seed + 1, keep_mean=False)
    return basis @ inner @ basis.T


@torch.no_grad()
def rotated(model: Any, seed: int = 0, rotation: Tensor | None = None) -> Any:
    """The same function with a rotated residual stream, norms folded as QuaRot does it.

    The rotation is random, or that of shape (d, d) which is given.
    """
    model = folded(model)
    chart = Chart.of(model.config)
    if rotation is None:
        layer_norm = model.config.model_type == "gpt2"
        rotation = random_rotation(chart.width, seed, keep_mean=layer_norm)
    for name, parameter in model.named_parameters():
        for axis, label in enumerate(chart.axes(name, parameter.shape)):
            if label == RESIDUAL:
                turned = parameter.double().movedim(axis, -1) @ rotation
                parameter.copy_(turned.movedim(-1, axis))
    return model


# ---- vocabularies --------------------------------------------------------------------------------


@torch.no_grad()
def reordered(path: Path, out: Path, seed: int = 0) -> Path:
    """The same model with its tokens in another order."""
    model = load(path)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(seed))
    for matrix in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        matrix.copy_(matrix[order].clone())
    model.save_pretrained(out)
    words = all_words()
    save_tokenizer(out, [words[row] for row in order.tolist()])
    return out


def grown(path: Path, out: Path, more: int = 8) -> Path:
    """The same model with more tokens."""
    model = load(path)
    torch.manual_seed(0)
    model.resize_token_embeddings(TOKENS + more, mean_resizing=False)
    return save(model, out)


def without_tokenizer(path: Path, out: Path) -> Path:
    """A copy that says nothing of its tokens."""
    return Path(shutil.copytree(path, out, ignore=shutil.ignore_patterns("*token*")))


# ---- the set -------------------------------------------------------------------------------------


@dataclass
class Family:
    """The pairs of one family; models are made once and kept in ``root``.

    ``steps`` is how long bases are trained.
    """

    name: str
    root: Path
    steps: int = 150

    def __post_init__(self) -> None:
        self.root = self.root / self.name
        self.root.mkdir(parents=True, exist_ok=True)
        self.base = self._trained("base", 0)

    def _trained(self, name: str, seed: int) -> Path:
        seed += 100 * list(FAMILIES).index(self.name)  # llama and mistral would be the same
        return self._kept(
            name,
            lambda out: save(
                train(build(self.name, seed, FAMILIES[self.name]), self.steps, 3e-3, seed=seed), out
            ),
        )

    def _kept(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.root / name
        if not path.exists():
            make(path)
        return path

    def _twin(self, of: Path, name: str, **options: Any) -> Path:
        return self._kept(name, lambda out: scramble(of, out, **options))

    def _tuned(self, of: Path, name: str, steps: int, rate: float, chain: int = 1) -> Path:
        return self._kept(
            name, lambda out: save(train(load(of), steps, rate, seed=5, chain=chain), out)
        )

    def _pair(self, label: str, target: Path, verdict: str, *more: Any) -> Labelled:
        return Labelled(self.name, label, self.base, target, verdict, *more)

    # ---- one of each label -----------------------------------------------------------------------

    def identical(self) -> Labelled:
        """A copy in other files."""
        path = self._kept(
            "copy", lambda out: load(self.base).save_pretrained(out, max_shard_size="100KB")
        )
        return self._pair("identical", path, "identical")

    def light(self) -> Labelled:
        """A fine-tune of a few steps."""
        path = self._tuned(self.base, "light", 10, 1e-3)
        return self._pair("light fine-tune", path, "same_coordinates")

    def heavy(self) -> Labelled:
        """A long, hot fine-tune on other sentences."""
        path = self._tuned(self.base, "heavy", 150, 5e-3)
        return self._pair("heavy fine-tune", path, "same_coordinates")

    def permuted(self) -> Labelled:
        """An element of S_d."""
        path = self._twin(self.base, "s_d", seed=1, signed=False)
        return self._pair("S_d", path, "permutation")

    def signed(self) -> Labelled:
        """An element of B_d; for LayerNorm a permutation with the global sign."""
        path = self._twin(self.base, "b_d", seed=2)
        return self._pair("B_d", path, "signed_permutation")

    def everywhere(self) -> Labelled:
        """An element of every space."""
        path = self._twin(self.base, "all", seed=3, spaces=["all"])
        return self._pair("all spaces", path, "signed_permutation")

    def rotated(self) -> Labelled:
        """A dense rotation."""
        path = self._kept("rotated", lambda out: save(rotated(load(self.base)), out))
        return self._pair("dense rotation", path, "dense_rotation")

    def unrelated(self) -> Labelled:
        """Another seed, the same sentences."""
        return self._pair("unrelated", self._trained("other", 1), "unrelated")

    def resized(self) -> Labelled:
        """A twin with more tokens."""
        path = self._kept("grown", lambda out: grown(self.signed().target, out))
        return self._pair("resized vocabulary", path, "different_vocabulary", "signed_permutation")

    def other_architecture(self) -> Labelled:
        """A model with one part of another size, or of another type."""
        model_type, settings = OTHER_SHAPES[self.name]
        shape = FAMILIES[self.name] | settings
        path = self._kept("shape", lambda out: save(build(model_type, 0, shape), out))
        return self._pair("architecture", path, "different_architecture")

    # ---- harder ones -----------------------------------------------------------------------------

    def tuned_twin(self) -> Labelled:
        """A fine-tune of a twin in all spaces."""
        path = self._tuned(self.everywhere().target, "tuned-twin", 60, 2e-3)
        return self._pair("fine-tuned twin", path, "signed_permutation")

    def rounded_twin(self) -> Labelled:
        """A twin in bfloat16."""
        path = self._kept(
            "rounded", lambda out: save(load(self.signed().target), out, torch.bfloat16)
        )
        return self._pair("B_d in bfloat16", path, "signed_permutation")

    def folded_twin(self) -> Labelled:
        """A twin whose norm gains are in what reads through them."""
        path = self._kept("folded", lambda out: save(folded(load(self.signed().target)), out))
        return self._pair("B_d, norms folded", path, "signed_permutation")

    def reordered(self) -> Labelled:
        """A fine-tune with its tokens in another order."""
        path = self._kept("reordered", lambda out: reordered(self.light().target, out))
        return self._pair("reordered vocabulary", path, "different_vocabulary", "same_coordinates")

    def rotated_and_tuned(self) -> Labelled:
        """A fine-tune of a rotated model."""
        path = self._tuned(self.rotated().target, "rotated-tuned", 20, 1e-3)
        return self._pair("fine-tuned rotation", path, "dense_rotation")

    def no_tokenizers(self) -> Labelled:
        """A twin with more tokens, neither with a tokenizer."""
        paths = [
            self._kept(f"{path.name}-bare", lambda out, path=path: without_tokenizer(path, out))
            for path in (self.base, self.resized().target)
        ]
        pair = self._pair("no tokenizer", paths[1], "different_vocabulary", "signed_permutation")
        return replace(pair, source=paths[0])

    def sites_alone(self) -> Labelled:
        """The residual stream as it was, units and heads scrambled."""
        spaces = ["mlp", "heads"]
        path = self._twin(self.base, "sites", seed=4, signed=False, spaces=spaces)
        return self._pair("MLP and heads alone", path, "permutation")


EASY = (
    Family.identical, Family.light, Family.heavy, Family.permuted, Family.signed,
    Family.everywhere, Family.rotated, Family.unrelated, Family.resized, Family.other_architecture,
)  # fmt: skip
HARDER = (
    Family.tuned_twin, Family.rounded_twin, Family.folded_twin, Family.reordered,
    Family.rotated_and_tuned, Family.no_tokenizers, Family.sites_alone,
)  # fmt: skip


def labelled_pairs(root: Path, *, quick: bool = False) -> Iterator[Labelled]:
    """The whole set, family by family; the pairs of one family alone if ``quick``."""
    for name in list(FAMILIES)[: 1 if quick else None]:
        family = Family(name, root)
        for make in (*EASY, *HARDER):
            yield make(family)
