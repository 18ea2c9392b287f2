"""Groups of one space: what is drawn belongs to them, what does not belong is named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signed_align.groups import Group, Within
from signed_align.signed_permutation import SignedPermutation

torch.set_num_threads(1)

SEEDS = st.integers(0, 10**6)
SIZE, BLOCKS = 24, 4
HALF = (0, 1, 2, 0, 1, 2)
INTERLEAVED = (0, 0, 1, 1, 2, 2)
PARTIAL = (0, 1, 0, 1, 2, 3)
SINGLE = [Group(SIZE, within, planes=HALF * 4) for within in Within]
BLOCKED = [
    Group(SIZE, within, blocks=BLOCKS, blocks_move=moving, planes=planes)
    for within in Within
    if within is not Within.PERMUTATION_AND_GLOBAL_SIGN  # of the residual stream, a single block
    for moving in (False, True)
    for planes in ((HALF, INTERLEAVED, PARTIAL) if within is Within.PLANE_SIGNS else ((),))
]
GROUPS = SINGLE + BLOCKED


def name_of(group):
    moving = " moving" if group.blocks_move else ""
    return f"{group.within.value} in {group.blocks}{moving} {group.planes[:6]}"


def drawn(group, seed, **options):
    return group.random(torch.Generator().manual_seed(seed), **options)


def element(perm=None, sign=None, size=SIZE):
    """An element that is the identity but for what is given."""
    identity = SignedPermutation.identity(size)
    perm = identity.perm if perm is None else torch.as_tensor(perm)
    return SignedPermutation(perm, identity.sign if sign is None else torch.as_tensor(sign))


def flipped(*coordinates):
    sign = torch.ones(SIZE, dtype=torch.int8)
    sign[list(coordinates)] = -1
    return element(sign=sign)


def exchanged(a, b, length=1):
    """The element that exchanges two runs of coordinates."""
    perm = torch.arange(SIZE)
    perm[a : a + length], perm[b : b + length] = (
        torch.arange(b, b + length), torch.arange(a, a + length)
    )  # fmt: skip
    return element(perm)


# ---- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS, ids=name_of)
@given(seed=SEEDS, signed=st.booleans())
@settings(max_examples=10, deadline=None)
def test_what_is_drawn_belongs_to_the_group(group, seed, signed):
    one = drawn(group, seed, signed=signed)
    assert group.violation(one) is None
    assert signed or bool((one.sign == 1).all())


@pytest.mark.parametrize("group", GROUPS, ids=name_of)
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_products_inverses_and_the_identity_belong_to_the_group(group, seed):
    one, other = drawn(group, seed), drawn(group, seed + 1)
    assert group.violation(one.then(other)) is None
    assert group.violation(one.inverse()) is None
    assert group.violation(SignedPermutation.identity(SIZE)) is None


@pytest.mark.parametrize("group", BLOCKED, ids=name_of)
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_blocks_compose_as_the_elements_do(group, seed):
    one, other = drawn(group, seed), drawn(group, seed + 1)
    first, second = group.block_perm(one), group.block_perm(other)
    assert torch.equal(group.block_perm(one.then(other)), first[second])
    assert group.blocks_move or torch.equal(first, torch.arange(BLOCKS))


@pytest.mark.parametrize("group", BLOCKED, ids=name_of)
def test_blocks_move_as_asked(group):
    wanted = torch.tensor([2, 0, 3, 1])
    assert torch.equal(group.block_perm(drawn(group, 1, block_perm=wanted)), wanted)


@pytest.mark.parametrize("group", GROUPS, ids=name_of)
def test_every_freedom_is_used(group):
    """Over many draws each coordinate moves and changes sign if the group lets it."""
    draws = [drawn(group, seed) for seed in range(60)]
    moved = torch.stack([one.perm != torch.arange(SIZE) for one in draws]).any(0)
    flips = torch.stack([one.sign < 0 for one in draws]).any(0)
    signs = group.within not in (Within.PERMUTATION, Within.NOTHING)
    assert bool((moved == (group.within.permutes or group.blocks_move)).all())
    assert bool((flips == signs).all())


def test_the_seed_decides_the_element():
    group = Group(SIZE, Within.SIGNED_PERMUTATION)
    assert drawn(group, 1) == drawn(group, 1)
    assert drawn(group, 1) != drawn(group, 2)


def test_a_scrambled_layer_norm_model_always_changes_its_global_sign():
    group = Group(SIZE, Within.PERMUTATION_AND_GLOBAL_SIGN)
    assert bool((drawn(group, 1).sign == -1).all())


@pytest.mark.parametrize(("planes", "pairs"), [
    (HALF, [(0, 3), (1, 4), (2, 5)]),
    (INTERLEAVED, [(0, 1), (2, 3), (4, 5)]),
    (PARTIAL, [(0, 2), (1, 3)]),
])  # fmt: skip
def test_a_plane_changes_the_sign_of_both_its_coordinates(planes, pairs):
    group = Group(SIZE, Within.PLANE_SIGNS, blocks=BLOCKS, planes=planes)
    for seed in range(10):
        sign = drawn(group, seed).sign.reshape(BLOCKS, -1)
        for a, b in pairs:
            assert torch.equal(sign[:, a], sign[:, b])
    for a, b in pairs:
        assert group.violation(flipped(a, b)) is None
        assert "signs that may not" in group.violation(flipped(a))


# ---- violations ------------------------------------------------------------------------------

BY_BLOCK = {"blocks": BLOCKS}
MOVING = {"blocks": BLOCKS, "blocks_move": True}
BETWEEN = "moves coordinates between heads or experts"
WHOLE = "moves whole heads or experts, which are not interchangeable here"
ROTATED = "permutes coordinates that the rotary embedding or the norm tells apart"
SIGNS = "flips signs that may not be flipped"


@pytest.mark.parametrize(
    ("group", "wrong", "reason"),
    [
        (Group(SIZE, Within.SIGNED_PERMUTATION), element(size=20), "has 20 coordinates, the model"),
        (Group(SIZE, Within.PERMUTATION), flipped(3), SIGNS),
        (
            Group(SIZE, Within.PERMUTATION_AND_GLOBAL_SIGN),
            flipped(3),
            "flips the signs of single coordinates",
        ),
        (Group(SIZE, Within.NOTHING), exchanged(0, 1), ROTATED),
        (Group(SIZE, Within.NOTHING), flipped(*range(SIZE)), SIGNS),
        (Group(SIZE, Within.SIGNED_PERMUTATION, **BY_BLOCK), exchanged(5, 6), BETWEEN),
        (Group(SIZE, Within.SIGNED_PERMUTATION, **MOVING), exchanged(5, 6), BETWEEN),
        (Group(SIZE, Within.SIGNED_PERMUTATION, **BY_BLOCK), exchanged(0, 6, 6), WHOLE),
        (Group(SIZE, Within.BLOCK_SIGN, **MOVING), exchanged(0, 1), ROTATED),
        (Group(SIZE, Within.BLOCK_SIGN, **MOVING), flipped(0), SIGNS),
        (Group(SIZE, Within.PLANE_SIGNS, **MOVING, planes=HALF), exchanged(0, 3), ROTATED),
        (Group(SIZE, Within.PLANE_SIGNS, **MOVING, planes=HALF), flipped(0, 1), SIGNS),
        (Group(SIZE, Within.PLANE_SIGNS, **MOVING, planes=INTERLEAVED), flipped(0, 3), SIGNS),
    ],
)  # fmt: skip
def test_what_does_not_belong_is_named(group, wrong, reason):
    assert reason in group.violation(wrong)


@pytest.mark.parametrize(
    ("group", "right"),
    [
        (Group(SIZE, Within.SIGNED_PERMUTATION), flipped(3)),
        (Group(SIZE, Within.PERMUTATION_AND_GLOBAL_SIGN), flipped(*range(SIZE))),
        (Group(SIZE, Within.SIGNED_PERMUTATION, **MOVING), exchanged(0, 6, 6)),
        (Group(SIZE, Within.SIGNED_PERMUTATION, **BY_BLOCK), exchanged(0, 1)),
        (Group(SIZE, Within.BLOCK_SIGN, **MOVING), flipped(*range(6))),
        (Group(SIZE, Within.NOTHING, **MOVING), exchanged(0, 18, 6)),
    ],
)
def test_what_belongs_is_accepted(group, right):
    assert group.violation(right) is None
