"""Moving tensors: labels of one axis, of fused axes, of axes that several spaces index."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signed_align.errors import GaugeError
from signed_align.gauge import Gauge
from signed_align.groups import Group, Within
from signed_align.labels import Axis, Fused, Section, moves, transport, transport_all
from signed_align.signed_permutation import SignedPermutation

torch.set_num_threads(1)

SEEDS = st.integers(0, 10**6)
GROUPS, QUERIES, SIZE, VALUES, EXPERTS, UNITS = 3, 2, 4, 5, 4, 6

RESIDUAL = Axis("residual")
HEADS = Axis("heads", signed=False)
KEYS = Axis("keys")
V = Axis("values")
EXPERT = Axis("experts", signed=False)
UNIT = Axis("mlp")

Q_SECTION = Section((GROUPS, QUERIES, SIZE), ((HEADS, (0, 1)), (KEYS, (0, 2))))
K_SECTION = Section((GROUPS, SIZE), ((KEYS, (0, 1)),))
V_SECTION = Section((GROUPS, VALUES), ((V, (0, 1)),))
O_SECTION = Section((GROUPS, QUERIES, VALUES), ((HEADS, (0, 1)), (V, (0, 2))))
BY_GROUP = (
    Section((QUERIES, SIZE), ((HEADS, (0, 1)), (KEYS, (0, 2)))),
    Section((SIZE,), ((KEYS, (0, 1)),)),
    Section((VALUES,), ((V, (0, 1)),)),
)
UNIT_SECTION = Section((UNITS,), ((EXPERT, (0,)), (UNIT, (0, 1))))
GATE_SECTION = Section((UNITS,), ((EXPERT, (0,)), (UNIT.unsigned, (0, 1))))
ALTERNATING = (
    Section((), ((EXPERT, (0,)), (UNIT.unsigned, (0, 1)))),
    Section((), ((EXPERT, (0,)), (UNIT, (0, 1)))),
)

LABELS = {
    "queries": Fused((), (Q_SECTION,)),
    "queries, keys and values": Fused((), (Q_SECTION, K_SECTION, V_SECTION)),
    "queries, keys and values of each head": Fused((GROUPS,), BY_GROUP),
    "outputs of heads": Fused((), (O_SECTION,)),
    "units of experts": Fused((EXPERTS,), (UNIT_SECTION,)),
    "gate and up of experts": Fused((EXPERTS,), (GATE_SECTION, UNIT_SECTION)),
    "gate and up of experts in turn": Fused((EXPERTS, UNITS), ALTERNATING),
    "copies": Fused((), (Section((7,), ((RESIDUAL, (0,)),)),) * 3),
}


def groups():
    move = {"blocks_move": True}
    return {
        "residual": Group(7, Within.SIGNED_PERMUTATION),
        "heads": Group(GROUPS * QUERIES, Within.PERMUTATION, blocks=GROUPS, **move),
        "keys": Group(
            GROUPS * SIZE, Within.PLANE_SIGNS, blocks=GROUPS, planes=(0, 1, 0, 1), **move
        ),
        "values": Group(GROUPS * VALUES, Within.SIGNED_PERMUTATION, blocks=GROUPS, **move),
        "experts": Group(EXPERTS, Within.PERMUTATION),
        "mlp": Group(EXPERTS * UNITS, Within.SIGNED_PERMUTATION, blocks=EXPERTS, **move),
    }


def random_elements(seed):
    """An element in every space; those of one site move its heads or experts alike."""
    generator = torch.Generator().manual_seed(seed)
    heads, experts = (torch.randperm(count, generator=generator) for count in (GROUPS, EXPERTS))
    blocks = {"heads": heads, "keys": heads, "values": heads, "mlp": experts}
    elements = {
        space: group.random(generator, block_perm=blocks.get(space))
        for space, group in groups().items()
    }
    elements["experts"] = SignedPermutation(experts, torch.ones(EXPERTS, dtype=torch.int8))
    return elements


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def then(first, second):
    return {space: first[space].then(second[space]) for space in first}


# ---- laws of a fused axis --------------------------------------------------------------------


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_elements_of_a_fused_axis_compose(label, seed):
    one, other = random_elements(seed), random_elements(seed + 1)
    together = label.element(then(one, other))
    assert together == label.element(one).then(label.element(other))
    back = {space: element.inverse() for space, element in one.items()}
    assert label.element(back) == label.element(one).inverse()
    assert together.size == label.size


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_no_elements_move_nothing(label):
    assert label.element({}).is_identity
    assert not moves(label, Gauge({"other": SignedPermutation.identity(2)}))
    assert moves(label, Gauge(random_elements(0)))


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_an_even_axis_moves_alike_and_keeps_signs(label):
    moved, even = (one.element(random_elements(1)) for one in (label, label.unsigned))
    assert torch.equal(even.perm, moved.perm)
    assert bool((even.sign == 1).all())
    assert label.unsigned.spaces == label.spaces
    assert label.unsigned.unsigned == label.unsigned


@pytest.mark.parametrize(
    "name", ["units of experts", "gate and up of experts", "gate and up of experts in turn"]
)
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_the_axis_of_one_expert_is_a_slice_of_the_whole(name, seed):
    whole, elements = LABELS[name], random_elements(seed)
    tensor = random_tensor(EXPERTS, whole.size // EXPERTS, seed=seed)
    moved = whole.element(elements).apply(tensor.reshape(-1), 0).reshape(tensor.shape)
    for expert in range(EXPERTS):
        one = Fused(whole.outer, whole.sections, only=expert)
        assert one.size == tensor.shape[1]
        origin = tensor[elements["experts"].perm[expert]]
        assert torch.equal(one.element(elements).apply(origin, 0), moved[expert])


# ---- a fused axis against its parts ----------------------------------------------------------


@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_queries_keys_and_values_move_as_if_they_were_apart(seed):
    elements = random_elements(seed)
    q, k, v = (
        random_tensor(math.prod(section.shape), 2, seed=seed + index)
        for index, section in enumerate((Q_SECTION, K_SECTION, V_SECTION))
    )

    def move(tensor, label):
        return transport(tensor, (label, None), Gauge(elements))

    apart = [
        move(tensor, Fused((), (section,)))
        for tensor, section in ((q, Q_SECTION), (k, K_SECTION), (v, V_SECTION))
    ]
    together = move(torch.cat([q, k, v]), LABELS["queries, keys and values"])
    assert torch.equal(together, torch.cat(apart))

    def by_group(q, k, v):
        parts = (part.reshape(GROUPS, -1, 2) for part in (q, k, v))
        return torch.cat(list(parts), 1).reshape(-1, 2)

    together = move(by_group(q, k, v), LABELS["queries, keys and values of each head"])
    assert torch.equal(together, by_group(*apart))


@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_scores_of_queries_and_keys_follow_the_heads(seed):
    elements = random_elements(seed)
    q = random_tensor(GROUPS * QUERIES * SIZE, seed=seed)
    k = random_tensor(GROUPS * SIZE, seed=seed + 1)

    def scores(q, k):
        heads = q.reshape(GROUPS, QUERIES, SIZE) * k.reshape(GROUPS, 1, SIZE)
        return heads.sum(-1).reshape(-1)

    gauge = Gauge(elements)
    moved = scores(
        transport(q, (LABELS["queries"],), gauge),
        transport(k, (Fused((), (K_SECTION,)),), gauge),
    )
    torch.testing.assert_close(moved, elements["heads"].apply(scores(q, k), 0))


def test_a_fused_axis_of_one_space_is_as_the_axis_itself():
    gauge = Gauge(random_elements(2))
    tensor = random_tensor(7, 3)
    fused = Fused((), (Section((7,), ((RESIDUAL, (0,)),)),))
    assert torch.equal(
        transport(tensor, (fused, None), gauge), transport(tensor, (RESIDUAL, None), gauge)
    )


# ---- contradictions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "space"),
    [
        (LABELS["queries"], "heads"),
        (LABELS["queries"], "keys"),
        (LABELS["outputs of heads"], "values"),
        (LABELS["queries, keys and values of each head"], "heads"),
        (LABELS["units of experts"], "mlp"),
    ],
)
def test_spaces_that_move_heads_differently_contradict_each_other(label, space):
    elements = random_elements(1)
    blocks = torch.arange(groups()[space].blocks).roll(1)
    generator = torch.Generator().manual_seed(0)
    moved = groups()[space].block_perm(elements[space])[blocks]
    elements[space] = groups()[space].random(generator, block_perm=moved)
    with pytest.raises(GaugeError, match="do not move the same heads or experts"):
        label.element(elements)


def test_coordinates_that_leave_their_head_contradict_it():
    elements = random_elements(1)
    elements["keys"] = SignedPermutation.random(GROUPS * SIZE, seed=1)
    with pytest.raises(GaugeError, match="contradicts itself"):
        LABELS["queries"].element(elements)


def test_an_element_of_another_size_is_refused():
    elements = {"keys": SignedPermutation.identity(5)}
    with pytest.raises(GaugeError, match="5 coordinates in the space 'keys', the tensor 12"):
        LABELS["queries"].element(elements)


# ---- transport -------------------------------------------------------------------------------


@given(seed=SEEDS, inverse=st.booleans())
@settings(max_examples=10, deadline=None)
def test_two_axes_that_make_up_one_move_as_one(seed, inverse):
    """Experts in one tensor: the first two axes, or the first and the last."""
    elements = random_elements(seed)
    if inverse:
        elements = {space: element.inverse() for space, element in elements.items()}
    gauge = Gauge(elements)
    label = Fused((EXPERTS,), (UNIT_SECTION,), span=2)
    tensor = random_tensor(EXPERTS, UNITS, 7, seed=seed)
    flat = label.element(elements).apply(tensor.reshape(-1, 7), 0).reshape(tensor.shape)
    expected = elements["residual"].apply(flat, 2)
    assert torch.equal(transport(tensor, (label, label, RESIDUAL), gauge), expected)
    turned = transport(tensor.transpose(1, 2), (label, RESIDUAL, label), gauge)
    assert torch.equal(turned, expected.transpose(1, 2))
    last = transport(tensor.permute(2, 0, 1), (RESIDUAL, label, label), gauge)
    assert torch.equal(last, expected.permute(2, 0, 1))


@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_each_expert_moves_to_its_place_with_its_units(seed):
    elements = random_elements(seed)
    label = Fused((EXPERTS,), (UNIT_SECTION,), span=2)
    tensor = random_tensor(EXPERTS, UNITS, 2, seed=seed)
    moved = transport(tensor, (label, label, None), Gauge(elements))
    units = elements["mlp"].perm.reshape(EXPERTS, UNITS) % UNITS
    signs = elements["mlp"].sign.reshape(EXPERTS, UNITS, 1)
    for expert, origin in enumerate(elements["experts"].perm.tolist()):
        assert torch.equal(moved[expert], tensor[origin, units[expert]] * signs[expert])


SPAN = Fused((EXPERTS,), (UNIT_SECTION,), span=2)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((7, 3), (RESIDUAL, None)),
        ((3, 7), (None, RESIDUAL)),
        ((7, 7), (RESIDUAL, RESIDUAL)),
        ((7,), (RESIDUAL.unsigned,)),
        ((24, 7), (LABELS["queries"], RESIDUAL)),
        ((7, 24), (RESIDUAL, LABELS["queries"])),
        ((EXPERTS, UNITS, 7), (SPAN, SPAN, RESIDUAL)),
        ((EXPERTS, 7, UNITS), (SPAN, RESIDUAL, SPAN)),
        ((5, 3), (None, None)),
    ],
)
@pytest.mark.parametrize("rows", [slice(0, 2), slice(1, 3), slice(2, None), slice(0, 0)])
def test_some_rows_are_a_slice_of_the_whole(shape, axes, rows):
    gauge = Gauge(random_elements(3))
    tensor = random_tensor(*shape)
    part = transport(tensor, axes, gauge, rows=rows)
    assert torch.equal(part, transport(tensor, axes, gauge)[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(seed=SEEDS)
@settings(max_examples=5, deadline=None)
def test_the_way_back_gives_the_same_bits(dtype, seed):
    gauge = Gauge(random_elements(seed))
    for label in LABELS.values():
        tensor = random_tensor(label.size, 7, seed=seed).to(dtype)
        moved = transport(tensor, (label, RESIDUAL), gauge)
        assert moved.dtype == dtype
        back = transport(moved, (label, RESIDUAL), gauge.inverse())
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_both_axes_of_a_square_of_copies_move():
    """The same fused label on two axes stands for two axes, not for one of two parts."""
    gauge = Gauge(random_elements(3))
    label = LABELS["copies"]
    tensor = random_tensor(label.size, label.size)
    element = label.element(gauge.elements)
    expected = element.apply(element.apply(tensor, 0), 1)
    assert torch.equal(transport(tensor, (label, label), gauge), expected)


def test_a_space_that_the_gauge_does_not_mention_stays():
    gauge = Gauge({"residual": SignedPermutation.random(7, seed=1)})
    tensor = random_tensor(24, 7)
    moved = transport(tensor, (LABELS["queries"], RESIDUAL), gauge)
    assert torch.equal(moved, transport(tensor, (None, RESIDUAL), gauge))


def test_labels_that_do_not_fit_are_refused():
    gauge = Gauge(random_elements(0))
    with pytest.raises(GaugeError, match="1 axis labels were given for a tensor of shape"):
        transport(random_tensor(7, 3), (RESIDUAL,), gauge)
    with pytest.raises(GaugeError, match="coordinates"):
        transport(random_tensor(6), (RESIDUAL,), gauge)
    with pytest.raises(GaugeError):
        transport(random_tensor(23), (LABELS["queries"],), gauge)


def test_tensors_by_name_are_made_of_their_origin():
    tensors = {"a": random_tensor(7, seed=1), "b": random_tensor(7, seed=2)}
    gauge = Gauge(random_elements(0))
    other = {"a": "b", "b": "a"}
    moved = transport_all(tensors, lambda name, shape: (RESIDUAL,), gauge, other.__getitem__)
    assert torch.equal(moved["a"], transport(tensors["b"], (RESIDUAL,), gauge))
    assert torch.equal(moved["b"], transport(tensors["a"], (RESIDUAL,), gauge))
    alone = transport_all(tensors, lambda name, shape: (None,), gauge)
    assert all(torch.equal(alone[name], tensors[name]) for name in tensors)
