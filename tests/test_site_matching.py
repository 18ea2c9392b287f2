"""Matching inside a site: constructed twins of every layout are recovered exactly."""

from dataclasses import dataclass
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signed_align.errors import GaugeError
from signed_align.groups import Group, Within
from signed_align.labels import Axis, Fused, Section
from signed_align.matching import Objective
from signed_align.signed_permutation import SignedPermutation
from signed_align.site_matching import match_site

SEEDS = st.integers(0, 10**6)
SAMPLES = 200

HEADS = Axis("heads:a", signed=False)
KEYS = Axis("keys:a")
VALUES = Axis("values:a")
UNITS = Axis("mlp:a")
EXPERTS = Axis("experts:a", signed=False)
HALF = (0, 1, 2, 3, 0, 1, 2, 3)
INTERLEAVED = (0, 0, 1, 1, 2, 2, 3, 3)


@dataclass
class Twins:
    """A site of two models that differ by ``truth`` and a little noise."""

    groups: dict
    truth: dict
    evidence: list

    @classmethod
    def draw(cls, groups, labels, seed, *, signed=True, noise=0.2):
        generator = torch.Generator().manual_seed(seed)
        truth = random_elements(groups, generator, signed)
        evidence = []
        for label in labels:
            moved = truth[label.space] if isinstance(label, Axis) else label.element(truth)
            size = moved.size
            source = torch.randn(size, SAMPLES, generator=generator)
            even = isinstance(label, Axis) and not label.signed
            target = moved.apply(source, 0, signed=not even)
            target = target + noise * torch.randn(size, SAMPLES, generator=generator)
            evidence.append((label, torch.corrcoef(torch.cat([source, target]))[:size, size:]))
        return cls(groups, truth, evidence)

    def match(self, objective=Objective.SIGN_MARGINALIZED):
        found = match_site(self.groups, self.evidence, objective)
        assert list(found) == list(self.groups)
        require_native(self.groups, found, [label for label, _ in self.evidence])
        return found


def random_elements(groups, generator, signed=True):
    """A random native element in every space, experts and key-value heads shared."""
    truth, shared = {}, {}
    for space in sorted(groups, key=lambda space: not space.startswith("experts")):
        group = groups[space]
        experts = space.startswith("experts")
        count = group.size if experts else group.blocks
        own = None if experts else shared.get(count)
        truth[space] = group.random(generator, signed=signed, block_perm=own)
        shared[count] = truth[space].perm if experts else group.block_perm(truth[space])
    return truth


def require_native(groups, found, labels):
    for space, group in groups.items():
        assert group.violation(found[space].element) is None
        margin = found[space].margin
        assert margin.shape == (group.size,)
        assert margin.dtype == torch.float32
        assert bool(torch.isfinite(margin).all())
    elements = {space: match.element for space, match in found.items()}
    for label in labels:
        if isinstance(label, Fused):
            label.element(elements)  # raises if the blocks do not agree


def assert_exact(twins):
    found = twins.match()
    for space, element in twins.truth.items():
        assert found[space].element == element, space
        assert float(found[space].margin.min()) > 0.1, space
        assert float(found[space].margin.max()) <= 1.0001, space


def attention(groups, queries, size=8, values=6, keys=Within.PLANE_SIGNS, planes=(), **options):
    """The native groups of an attention module with ``groups`` key-value heads."""
    move = {"blocks": groups, "blocks_move": options.get("blocks_move", True)}
    within = options.get("values_within", Within.SIGNED_PERMUTATION)
    return {
        "heads:a": Group(groups * queries, Within.PERMUTATION, **move),
        "values:a": Group(groups * values, within, **move),
        "keys:a": Group(groups * size, keys, planes=planes, **move),
    }


def projections(groups, queries, size=8, values=6):
    """The row labels of q, k and v, and the column label of o."""
    q = Section((groups, queries, size), ((HEADS, (0, 1)), (KEYS, (0, 2))))
    k = Section((groups, size), ((KEYS, (0, 1)),))
    v = Section((groups, values), ((VALUES, (0, 1)),))
    o = Section((groups, queries, values), ((HEADS, (0, 1)), (VALUES, (0, 2))))
    return q, k, v, o


def separate(groups, queries, size=8, values=6):
    q, k, v, o = projections(groups, queries, size, values)
    return [Fused((), (section,)) for section in (q, k, v, o)]


def concatenated(groups, queries, size=8, values=6):
    q, k, v, o = projections(groups, queries, size, values)
    return [Fused((), (q, k, v)), Fused((), (o,))]


def by_group(groups, queries, size=8, values=6):
    fused = Fused(
        (groups,),
        (
            Section((queries, size), ((HEADS, (0, 1)), (KEYS, (0, 2)))),
            Section((size,), ((KEYS, (0, 1)),)),
            Section((values,), ((VALUES, (0, 1)),)),
        ),
    )
    return [fused, Fused((), (projections(groups, queries, size, values)[3],))]


# ---- MLPs ------------------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_units_of_a_gated_mlp(seed):
    groups = {"mlp:a": Group(40, Within.SIGNED_PERMUTATION)}
    assert_exact(Twins.draw(groups, [UNITS.unsigned, UNITS, UNITS], seed))


@pytest.mark.parametrize("outer", [(), (20,)], ids=["halves", "interleaved"])
def test_units_whose_gate_is_fused_with_up(outer):
    groups = {"mlp:a": Group(20, Within.SIGNED_PERMUTATION)}
    shape = () if outer else (20,)
    sections = tuple(Section(shape, ((axis, (0,)),)) for axis in (UNITS.unsigned, UNITS))
    assert_exact(Twins.draw(groups, [Fused(outer, sections), UNITS], 1))


def test_the_gate_alone_finds_partners_and_leaves_no_margin_to_signs():
    groups = {"mlp:a": Group(20, Within.SIGNED_PERMUTATION)}
    twins = Twins.draw(groups, [UNITS.unsigned], 1)
    found = twins.match()["mlp:a"]
    assert torch.equal(found.element.perm, twins.truth["mlp:a"].perm)
    assert found.margin.tolist() == [0.0] * 20


def test_even_evidence_decides_where_signed_evidence_ties():
    """Two units whose signed rows are equal, told apart by their gates alone."""
    groups = {"mlp:a": Group(2, Within.SIGNED_PERMUTATION)}
    signed = torch.tensor([[-0.5, -0.5], [-0.5, -0.5]])
    even = torch.tensor([[0.0, 0.9], [0.9, 0.0]])
    found = match_site(groups, [(UNITS.unsigned, even), (UNITS, signed)])["mlp:a"]
    assert found.element.perm.tolist() == [1, 0]
    assert found.element.sign.tolist() == [-1, -1]
    assert found.margin.tolist() == pytest.approx([0.25, 0.25])


# ---- attention -------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [separate, concatenated, by_group])
@pytest.mark.parametrize(("groups", "queries"), [(5, 1), (3, 3), (1, 6), (2, 8)])
@given(seed=SEEDS)
@settings(max_examples=4, deadline=None)
def test_attention_of_every_layout(labels, groups, queries, seed):
    site = attention(groups, queries, planes=HALF)
    assert_exact(Twins.draw(site, labels(groups, queries), seed))


@pytest.mark.parametrize(
    ("within", "planes"),
    [
        (Within.PLANE_SIGNS, HALF),
        (Within.PLANE_SIGNS, INTERLEAVED),
        (Within.SIGNED_PERMUTATION, ()),
        (Within.BLOCK_SIGN, ()),
        (Within.NOTHING, ()),
    ],
)
@given(seed=SEEDS)
@settings(max_examples=4, deadline=None)
def test_keys_move_as_their_position_encoding_allows(within, planes, seed):
    keys = KEYS if within is not Within.NOTHING else KEYS.unsigned
    site = attention(3, 2, keys=within, planes=planes)
    labels = [
        Fused((), (Section((3, 2, 8), ((HEADS, (0, 1)), (keys, (0, 2)))),)),
        Fused((), (Section((3, 8), ((keys, (0, 1)),)),)),
        *separate(3, 2)[2:],
    ]
    assert_exact(Twins.draw(site, labels, seed))


@pytest.mark.parametrize("within", [Within.PERMUTATION, Within.NOTHING])
def test_values_without_signs(within):
    site = attention(3, 2, planes=HALF, values_within=within)
    assert_exact(Twins.draw(site, separate(3, 2), 1))


def test_heads_that_do_not_move_keep_their_place_and_their_coordinates_move():
    site = attention(3, 2, planes=HALF, blocks_move=False)
    assert_exact(Twins.draw(site, separate(3, 2), 1))
    del site["heads:a"]
    assert_exact(Twins.draw(site, separate(3, 2), 2))


def test_evidence_on_query_heads_alone_pairs_them_too():
    """Latent attention: rotary rows of the queries index heads, and no space of coordinates."""
    site = attention(3, 4, keys=Within.NOTHING)
    nopes = Axis("nopes:a")
    site["nopes:a"] = Group(3 * 5, Within.SIGNED_PERMUTATION, blocks=3, blocks_move=True)
    del site["keys:a"]
    queries = Fused(
        (3, 4),
        (Section((5,), ((HEADS, (0, 1)), (nopes, (0, 2)))), Section((7,), ((HEADS, (0, 1)),))),
    )
    latent = Fused((3,), (Section((5,), ((nopes, (0, 1)),)), Section((6,), ((VALUES, (0, 1)),))))
    assert_exact(Twins.draw(site, [queries, latent, separate(3, 4)[3]], 1))


def test_coordinates_may_lie_apart_on_an_axis():
    site = attention(2, 3, planes=HALF)
    q, k, v, _ = separate(2, 3)
    apart = Fused((), (Section((2, 2, 3, 3), ((HEADS, (0, 2)), (VALUES, (0, 1, 3)))),))
    assert_exact(Twins.draw(site, [q, k, v, apart], 1))


def test_values_are_found_from_output_columns_alone():
    """Without a row of V or Q that could pair the query heads first."""
    site = attention(4, 4, values=24, planes=HALF)
    _, k, _, o = separate(4, 4, values=24)
    assert_exact(Twins.draw(site, [k, o], 1))


# ---- experts ---------------------------------------------------------------------------------


def mixture(experts, units, *, groups=1, move=True):
    return {
        "experts:a": Group(experts, Within.PERMUTATION, blocks=groups, blocks_move=groups > 1),
        "mlp:a": Group(
            experts * units, Within.SIGNED_PERMUTATION, blocks=experts, blocks_move=move
        ),
    }


def expert_labels(experts, units):
    inside = (EXPERTS, (0,)), (UNITS, (0, 1))
    even = (EXPERTS, (0,)), (UNITS.unsigned, (0, 1))
    return [
        Fused((experts,), (Section((units,), even), Section((units,), inside)), span=2),
        Fused((experts,), (Section((units,), inside),), span=2),
        EXPERTS,
    ]


@pytest.mark.parametrize("groups", [1, 3])
@given(seed=SEEDS)
@settings(max_examples=8, deadline=None)
def test_experts_and_their_units(groups, seed):
    assert_exact(Twins.draw(mixture(6, 5, groups=groups), expert_labels(6, 5), seed))


def test_experts_stay_in_groups_that_do_not_move():
    site = mixture(6, 5)
    site["experts:a"] = Group(6, Within.PERMUTATION, blocks=2)
    assert_exact(Twins.draw(site, expert_labels(6, 5), 4))


def test_units_of_experts_that_stay_are_found_from_each_expert_alone():
    site = {"mlp:a": Group(15, Within.SIGNED_PERMUTATION, blocks=3)}
    labels = [Fused((3,), (Section((5,), ((UNITS, (0, 1)),)),), only=k) for k in range(3)]
    twins = Twins.draw(site, labels, 1)
    assert_exact(twins)
    moving = {"mlp:a": Group(15, Within.SIGNED_PERMUTATION, blocks=3, blocks_move=True)}
    with pytest.raises(GaugeError, match="stack it"):
        match_site(moving, twins.evidence)


def test_many_large_experts_are_paired_by_a_bound(monkeypatch):
    monkeypatch.setattr("signed_align.site_matching.EXHAUSTIVE_ENTRIES", 0)
    assert_exact(Twins.draw(mixture(6, 5), expert_labels(6, 5), 1))
    assert_exact(Twins.draw(attention(3, 3, planes=HALF), separate(3, 3), 1))


# ---- objectives ------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", list(Objective))
def test_every_objective_finds_a_truth_without_signs(objective):
    twins = Twins.draw(attention(3, 3, planes=HALF), separate(3, 3), 1, signed=False)
    found = twins.match(objective)
    for space, element in twins.truth.items():
        assert found[space].element == element


def test_permutation_only_matching_is_right_but_for_the_signs():
    twins = Twins.draw(attention(3, 3, planes=HALF), separate(3, 3), 1)
    found = twins.match(Objective.PERMUTATION)
    for space, element in twins.truth.items():
        assert torch.equal(found[space].element.perm, element.perm)
        assert set(found[space].element.sign.tolist()) == {1}


def test_raw_signed_matching_maximises_the_raw_sum():
    groups = {"mlp:a": Group(2, Within.SIGNED_PERMUTATION)}
    gram = torch.tensor([[-0.9, 0.1], [0.1, -0.9]])
    assert match_site(groups, [(UNITS, gram)], Objective.SIGNED)["mlp:a"].element.perm.tolist() == [
        1, 0
    ]  # fmt: skip
    assert match_site(groups, [(UNITS, gram)])["mlp:a"].element.perm.tolist() == [0, 1]


# ---- any evidence ----------------------------------------------------------------------------


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(
    ("groups", "labels"),
    [
        (attention(3, 3, planes=HALF), separate(3, 3)),
        (attention(1, 4, keys=Within.NOTHING), concatenated(1, 4)),
        (attention(4, 1, keys=Within.BLOCK_SIGN), by_group(4, 1)),
        (mixture(6, 5, groups=3), expert_labels(6, 5)),
        (mixture(4, 5), []),
    ],
)
def test_noise_gives_a_native_element_and_the_same_one_twice(groups, labels, objective):
    generator = torch.Generator().manual_seed(1)
    sizes = [groups[a.space].size if isinstance(a, Axis) else a.size for a in labels]
    evidence = [
        (label, 2 * torch.rand(size, size, generator=generator) - 1)
        for label, size in zip(labels, sizes, strict=True)
    ]
    found = match_site(groups, evidence, objective)
    require_native(groups, found, labels)
    again = match_site(groups, evidence, objective)
    for space in groups:
        assert found[space].element == again[space].element
        assert torch.equal(found[space].margin, again[space].margin)


def every_element(group, blocks):
    """All elements of a group that move its blocks in one way."""
    size = group.block_size
    perms = list(permutations(range(size))) if group.within.permutes else [tuple(range(size))]
    signs = [
        sign
        for sign in product([1, -1], repeat=size)
        if Group(size, group.within, planes=group.planes).violation(
            SignedPermutation(torch.arange(size), torch.tensor(sign))
        )
        is None
    ]
    for inside in product(product(perms, signs), repeat=group.blocks):
        perm = torch.tensor([perm for perm, _ in inside]) + blocks[:, None] * size
        sign = torch.tensor([sign for _, sign in inside])
        yield SignedPermutation(perm.reshape(-1), sign.reshape(-1))


def whole_group(groups):
    """All elements of the native group of a site with two blocks."""
    return [
        dict(zip(groups, elements, strict=True))
        for blocks in (torch.tensor([0, 1]), torch.tensor([1, 0]))
        for elements in product(*(every_element(group, blocks) for group in groups.values()))
    ]


def totals(labels, grams, elements):
    """What the assignment maximises, as the documentation states it, for each of many elements."""
    score = torch.zeros(len(elements))
    for label, gram in zip(labels, grams, strict=True):
        moved = [label.element(element) for element in elements]
        perm = torch.stack([element.perm for element in moved])
        sign = torch.stack([element.sign for element in moved])
        # (cases, elements): one gram per case
        score = score + (gram[:, perm, torch.arange(label.size)] * sign).sum(-1)
    return score


def noise(labels, cases, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(cases, a.size, a.size, generator=generator) for a in labels]


@pytest.mark.parametrize("objective", [Objective.SIGN_MARGINALIZED, Objective.SIGNED])
def test_the_best_of_all_elements_is_found(objective):
    """With one query head per block nothing is approximate: compared with every element."""
    groups, labels = attention(2, 1, 2, 2, planes=(0, 0)), separate(2, 1, 2, 2)
    every = whole_group(groups)
    assert len(every) == 2 * 8**2 * 2**2
    if objective is Objective.SIGNED:
        every = [e for e in every if all(bool((g.sign == 1).all()) for g in e.values())]
    grams = noise(labels, cases=30)
    scores = totals(labels, grams, every)
    for case, best in enumerate(scores.argmax(dim=1).tolist()):
        evidence = [(label, gram[case]) for label, gram in zip(labels, grams, strict=True)]
        found = match_site(groups, evidence, objective)
        assert {space: match.element for space, match in found.items()} == every[best]


def test_no_change_of_a_single_space_betters_an_alternation():
    groups = attention(2, 2, 2, 2, planes=(0, 0))
    rotary = Fused((2, 2), (Section((3,), ((HEADS, (0, 1)),)),))
    labels = [*separate(2, 2, 2, 2), rotary]
    every = whole_group(groups)
    grams = noise(labels, cases=6)
    scores = totals(labels, grams, every)
    for case, score in enumerate(scores):
        evidence = [(label, gram[case]) for label, gram in zip(labels, grams, strict=True)]
        found = {space: match.element for space, match in match_site(groups, evidence).items()}
        reached = score[every.index(found)]
        for element, other in zip(every, score, strict=True):
            if sum(element[space] != found[space] for space in groups) == 1:
                assert other <= reached + 1e-5


def test_the_inverse_is_found_from_target_to_source():
    twins = Twins.draw(attention(3, 2, planes=HALF), separate(3, 2), 3)
    back = match_site(twins.groups, [(label, gram.T) for label, gram in twins.evidence])
    for space, element in twins.truth.items():
        assert back[space].element == element.inverse()


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "label", "gram", "message"),
    [
        (Group(4, Within.PERMUTATION), UNITS, torch.full((4, 4), torch.nan), "NaN"),
        (Group(4, Within.PERMUTATION), UNITS, torch.zeros(4, 5), "does not fit"),
        (Group(4, Within.PERMUTATION), UNITS, torch.zeros(5, 5), "5 coordinates"),
        (
            Group(4, Within.PERMUTATION_AND_GLOBAL_SIGN), UNITS, torch.zeros(4, 4), "of a site",
        ),
    ],
)  # fmt: skip
def test_evidence_that_does_not_fit_is_refused(group, label, gram, message):
    with pytest.raises(GaugeError, match=message):
        match_site({"mlp:a": group}, [(label, gram)])


def test_a_space_without_evidence_stays_where_it_is():
    found = match_site({"mlp:a": Group(4, Within.SIGNED_PERMUTATION)}, [])["mlp:a"]
    assert found.element == SignedPermutation.identity(4)
    assert found.margin.tolist() == [0.0] * 4
