"""Matching: the three objectives on constructed correlations, streamed sums, margins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signed_align import Objective, SignedPermutation
from signed_align.errors import GaugeError
from signed_align.groups import Within
from signed_align.matching import Correlation, match

SIZE = 40


def samples(count=400, seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(size) + 0.1 * torch.randn(size, size, generator=generator)
    return torch.randn(count, size, generator=generator) @ mixing * 3 + 2


def correlate(x, y, batches=1):
    correlation = Correlation(x.shape[1])
    for a, b in zip(x.chunk(batches), y.chunk(batches), strict=True):
        correlation.add(a, b)
    return correlation.matrix()


@given(st.integers(0, 10**6))
@settings(max_examples=15)
def test_the_method_recovers_a_signed_permutation(seed):
    truth = SignedPermutation.random(SIZE, seed=seed)
    x = samples(seed=seed)
    found = match(correlate(x, truth.apply(x, 1)))
    assert found.element == truth
    assert float(found.margin.min()) > 0.2


def test_raw_signed_matching_stops_at_the_fraction_of_positive_signs():
    truth = SignedPermutation.random(200, seed=1)
    x = samples(4000, size=200)
    correlation = correlate(x, truth.apply(x, 1))
    positive = float((truth.sign > 0).float().mean())
    signed = match(correlation, Objective.SIGNED).element.agreement(truth)
    assert signed["permutation_accuracy"] == pytest.approx(positive, abs=0.02)
    assert set(match(correlation, Objective.SIGNED).element.sign.tolist()) == {1}


def test_permutation_only_matching_is_right_but_for_the_signs():
    truth = SignedPermutation.random(SIZE, seed=1)
    x = samples()
    found = match(correlate(x, truth.apply(x, 1)), Objective.PERMUTATION).element
    assert torch.equal(found.perm, truth.perm)
    assert found.sign.tolist() == [1] * SIZE


@pytest.mark.parametrize("sign", [1, -1])
def test_where_only_a_global_sign_is_free_only_that_is_found(sign):
    perm = SignedPermutation.random(SIZE, seed=1).perm
    truth = SignedPermutation(perm, torch.full((SIZE,), sign))
    x = samples()
    group = Within.PERMUTATION_AND_GLOBAL_SIGN
    correlation = correlate(x, truth.apply(x, 1))
    assert match(correlation, group=group).element == truth
    # single flipped signs in the data do not lead out of the group
    correlation[:5] *= -1
    assert match(correlation, group=group).element.has_uniform_sign


@pytest.mark.parametrize("batches", [2, 7])
def test_streamed_correlation_is_the_correlation_of_the_whole(batches):
    x, y = samples(seed=1), samples(seed=2) + 50
    expected = np.corrcoef(x.double().numpy().T, y.double().numpy().T)[:SIZE, SIZE:]
    np.testing.assert_allclose(correlate(x, y, batches).numpy(), expected, atol=1e-6)


def test_no_stream_drowns_another():
    """Two streams of very different scale, the louder one uninformative."""
    truth = SignedPermutation.random(SIZE, seed=3)
    x = samples()
    correlation = Correlation(SIZE)
    correlation.add(x, truth.apply(x, 1), stream="informative")
    correlation.add(1000 * samples(seed=5), 1000 * samples(seed=6), stream="loud")
    assert match(correlation.matrix()).element == truth


def test_margins_are_the_distance_to_the_best_rival():
    correlation = torch.tensor([[0.9, 0.3, 0.0], [0.2, -0.8, 0.5], [0.0, 0.4, 0.7]])
    found = match(correlation)
    assert found.element.perm.tolist() == [0, 1, 2]
    assert found.element.sign.tolist() == [1, -1, 1]
    assert found.margin.tolist() == pytest.approx([0.9 - 0.3, 0.8 - 0.5, 0.7 - 0.5])
    assert match(torch.tensor([[-0.4]])).margin.tolist() == pytest.approx([0.4])


def test_constant_and_duplicate_coordinates_have_no_margin():
    x = samples()
    x[:, 3] = 1.0
    x[:, 7] = x[:, 8]
    found = match(correlate(x, x))
    assert found.margin[[3, 7, 8]].abs().max() < 1e-6
    assert float(found.margin[[0, 1, 2]].min()) > 0.2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_samples_that_are_not_finite_are_refused(value):
    x = samples()
    bad = x.clone()
    bad[5, 5] = value
    with pytest.raises(GaugeError, match="NaN or infinite"):
        correlate(x, bad)
    with pytest.raises(GaugeError, match="NaN or infinite"):
        match(torch.full((3, 3), value))
