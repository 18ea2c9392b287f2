"""Gauge-sweep audits: chance as stated, exact after transport; and claims that are refused."""

import json
import math
import shutil
import warnings

import pytest
import torch

from signed_align import Checkpoint, Gauge, SignedAlignError, audit_claim, scramble
from signed_align.audit import Comparison
from signed_align.claims import (
    Coordinates,
    TopAttribution,
    TopMeanDifference,
    TopWeights,
    load_claim,
)
from signed_align.labels import Axis, transport
from tests import tiny
from tests.test_cli import fails, run, run_json
from tests.test_recovery import TEXT, add_tokenizer

POSITIVE, NEGATIVE = tuple(TEXT[:6]), tuple(TEXT[6:12])
BLOCK, UNITS = "blocks.0.hook_resid_post", "blocks.1.mlp.hook_post"
K = 10
CLAIMS = {
    "mean difference": TopMeanDifference(BLOCK, K, POSITIVE, NEGATIVE),
    "mean difference of units": TopMeanDifference(UNITS, K, POSITIVE, NEGATIVE),
    "attribution of the loss": TopAttribution(BLOCK, K, POSITIVE),
    "attribution of logits": TopAttribution("model.layers.0", K, POSITIVE, ("a", "b")),
    "attribution of units": TopAttribution(UNITS, K, POSITIVE),
    "ridge": TopWeights(BLOCK, K, POSITIVE, NEGATIVE, "ridge"),
    "logistic": TopWeights(BLOCK, K, POSITIVE, NEGATIVE, "logistic"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_tokenizer(tiny.save(tiny.build("llama"), tmp_path_factory.mktemp("audit") / "model"))


@pytest.fixture(scope="module")
def claim_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claim")
    (folder / "negative.txt").write_text("\n".join(NEGATIVE))
    file = folder / "claim.json"
    file.write_text(json.dumps(written()))
    return file


def written(**changes):
    claim = {
        "claim": "top_mean_difference", "hook": BLOCK, "k": K,
        "positive": list(POSITIVE), "negative": {"file": "negative.txt"},
    }  # fmt: skip
    return {name: value for name, value in {**claim, **changes}.items() if value is not None}


# ---- the laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_survives_transport_and_not_a_change_of_coordinates(model, name):
    result = audit_claim(model, CLAIMS[name], twins=1, seed=1)
    assert result.control.jaccard == result.control.sign_agreement == 1
    for twin in result.twins:
        assert twin.recovery == {"permutation_accuracy": 1, "sign_accuracy": 1}
        for moved in (twin.true_gauge, twin.recovered_gauge):
            assert moved == Comparison(K, K, K, K)
        assert twin.as_stated.jaccard < 0.5
    assert result.coordinates.odd == ("attribution" not in name)
    assert result.size == (80 if "units" in name else tiny.WIDTH)
    assert result.spaces == (("mlp",) if "units" in name else ("residual",))


@pytest.mark.parametrize("name", ["mean difference", "attribution of the loss"])
def test_signs_are_those_of_the_twin(tmp_path, model, name):
    """Even signs stay where odd ones turn over with their coordinates."""
    claim = CLAIMS[name]
    truth = scramble(model, tmp_path / "twin", seed=3)
    stated = claim.coordinates(Checkpoint.open(model))
    found = claim.coordinates(Checkpoint.open(tmp_path / "twin"))
    element = truth.element("residual")
    places, flips = element.relocate(torch.tensor(stated.indices))
    assert found.indices == tuple(places.tolist())  # in the same order, too
    turned = tuple((torch.tensor(stated.signs) * flips).tolist())
    assert turned != stated.signs
    assert found.signs == (turned if stated.odd else stated.signs)


def test_as_stated_is_chance(model):
    """Any claim will do for the rate, so one that costs nothing: over 30 twins."""
    directory = Checkpoint.open(model).path

    def largest(checkpoint):
        row = checkpoint.tensor("model.embed_tokens.weight")[7]
        return Coordinates.top(row, K)

    result = audit_claim(directory, largest, twins=30, hook="hook_embed")
    assert result.claim == {"claim": "largest"}
    mean, chance = result.mean("as_stated"), result.chance
    assert chance["overlap"] == K / tiny.WIDTH
    assert mean["overlap"] == pytest.approx(chance["overlap"], abs=0.05)
    assert mean["jaccard"] == pytest.approx(chance["jaccard"], abs=0.04)
    assert mean["sign_agreement"] == pytest.approx(0.5, abs=0.15)
    assert result.mean("true_gauge")["exact"] == result.mean("recovered_gauge")["exact"] == 1
    assert mean["exact"] == 0


def test_expected_jaccard_by_sampling(model):
    chance = audit_claim(model, CLAIMS["mean difference"], twins=1).chance
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(4000):
        shared = int((torch.randperm(tiny.WIDTH, generator=generator)[:K] < K).sum())
        seen.append(shared / (2 * K - shared))
    assert chance["jaccard"] == pytest.approx(sum(seen) / len(seen), abs=0.005)


def test_a_twin_that_is_the_model_keeps_the_claim_as_stated(model, monkeypatch):
    def copy(source, out, *, seed, spaces):
        truth = scramble(source, out, seed=seed, spaces=spaces)
        shutil.rmtree(out)
        shutil.copytree(source, out)
        identity = truth.element("residual").then(truth.element("residual").inverse())
        return type(truth)({"residual": identity})

    monkeypatch.setattr("signed_align.audit.scramble", copy)
    result = audit_claim(model, CLAIMS["mean difference"], twins=1)
    (twin,) = result.twins
    assert twin.as_stated == twin.true_gauge == twin.recovered_gauge == Comparison(K, K, K, K)


def test_gauges_recovered_from_activations(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = audit_claim(
            model, CLAIMS["mean difference"], twins=1, recovered_from="activations", text=TEXT
        )
    assert result.mean("recovered_gauge")["exact"] == 1
    with pytest.raises(SignedAlignError, match="text has no part"):
        audit_claim(model, CLAIMS["mean difference"], text=TEXT)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt2"])
def test_other_architectures(tmp_path, model_type):
    model = add_tokenizer(tiny.save(tiny.build(model_type), tmp_path / "model"))
    result = audit_claim(model, TopMeanDifference(BLOCK, K, POSITIVE, NEGATIVE), twins=2)
    assert result.mean("true_gauge")["exact"] == result.mean("recovered_gauge")["exact"] == 1
    if model_type == "gpt2":  # its only sign is one for all coordinates
        assert result.mean("as_stated")["sign_agreement"] in (0.0, None)


def test_twins_are_removed(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    audit_claim(model, CLAIMS["mean difference"], twins=1)
    assert list(tmp_path.iterdir()) == []


def test_a_published_direction_is_compared_with_probes_fitted_anew(model):
    """One that the probe finds survives transport; another one does not, not even at home."""
    fitted = TopWeights(BLOCK, K, POSITIVE, NEGATIVE)
    checkpoint = Checkpoint.open(model)
    known = fitted.coordinates(checkpoint)
    weights = torch.zeros(tiny.WIDTH)
    weights[list(known.indices)] = torch.tensor(known.signs) * torch.arange(K, 0.0, -1)
    result = audit_claim(
        model, TopWeights(**fields(fitted), direction=tuple(weights.tolist())), twins=1
    )
    assert result.coordinates == known
    assert result.control.jaccard == result.mean("true_gauge")["jaccard"] == 1
    other = transport(weights, [Axis("residual")], scrambled(checkpoint))
    result = audit_claim(
        model, TopWeights(**fields(fitted), direction=tuple(other.tolist())), twins=1
    )
    assert result.control.jaccard == result.mean("true_gauge")["jaccard"] < 0.5
    with pytest.raises(SignedAlignError, match="3 weights, and there are 48"):
        audit_claim(model, TopWeights(**fields(fitted), direction=(1.0, 2.0, 3.0)))


def fields(claim):
    return {name: getattr(claim, name) for name in ("hook", "k", "positive", "negative")}


def scrambled(checkpoint):
    return Gauge(checkpoint.chart.random_gauge(checkpoint.spaces, seed=9))


def test_attribution_is_activation_times_gradient(model):
    """Against the derivative of the loss along each coordinate's scale, by finite differences."""
    from signed_align.activations import load_model, load_tokenizer, padded
    from signed_align.hooks import changing, find_hook

    checkpoint = Checkpoint.open(model)
    tokenizer = load_tokenizer(checkpoint)
    network = load_model(checkpoint, head=True, dtype=torch.float64, device="cpu")
    (ids,) = padded([tokenizer(POSITIVE[0])["input_ids"]]).input_ids
    step = 1e-2 * torch.eye(tiny.WIDTH, dtype=torch.float64)

    @torch.no_grad()
    def losses(scales):
        def scaled(rows):
            return rows * scales[:, None]

        with changing(network, checkpoint.chart, find_hook(checkpoint.chart, BLOCK), scaled):
            logits = network(input_ids=ids.repeat(len(scales), 1)).logits
        return (
            -logits.log_softmax(-1)[:, :-1]
            .gather(-1, ids[None, 1:, None].expand(len(scales), -1, -1))
            .sum((1, 2))
        )

    slopes = losses(1 + step) - losses(1 - step)
    expected = Coordinates.top(slopes, K, odd=False)
    found = TopAttribution(BLOCK, K, POSITIVE[:1]).coordinates(checkpoint)
    assert Comparison.of(found, expected) == Comparison(K, K, K, K)


# ---- the file, the command, and what is refused --------------------------------------------------


def test_a_claim_file_is_the_claim(claim_file):
    assert load_claim(claim_file) == CLAIMS["mean difference"]
    weights = {"claim": "top_weights", "direction": [1, 2.5], "probe": "ridge"}
    claim = load_claim(written(**weights, negative=list(NEGATIVE)))
    assert (claim.probe, claim.direction) == ("ridge", (1.0, 2.5))


def test_the_command(model, claim_file, tmp_path):
    plot = tmp_path / "audit.png"
    data = run_json("audit", model, "--claim", claim_file, "--twins", 2, "--plot", plot)
    assert data["claim"] == {
        "claim": "top_mean_difference", "hook": BLOCK, "k": K, "positive": 6, "negative": 6,
    }  # fmt: skip
    assert data["mean"]["true_gauge"]["jaccard"] == 1
    assert data["mean"]["recovered_gauge"]["sign_agreement"] == 1
    assert data["mean"]["as_stated"]["jaccard"] < 0.5
    assert [twin["seed"] for twin in data["twins"]] == [0, 1]
    assert math.isclose(data["chance"]["overlap"], K / tiny.WIDTH)
    assert plot.stat().st_size > 5000
    text = run("audit", model, "--claim", claim_file, "--twins", 2, "--seed", 1).stdout
    assert "10 of 48 coordinates; twins written: 2" in text
    assert "as stated" in text
    fails("audit", model, "--claim", claim_file, "--plot", tmp_path / "a.xyz", match="image format")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"claim": "top"}, "a claim is one of top_mean_difference"),
        ({"layer": 3}, "has no key 'layer'"),
        ({"logits": ["a", "b"]}, "has no key 'logits'"),
        ({"hook": None}, "lacks the key 'hook'"),
        ({"k": "10"}, "whole number"),
        ({"k": True}, "whole number"),
        ({"k": 0}, "1 coordinate or more"),
        ({"k": 49}, "49 coordinates, and there are 48"),
        ({"hook": "blocks.0.hook_nowhere"}, "hook_nowhere"),
        ({"hook": "blocks.7.hook_resid_post"}, "2 blocks, so none is number 7"),
        ({"hook": "lm_head"}, "no gauge moves the coordinates at 'lm_head'"),
        ({"positive": []}, "no positive text"),
        ({"positive": [" "]}, "no positive text"),
        ({"positive": "text"}, "list of texts"),
        ({"positive": {"file": "none.txt"}}, "none.txt cannot be read"),
        ({"negative": list(POSITIVE)}, "tied or zero"),
        ({"claim": "top_weights", "probe": "forest"}, "no probe 'forest'"),
        ({"claim": "top_weights", "direction": [1, "2"]}, "list of numbers"),
        ({"claim": "top_weights", "direction": [1, math.nan]}, "list of numbers"),
    ],
    ids=str,
)
def test_claims_that_are_refused(model, tmp_path, changes, match):
    (tmp_path / "negative.txt").write_text("\n".join(NEGATIVE))
    file = tmp_path / "claim.json"
    file.write_text(json.dumps(written(**changes)))
    fails("audit", model, "--claim", file, match=match)


@pytest.mark.parametrize(
    ("content", "match"), [("{", "is not JSON"), ("[1]", "JSON object"), (None, "cannot be read")]
)
def test_files_that_are_no_claim(model, tmp_path, content, match):
    file = tmp_path / "claim.json"
    if content is not None:
        file.write_text(content)
    fails("audit", model, "--claim", file, match=match)


def test_python_claims_that_are_refused(model):
    with pytest.raises(SignedAlignError, match="has 2 tokens"):
        audit_claim(model, TopAttribution(BLOCK, K, POSITIVE, ("ab", "c")))
    with pytest.raises(SignedAlignError, match="two words"):
        TopAttribution(BLOCK, K, POSITIVE, ("a",))
    with pytest.raises(SignedAlignError, match="at which hook"):
        audit_claim(model, lambda checkpoint: Coordinates((0,), (1,)))
    with pytest.raises(SignedAlignError, match="not between 0 and 47"):
        audit_claim(model, lambda checkpoint: Coordinates((48,), (1,)), hook=BLOCK)
    with pytest.raises(SignedAlignError, match="got list"):
        audit_claim(model, lambda checkpoint: [1], hook=BLOCK)
    with pytest.raises(SignedAlignError, match="1 twin or more"):
        audit_claim(model, CLAIMS["ridge"], twins=0)
    for indices, signs in [((), ()), ((1, 1), (1, 1)), ((1,), (0,)), ((1, 2), (1,))]:
        with pytest.raises(SignedAlignError, match="a claim"):
            Coordinates(indices, signs)
