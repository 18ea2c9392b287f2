"""Barriers: the peak above the chord, which alignment takes away."""

import math

import pytest
import torch

from signed_align import Gauge, SignedAlignError, SignedPermutation, scramble
from signed_align.barrier import LossPath, measure_barrier, plot_paths
from signed_align.errors import CheckpointError, GaugeError
from tests import tiny
from tests.test_recovery import TEXT, add_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model sure enough of its tokens that averaging it with a twin hurts."""
    root = tmp_path_factory.mktemp("pair")
    model = tiny.build("llama", tie_word_embeddings=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    source = add_tokenizer(tiny.save(model, root / "source"))
    return source, root / "twin", scramble(source, root / "twin", seed=1)


def test_a_path_from_a_pinned_case():
    path = LossPath([0.0, 0.5, 1.0], [1.0, 5.0, 3.0])
    assert path.chord == [1.0, 2.0, 3.0]
    assert path.barrier == 3.0
    assert LossPath([0.0, 0.5, 1.0], [1.0, 0.5, 3.0]).barrier == 0.0


def test_alignment_takes_the_barrier_of_a_twin_away(pair):
    source, twin, gauge = pair
    paths = measure_barrier(source, twin, gauge=gauge, text=TEXT, points=5)
    straight, aligned = paths["straight"], paths["aligned"]
    assert aligned.barrier < 1e-5
    assert max(aligned.losses) - min(aligned.losses) < 1e-5
    # the ends compute the same, the middle of the straight path does not
    assert straight.losses[0] == pytest.approx(straight.losses[-1], abs=1e-5)
    assert abs(straight.losses[2] - straight.losses[0]) > 0.1


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


def test_models_without_a_straight_line_are_refused(pair, tmp_path):
    source, _, _ = pair
    other = tiny.save(tiny.build("llama", num_hidden_layers=1), tmp_path / "other")
    with pytest.raises(CheckpointError, match="no straight line"):
        measure_barrier(source, add_tokenizer(other), text=TEXT)
    with pytest.raises(SignedAlignError, match="3 points"):
        measure_barrier(source, source, text=TEXT, points=2)
