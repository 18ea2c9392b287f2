"""Barriers: the peak above the chord, which alignment takes away."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from signed_align import Gauge, SignedAlignError, SignedPermutation, scramble
from signed_align.barrier import LossPath, measure_barrier, plot_paths
from signed_align.errors import CheckpointError, GaugeError, SignedAlignWarning
from tests import tiny
from tests.test_recovery import CHARACTERS, TEXT, add_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model sure enough of its tokens that averaging it with a twin hurts."""
    root = tmp_path_factory.mktemp("pair")
    model = tiny.build("llama", tie_word_embeddings=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    source = add_tokenizer(tiny.save(model, root / "source"))
    return source, root / "twin", scramble(source, root / "twin", seed=1)


def own_text(path):
    """Text the model finds likely, so that a broken model does worse on it."""
    model = tiny.load(path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (40, 1), generator=generator)
    with torch.no_grad():
        for _ in range(20):
            likely = model(ids).logits[:, -1, 3:97].softmax(-1)
            ids = torch.cat([ids, 3 + torch.multinomial(likely, 1, generator=generator)], 1)
    return ["".join(CHARACTERS[i - 3] for i in row) for row in ids.tolist()]


def test_a_path_from_a_pinned_case():
    path = LossPath([0.0, 0.5, 1.0], [1.0, 5.0, 3.0])
    assert path.chord == [1.0, 2.0, 3.0]
    assert path.barrier == 3.0
    assert LossPath([0.0, 0.5, 1.0], [1.0, 0.5, 3.0]).barrier == 0.0


def test_alignment_takes_the_barrier_of_a_twin_away(pair):
    source, twin, gauge = pair
    paths = measure_barrier(source, twin, gauge=gauge, text=own_text(source), points=5)
    straight, aligned = paths["straight"], paths["aligned"]
    assert aligned.barrier < 1e-5
    assert max(aligned.losses) - min(aligned.losses) < 1e-5
    # the ends compute the same, the middle of the straight path does not
    assert straight.losses[0] == pytest.approx(straight.losses[-1], abs=1e-5)
    assert straight.barrier > 0.1


def test_the_loss_is_the_mean_over_real_tokens(pair):
    source, twin, _ = pair
    path = measure_barrier(source, twin, text=["ab", "abcdefgh"], points=3)["straight"]
    model, total, count = tiny.load(source), 0.0, 0
    for text in ("ab", "abcdefgh"):
        ids = torch.tensor([[ord(character) - 33 + 3 for character in text]])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (len(text) - 1)
        count += len(text) - 1
    assert path.losses[0] == pytest.approx(total / count, rel=1e-5)
    assert all(math.isfinite(loss) for loss in path.losses)


def test_a_plot_is_drawn(tmp_path):
    path = LossPath([0.0, 0.5, 1.0], [1.0, 5.0, 3.0])
    plot_paths({"straight": path}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_gauge_that_does_not_lead_from_a_to_b_is_refused(pair):
    source, twin, gauge = pair
    for wrong in (gauge.inverse(), Gauge({"residual": SignedPermutation.random(tiny.WIDTH)})):
        with pytest.raises(GaugeError, match="source"):
            measure_barrier(source, twin, gauge=wrong, text=TEXT)


def test_a_loss_that_says_nothing_is_refused(pair, tmp_path):
    source, twin, _ = pair
    with pytest.raises(SignedAlignError, match="too short"):
        measure_barrier(source, twin, text=["a", "b"])
    model = tiny.load(source)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    broken = add_tokenizer(tiny.save(model, tmp_path / "nan"))
    with pytest.raises(SignedAlignError, match="not finite"):
        measure_barrier(source, broken, text=TEXT)


def test_configs_that_differ_are_said(pair, tmp_path):
    source, twin, _ = pair
    shutil.copytree(twin, tmp_path / "other")
    config = json.loads((twin / "config.json").read_text()) | {"rms_norm_eps": 3.0}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.warns(SignedAlignWarning, match="differ in rms_norm_eps"):
        measure_barrier(source, tmp_path / "other", text=TEXT[:5], points=3)


def test_weights_that_are_missing_are_not_made_up(pair, tmp_path):
    source, twin, _ = pair
    shutil.copytree(twin, tmp_path / "holes")
    file = tmp_path / "holes" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        measure_barrier(source, tmp_path / "holes", text=TEXT)


def test_models_without_a_straight_line_are_refused(pair, tmp_path):
    source, _, _ = pair
    other = tiny.save(tiny.build("llama", num_hidden_layers=1), tmp_path / "other")
    with pytest.raises(CheckpointError, match="no straight line"):
        measure_barrier(source, add_tokenizer(other), text=TEXT)
    with pytest.raises(SignedAlignError, match="3 points"):
        measure_barrier(source, source, text=TEXT, points=2)
