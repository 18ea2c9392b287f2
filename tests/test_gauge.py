"""Gauges: composition along a path, files that read back, files that are refused."""

import pytest
import torch
from safetensors.torch import save_file

from signed_align import Gauge, SignedAlignError, SignedPermutation
from signed_align.errors import GaugeError, OutputError
from signed_align.gauge import ModelIdentity

A, B, C = (ModelIdentity(name, name * 8, "llama") for name in "abc")


def gauge(seed, source=A, target=B):
    return Gauge(
        {"residual": SignedPermutation.random(16, seed=seed)},
        {"residual": torch.rand(16, generator=torch.Generator().manual_seed(seed))},
        source,
        target,
        {"method": "test", "seed": seed},
    )


def test_a_saved_gauge_reads_back(tmp_path):
    original = gauge(1)
    original.save(tmp_path / "g.safetensors")
    loaded = Gauge.load(tmp_path / "g.safetensors")
    assert loaded.elements["residual"] == original.elements["residual"]
    assert torch.equal(loaded.margins["residual"], original.margins["residual"])
    assert (loaded.source, loaded.target) == (A, B)
    assert loaded.provenance == original.provenance


def test_composition_and_inverse_carry_ends_and_margins():
    first, second = gauge(1, A, B), gauge(2, B, C)
    both = first.then(second)
    assert (both.source, both.target) == (A, C)
    expected = first.elements["residual"].then(second.elements["residual"])
    assert both.elements["residual"] == expected
    carried = first.margins["residual"][second.elements["residual"].perm]
    assert torch.equal(both.margins["residual"], torch.minimum(carried, second.margins["residual"]))
    back = first.inverse()
    assert (back.source, back.target) == (B, A)
    assert back.inverse().elements["residual"] == first.elements["residual"]
    assert torch.equal(back.inverse().margins["residual"], first.margins["residual"])
    perm = first.elements["residual"].perm
    assert torch.equal(back.margins["residual"][perm], first.margins["residual"])


def test_a_path_with_a_gap_is_refused():
    with pytest.raises(GaugeError, match="another checkpoint"):
        gauge(1, A, B).then(gauge(2, C, A))


def test_a_space_that_only_one_gauge_moves_is_kept():
    mlp = Gauge({"mlp": SignedPermutation.random(8, seed=1)})
    both = Gauge({"residual": SignedPermutation.random(16, seed=1)}).then(mlp)
    assert set(both.elements) == {"residual", "mlp"}


def test_accuracy_counts_signs_only_where_the_partner_is_right():
    truth = SignedPermutation(torch.tensor([0, 1, 2, 3]), torch.tensor([1, -1, 1, -1]))
    found = SignedPermutation(torch.tensor([0, 1, 3, 2]), torch.tensor([1, 1, 1, -1]))
    assert found.agreement(truth) == {
        "permutation_accuracy": 0.5,
        "sign_accuracy": 0.25,
    }


def test_an_existing_file_is_kept(tmp_path):
    path = tmp_path / "g.safetensors"
    gauge(1).save(path)
    with pytest.raises(OutputError, match="exists already"):
        gauge(2).save(path)
    gauge(2).save(path, force=True)
    assert Gauge.load(path).provenance["seed"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.safetensors"]


def written(tmp_path, tensors=None, **changes):
    path = tmp_path / "g.safetensors"
    good = {
        "format": "signed-align-gauge",
        "version": "1",
        "spaces": '{"residual": {"kind": "signed_permutation"}}',
        "source": "null",
        "target": "null",
        "provenance": "{}",
    }
    metadata = {key: value for key, value in {**good, **changes}.items() if value is not None}
    if tensors is None:
        tensors = {"residual.perm": torch.arange(4), "residual.sign": torch.ones(4).to(torch.int8)}
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a gauge file"),
        ({"version": "9"}, "version 9"),
        ({"spaces": "[]"}, "valid"),
        ({"spaces": "{}"}, "moves no coordinates"),
        ({"provenance": "[1]"}, "provenance"),
        ({"source": '{"name": "x", "fingerprint": 5, "model_type": "llama"}'}, "strings"),
        ({"spaces": '{"residual": {"kind": "dense"}}'}, "valid"),
        ({"spaces": "{"}, "valid"),
        ({"source": '{"name": "x"}'}, "valid"),
        ({"provenance": None}, "valid"),
        ({"tensors": {"residual.perm": torch.arange(4)}}, "sign"),
        (
            {
                "tensors": {
                    "residual.perm": torch.arange(4) * 2,
                    "residual.sign": torch.ones(4).char(),
                }
            },
            "permutation",
        ),
    ],
)
def test_a_file_that_is_no_gauge_is_refused(tmp_path, changes, message):
    with pytest.raises(GaugeError, match=message):
        Gauge.load(written(tmp_path, **changes))


def test_missing_and_damaged_files_are_refused(tmp_path):
    assert Gauge.load(written(tmp_path)).elements["residual"].is_identity
    with pytest.raises(SignedAlignError, match="no gauge file"):
        Gauge.load(tmp_path / "none.safetensors")
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(GaugeError, match="readable"):
        Gauge.load(path)


def test_without_signs_only_the_permutation_is_left():
    element = SignedPermutation.random(9, seed=1)
    gauge = Gauge({"residual": element}).without_signs()
    assert torch.equal(gauge.element("residual").perm, element.perm)
    assert not gauge.element("residual").flips
