"""SAEs: features fire alike and reconstructions correspond, and what cannot move is refused."""

import json

import pytest
import torch
from sae_lens import SAE
from sae_lens.registry import get_sae_class, get_sae_training_class
from safetensors.torch import load_file, save_file

from signed_align import Gauge, SignedPermutation, port
from signed_align.errors import ArtifactError, ChartError
from signed_align.gauge import ModelIdentity
from tests import tiny

WIDTH, FEATURES = tiny.WIDTH, 96
SETTINGS = {"topk": {"k": 8}, "batchtopk": {"k": 8}}
HOOK = "blocks.1.hook_resid_post"


@pytest.fixture
def gauge():
    return Gauge(
        {"residual": SignedPermutation.random(WIDTH, seed=2)},
        {},
        ModelIdentity("someone/model", "a" * 64, "llama"),
        ModelIdentity("someone/twin", "b" * 64, "llama"),
    )


def build(architecture, path, hook=HOOK, **settings):
    """A saved SAE with random parameters everywhere, as SAELens writes it for inference."""
    training = architecture == "batchtopk"
    get = get_sae_training_class if training else get_sae_class
    sae_class, config_class = get(architecture)
    config = config_class(
        d_in=WIDTH, d_sae=FEATURES, dtype="float32", device="cpu",
        **{**SETTINGS.get(architecture, {}), **settings},
    )  # fmt: skip
    config.metadata.hook_name = hook
    config.metadata.model_name = "someone/model"
    torch.manual_seed(0)
    sae = sae_class(config)
    with torch.no_grad():
        for name, parameter in sae.named_parameters():
            if name == "threshold":
                parameter.copy_(0.5 * torch.rand_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * WIDTH**-0.5)
        if training:
            sae.topk_threshold.fill_(0.7)
    if training:
        sae.save_inference_model(path)
    else:
        sae.save_model(path)
    return SAE.load_from_disk(path)


def activations():
    return torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("normalisation", ["none", "constant_norm_rescale"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu", "topk", "batchtopk"])
def test_features_and_reconstructions_follow(tmp_path, gauge, architecture, normalisation, rescale):
    if rescale and architecture not in ("topk", "batchtopk"):
        pytest.skip("an option of the top-k architectures")
    settings = {"rescale_acts_by_decoder_norm": True} if rescale else {}
    home = build(architecture, tmp_path / "sae", normalize_activations=normalisation, **settings)
    report = port(tmp_path / "sae", gauge, tmp_path / "ported")
    assert report["kind"] == "SAELens SAE"
    away = SAE.load_from_disk(tmp_path / "ported")
    assert away.cfg.metadata.model_name == "someone/twin"
    assert away.cfg.metadata.hook_name == HOOK
    x = activations()
    y = gauge.elements["residual"].apply(x, 1)
    with torch.no_grad():
        features = home.encode(x)
        assert 0 < int((features > 0).sum()) < features.numel()
        assert tiny.relative_change(features, away.encode(y)) <= 1e-5
        expected = gauge.elements["residual"].apply(home(x), 1)
        assert tiny.relative_change(expected, away(y)) <= 1e-5
        # and not without the move
        assert tiny.relative_change(expected, home(y)) > 1e-2
    port(tmp_path / "ported", gauge, tmp_path / "back", inverse=True)
    original = (tmp_path / "sae" / "sae_weights.safetensors").read_bytes()
    assert (tmp_path / "back" / "sae_weights.safetensors").read_bytes() == original


@pytest.mark.parametrize(
    "hook", ["blocks.0.hook_resid_pre", "blocks.11.hook_resid_mid", "model.layers.3", "hook_embed"]
)
def test_residual_hooks_are_accepted(tmp_path, gauge, hook):
    build("standard", tmp_path / "sae", hook)
    port(tmp_path / "sae", gauge, tmp_path / "ported")


@pytest.mark.parametrize(
    "hook",
    [
        "blocks.0.mlp.hook_post",
        "blocks.0.attn.hook_z",
        "blocks.0.attn.hook_q",
        "model.layers.0.mlp",
    ],
)
def test_other_hooks_are_refused_with_the_reason(tmp_path, gauge, hook):
    build("standard", tmp_path / "sae", hook)
    with pytest.raises(ArtifactError, match="not those of the residual stream"):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()


def test_layer_norm_is_refused_under_signs_and_moved_under_a_permutation(tmp_path, gauge):
    home = build("standard", tmp_path / "sae", normalize_activations="layer_norm")
    with pytest.raises(ArtifactError, match="subtracts the mean"):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    element = SignedPermutation.random(WIDTH, seed=2, signed=False)
    permutation = Gauge({"residual": element}, {}, gauge.source, gauge.target)
    port(tmp_path / "sae", permutation, tmp_path / "ported")
    away, x = SAE.load_from_disk(tmp_path / "ported"), activations()
    with torch.no_grad():
        moved = element.apply(home(x), 1)
        assert tiny.relative_change(moved, away(element.apply(x, 1))) <= 1e-5


def rewrite(path, **changes):
    config = json.loads((path / "cfg.json").read_text())
    (path / "cfg.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "transcoder"}, "transcoder"),
        ({"normalize_activations": "covariance_whitening"}, "fold"),
        ({"reshape_activations": "hook_z"}, "head outputs"),
        ({"metadata": {"model_name": "someone/model"}}, "which hook"),
        ({"metadata": None}, "which hook"),
        ({"metadata": {"model_name": "someone/else", "hook_name": HOOK}}, "--any-source"),
    ],
)
def test_saes_that_cannot_move_are_refused(tmp_path, gauge, changes, message):
    build("standard", tmp_path / "sae")
    rewrite(tmp_path / "sae", **changes)
    with pytest.raises(ArtifactError, match=message):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()


def test_unknown_tensors_and_other_widths_are_refused(tmp_path, gauge):
    build("standard", tmp_path / "sae")
    file = tmp_path / "sae" / "sae_weights.safetensors"
    save_file({**load_file(file), "W_skip": torch.zeros(WIDTH, WIDTH)}, file)
    with pytest.raises(ArtifactError, match="W_skip"):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    narrow = Gauge({"residual": SignedPermutation.random(32)}, {}, gauge.source, gauge.target)
    build("standard", tmp_path / "sae")
    with pytest.raises(ChartError, match="shape"):
        port(tmp_path / "sae", narrow, tmp_path / "ported")


def test_older_saes_name_their_hook_at_the_top(tmp_path, gauge):
    build("standard", tmp_path / "sae")
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    del config["metadata"]
    config |= {"hook_name": HOOK, "model_name": "someone/model"}
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config))
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    moved = json.loads((tmp_path / "ported" / "cfg.json").read_text())
    assert moved["model_name"] == "someone/twin"
    assert "metadata" not in moved
