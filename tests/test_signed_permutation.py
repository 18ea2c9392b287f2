"""Laws of the group and of its action, exact in every dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signed_align import Axis, Gauge, SignedPermutation, transport
from signed_align.errors import GaugeError

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)


def element(size, seed):
    return SignedPermutation.random(size, seed=seed)


def random_bits(shape, dtype, seed):
    """Every bit pattern, NaN payloads and signed zeros included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), generator=generator).byte().view(dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@given(sizes, seeds, seeds, seeds)
def test_composition_is_associative_and_acts_in_path_order(size, s1, s2, s3):
    g1, g2, g3 = element(size, s1), element(size, s2), element(size, s3)
    assert g1.then(g2).then(g3) == g1.then(g2.then(g3))
    x = torch.randn(size, generator=torch.Generator().manual_seed(s1))
    assert same_bits(g1.then(g2).apply(x, 0), g2.apply(g1.apply(x, 0), 0))


@given(sizes, seeds)
def test_inverse_and_identity(size, seed):
    g, one = element(size, seed), SignedPermutation.identity(size)
    assert g.then(g.inverse()) == one
    assert g.inverse().then(g) == one
    assert g.then(one) == g == one.then(g)
    assert one.is_identity


@given(sizes, seeds)
def test_the_action_is_multiplication_by_the_matrix(size, seed):
    g = element(size, seed)
    x = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    matrix = g.as_matrix(torch.float64)
    assert torch.equal(g.apply(x, 1), x @ matrix)
    assert torch.equal(g.apply(x.T, 0), matrix.T @ x.T)
    assert torch.equal(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("signed", [True, False])
@settings(max_examples=30)
@given(st.data())
def test_a_round_trip_is_bit_identical_in_every_dtype(dtype, signed, data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    seed = data.draw(seeds)
    g = element(shape[axis], seed)
    tensor = random_bits(shape, dtype, seed)
    there = g.apply(tensor, axis, signed=signed)
    assert same_bits(g.inverse().apply(there, axis, signed=signed), tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signs_are_flipped_as_arithmetic_would(dtype):
    values = torch.tensor([0.0, 1.0, -2.0, 0.5]).to(dtype)
    g = SignedPermutation(torch.tensor([3, 1, 0, 2]), torch.tensor([-1, -1, -1, 1]))
    moved = g.apply(values, 0)
    assert moved.float().tolist() == [-0.5, -1.0, 0.0, -2.0]
    assert g.apply(values, 0, signed=False).float().tolist() == [0.5, 1.0, 0.0, -2.0]


def test_a_pinned_case():
    g = SignedPermutation(torch.tensor([2, 0, 1]), torch.tensor([1, -1, 1]))
    assert g.apply(torch.tensor([10.0, 20.0, 30.0]), 0).tolist() == [30.0, -10.0, 20.0]
    h = SignedPermutation(torch.tensor([1, 0, 2]), torch.tensor([-1, 1, 1]))
    assert g.then(h).perm.tolist() == [0, 2, 1]
    assert g.then(h).sign.tolist() == [1, 1, 1]


def test_strided_input_and_both_axes():
    g = element(6, 1)
    x = torch.randn(6, 6)
    axes = (Axis("residual"), Axis("residual"))
    matrix = g.as_matrix()
    assert torch.equal(transport(x.T, axes, Gauge({"residual": g})), matrix.T @ x.T @ matrix)


@pytest.mark.parametrize(
    ("perm", "sign", "message"),
    [
        ([0, 0], [1, 1], "not a permutation"),
        ([0, 2], [1, 1], "not a permutation"),
        ([-1, 0], [1, 1], "not a permutation"),
        ([1, 0], [1, 0], r"\+1 and -1"),
        ([1, 0], [1, 2], r"\+1 and -1"),
        ([1, 0], [1], "one length"),
        ([0.0, 1.0], [1, 1], "integers"),
    ],
)
def test_what_is_not_a_signed_permutation_is_refused(perm, sign, message):
    with pytest.raises(GaugeError, match=message):
        SignedPermutation(torch.tensor(perm), torch.tensor(sign))


def test_wrong_sizes_and_dtypes_are_refused():
    g = element(4, 1)
    with pytest.raises(GaugeError, match="5 coordinates; the gauge has 4"):
        g.apply(torch.zeros(5), 0)
    with pytest.raises(GaugeError, match="int8"):
        g.apply(torch.zeros(4, dtype=torch.int8), 0)
    with pytest.raises(GaugeError, match="compose"):
        g.then(element(5, 1))
    unsigned = g.apply(torch.arange(4, dtype=torch.int8), 0, signed=False)
    assert sorted(unsigned.tolist()) == [0, 1, 2, 3]
