"""Recovery from real forward passes and from weights, of tiny models of every type."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from signed_align import Checkpoint, SignedAlignError, recover, scramble
from signed_align.activations import batches, load_tokenizer, sentences_of, typical
from signed_align.errors import CheckpointError, GaugeError, SignedAlignWarning
from tests import tiny

CHARACTERS = [chr(code) for code in range(33, 127)] + ["Ġ"]
GENERATOR = torch.Generator().manual_seed(0)
TEXT = [
    "".join(CHARACTERS[i] for i in torch.randint(94, (20,), generator=GENERATOR)) for _ in range(60)
]


def add_tokenizer(path, characters=CHARACTERS):
    """A tokenizer with a token a character."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2}
    vocabulary |= {character: row for row, character in enumerate(characters, 3)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>"
    ).save_pretrained(path)
    return path


def twins(tmp_path, model_type="llama", dtype=torch.float32, **settings):
    source = add_tokenizer(
        tiny.save(tiny.build(model_type, **settings), tmp_path / "source", dtype)
    )
    return source, tmp_path / "twin", scramble(source, tmp_path / "twin", seed=6)


def accuracy(gauge, truth):
    return tuple(gauge.elements["residual"].agreement(truth.elements["residual"]).values())


@pytest.mark.parametrize("model_type", tiny.ALL_TYPES)
@pytest.mark.parametrize("method", ["weights", "activations"])
def test_the_gauge_of_a_twin_is_found(tmp_path, model_type, method):
    source, twin, truth = twins(tmp_path, model_type)
    gauge = recover(source, twin, text=TEXT if method == "activations" else None)
    assert accuracy(gauge, truth) == (1.0, 1.0)
    assert gauge.provenance["method"] == method
    assert gauge.source == truth.source
    assert gauge.target == truth.target
    assert gauge.margins["residual"].shape == (tiny.WIDTH,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["weights", "activations"])
def test_half_precision_checkpoints(tmp_path, dtype, method):
    source, twin, truth = twins(tmp_path, dtype=dtype)
    gauge = recover(source, twin, text=TEXT if method == "activations" else None)
    assert accuracy(gauge, truth) == (1.0, 1.0)


@pytest.mark.parametrize("layers", [[0], [1], [-1], [0, 2]])
def test_chosen_layers(tmp_path, layers):
    source, twin, truth = twins(tmp_path)
    gauge = recover(source, twin, text=TEXT, layers=layers)
    assert accuracy(gauge, truth) == (1.0, 1.0)
    assert gauge.provenance["layers"] == [layer % 3 for layer in layers]
    with pytest.raises(GaugeError, match="no hidden state 3"):
        recover(source, twin, text=TEXT, layers=[3])


def test_massive_tokens_and_padding_are_left_out_and_counted():
    x = torch.randn(50, 8)
    y = x.clone()
    x[7] *= 1000
    y[9] *= 1000
    x[11] = 0
    kept = typical(x, y)
    assert (~kept).nonzero().flatten().tolist() == [7, 9, 11]


def test_a_massive_token_would_otherwise_decide(tmp_path):
    """Rows of one untrained-looking token dominate the embedding unless they are left out."""
    source, _, _ = twins(tmp_path)
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][5] *= 1e4
    save_file(tensors, file, metadata={"format": "pt"})
    truth = scramble(source, tmp_path / "again", seed=2)
    gauge = recover(source, tmp_path / "again")
    assert accuracy(gauge, truth) == (1.0, 1.0)
    assert gauge.provenance["left_out"] == 1


def test_massive_tokens_are_left_out_of_activations(tmp_path):
    """A token that is huge and random on one side would drown the rest of a small text."""
    source, twin, truth = twins(tmp_path)
    for path, seed in ((source, 1), (twin, 2)):
        file = path / "model.safetensors"
        tensors = load_file(file)
        noise = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(seed))
        tensors["model.embed_tokens.weight"][3] = 1e3 * noise
        save_file(tensors, file, metadata={"format": "pt"})
    text = [*(line.replace("!", "#") for line in TEXT), "a!", "b!", "c!", "d!"]
    gauge = recover(source, twin, text=text, layers=[0], max_tokens=5000)
    assert accuracy(gauge, truth) == (1.0, 1.0)
    assert gauge.provenance["left_out"] == 4
    # sequences of two lengths were padded; padding is in neither count
    assert gauge.provenance["samples"] + 4 == gauge.provenance["tokens"] == 60 * 20 + 8


def test_a_checkpoint_of_the_bare_model_class_is_matched(tmp_path):
    source, twin, truth = twins(tmp_path, tie_word_embeddings=True)
    file = twin / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert accuracy(recover(source, twin), truth) == (1.0, 1.0)


def test_text_without_tokens_is_refused(tmp_path):
    source, twin, _ = twins(tmp_path)
    with pytest.raises(SignedAlignError, match="no text"):
        recover(source, twin, text=[""])


def test_padding_does_not_count(tmp_path):
    from signed_align.activations import load_tokenizer

    source, _, _ = twins(tmp_path)
    tokenizer = load_tokenizer(Checkpoint.open(source))
    packed = batches(tokenizer, ["abc", "", "d"], max_tokens=100)
    assert sum(batch.tokens for batch in packed) == 4
    assert packed[0].input_ids.shape == (2, 3)


def test_too_few_tokens_are_said_with_the_number_needed(tmp_path):
    source, twin, _ = twins(tmp_path)
    with pytest.warns(SignedAlignWarning, match=r"20 tokens for 48 coordinates; at least 48"):
        recover(source, twin, text=TEXT[:1])


def test_activations_that_are_not_finite_are_refused(tmp_path):
    source, twin, _ = twins(tmp_path)
    file = twin / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'norm\.weight' of .* holds NaN or infinite"):
        recover(source, twin, text=TEXT)


def test_models_that_no_gauge_connects_are_refused(tmp_path):
    source, _, _ = twins(tmp_path)
    gpt2 = add_tokenizer(tiny.save(tiny.build("gpt2"), tmp_path / "gpt2"))
    with pytest.raises(CheckpointError, match="one architecture"):
        recover(source, gpt2)
    narrow = tiny.save(
        tiny.build("llama", hidden_size=32, num_attention_heads=2), tmp_path / "narrow"
    )
    with pytest.raises(CheckpointError, match=r"48 residual coordinates and .* 32"):
        recover(source, narrow)


def test_vocabularies_that_grew_or_moved_are_matched_by_token(tmp_path):
    """The twin's tokens are in another order and there is one more: rows are paired by string."""
    source, twin, truth = twins(tmp_path)
    count = len(CHARACTERS)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([torch.arange(3), order + 3, torch.arange(3 + count, 120), torch.tensor([4])])
    file = twin / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][rows].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"vocab_size": len(rows)}))
    add_tokenizer(twin, [CHARACTERS[i] for i in order] + ["é"])
    assert accuracy(recover(source, twin), truth) == (1.0, 1.0)
    with pytest.raises(CheckpointError, match="different tokenizers"):
        recover(source, twin, text=TEXT)


def test_text_has_to_be_there(tmp_path):
    with pytest.raises(SignedAlignError, match="cannot be read"):
        sentences_of(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n  \n")
    with pytest.raises(SignedAlignError, match="no text"):
        sentences_of(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(SignedAlignError, match="UTF-8"):
        sentences_of(tmp_path / "latin.txt")
    assert len(sentences_of(None)) > 1000
    with pytest.raises(GaugeError, match="no part"):
        recover(*twins(tmp_path)[:2], method="weights", layers=[1])


@pytest.mark.parametrize("model_type", ["gemma", "gpt2", "llama", "qwen3"])
def test_a_model_without_a_tokenizer_is_given_none(tmp_path, model_type):
    """transformers makes one up for some types, whose few tokens would be all the evidence."""
    source = tiny.save(tiny.build(model_type), tmp_path / "source")
    truth = scramble(source, tmp_path / "twin", seed=4)
    found = recover(source, tmp_path / "twin")
    assert found.element("residual") == truth.element("residual")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(Checkpoint.open(source))


def test_models_of_different_depth_are_refused(tmp_path):
    source = add_tokenizer(tiny.save(tiny.build("llama"), tmp_path / "source"))
    deep = tiny.build("llama", num_hidden_layers=3)
    target = add_tokenizer(tiny.save(deep, tmp_path / "target"))
    for settings in ({}, {"text": TEXT}):
        with pytest.raises(CheckpointError, match=r"2 layers and .* 3"):
            recover(source, target, **settings)
