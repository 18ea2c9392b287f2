"""SAEs: features fire alike and reconstructions correspond, and what cannot move is refused."""

import json

import pytest
import torch
from sae_lens import SAE
from sae_lens.registry import (
    SAE_CLASS_REGISTRY,
    SAE_TRAINING_CLASS_REGISTRY,
    get_sae_class,
    get_sae_training_class,
)
from safetensors.torch import load_file, save_file

from signed_align import Gauge, SignedPermutation
from signed_align.adapters.sae import ARCHITECTURES, NORMALISATIONS
from signed_align.chart import Chart
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError
from signed_align.gauge import ModelIdentity
from signed_align.hooks import find_hook, listening
from signed_align.labels import element_of
from tests import tiny
from tests.porting import port

WIDTH, FEATURES = tiny.WIDTH, 96
SETTINGS = {
    "topk": {"k": 8},
    "abstopk": {"k": 8},
    "batchtopk": {"k": 8},
    "matryoshka_batchtopk": {"k": 8, "matryoshka_widths": [32, 96]},
    "matching_pursuit": {"residual_threshold": 0.5, "max_iterations": 8},
    "temporal": {"n_heads": 2, "n_attn_layers": 1, "bottleneck_factor": 4, "kval_topk": 8},
}
HOOK = "blocks.1.hook_resid_post"
WRITTEN = "blocks.1.hook_mlp_out"
TRAINING_ONLY = set(SAE_TRAINING_CLASS_REGISTRY) - set(SAE_CLASS_REGISTRY)


@pytest.fixture
def gauge():
    return Gauge(
        {"residual": SignedPermutation.random(WIDTH, seed=2)},
        {},
        ModelIdentity("someone/model", "a" * 64, "llama"),
        ModelIdentity("someone/twin", "b" * 64, "llama"),
    )


def build(architecture, path, hook=HOOK, model="someone/model", out=None, width=WIDTH, **settings):
    """A saved SAE with random parameters everywhere, as SAELens writes it for inference."""
    training = architecture in TRAINING_ONLY
    get = get_sae_training_class if training else get_sae_class
    sae_class, config_class = get(architecture)
    if "transcoder" in architecture:
        settings = {"d_out": out[1], "apply_b_dec_to_input": False, **settings}
    config = config_class(
        d_in=width, d_sae=FEATURES, dtype="float32", device="cpu",
        **{**SETTINGS.get(architecture, {}), **settings},
    )  # fmt: skip
    config.metadata.hook_name = hook
    config.metadata.model_name = str(model)
    if out:
        config.metadata.hook_name_out = out[0]
    torch.manual_seed(0)
    sae = sae_class(config)
    with torch.no_grad():
        for name, parameter in sae.named_parameters():
            if name == "threshold":
                parameter.copy_(0.5 * torch.rand_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * width**-0.5)
        if training:
            sae.topk_threshold.fill_(0.7)
    if training:
        sae.save_inference_model(path)
    else:
        sae.save_model(path)
    return SAE.load_from_disk(path)


def seen(model, chart, name):
    """The activations at a hook on the fixed tokens, flattened to (tokens, coordinates)."""
    with listening(model, chart, find_hook(chart, name)) as caught, torch.no_grad():
        model(input_ids=tiny.tokens())
    return caught[0]


def both(full_twin, name):
    """The activations at a hook in source and target, and the element between them."""
    source, target, gauge = full_twin
    chart = Checkpoint.open(source).chart
    x, y = (seen(tiny.load(end), chart, name) for end in (source, target))
    size = x.shape[-1]
    return x, y, element_of(find_hook(chart, name).label(chart, size), size, gauge)


def check(home, away, x, y, written):
    """Both fire alike on the two models' activations, and write what corresponds."""
    with torch.no_grad():
        features, moved = home.encode(x), away.encode(y)
        assert 0 < int((features != 0).sum()) < features.numel()
        assert torch.equal(features != 0, moved != 0)
        assert tiny.relative_change(features, moved) <= 1e-5
        expected = written.apply(home(x), -1)
        assert tiny.relative_change(expected, away(y)) <= 1e-5
        # and not without the move
        assert tiny.relative_change(expected, home(y)) > 1e-2


def check_round_trip(tmp_path, gauge, **options):
    port(tmp_path / "ported", gauge, tmp_path / "back", inverse=True, **options)
    for file in (tmp_path / "sae").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


def test_every_architecture_and_normalisation_of_the_library_is_decided():
    assert set(ARCHITECTURES) == set(SAE_CLASS_REGISTRY) | set(SAE_TRAINING_CLASS_REGISTRY)
    assert set(NORMALISATIONS) == {
        "none", "expected_average_only_in", "layer_norm", "covariance_whitening",
        "constant_norm_rescale", "constant_scalar_rescale",
    }  # fmt: skip


@pytest.mark.parametrize("normalisation", sorted(set(NORMALISATIONS) - {"covariance_whitening"}))
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_features_and_reconstructions_follow(full_twin, tmp_path, architecture, normalisation):
    source, target, gauge = full_twin
    out = (WRITTEN, WIDTH) if "transcoder" in architecture else None
    settings = {"model": source, "out": out, "normalize_activations": normalisation}
    if normalisation == "constant_scalar_rescale" and architecture != "temporal":
        with pytest.raises(ValueError, match="constant_scalar_rescale"):
            build(architecture, tmp_path / "sae", **settings)
        return
    home = build(architecture, tmp_path / "sae", **settings)
    if normalisation == "layer_norm":
        with pytest.raises(ArtifactError, match="subtracts the mean"):
            port(tmp_path / "sae", gauge, tmp_path / "ported")
        return
    report = port(tmp_path / "sae", gauge, tmp_path / "ported")
    assert report["kind"] == "SAELens SAE"
    assert report["source_verified"]
    away = SAE.load_from_disk(tmp_path / "ported")
    assert away.cfg.metadata.model_name == str(target)
    assert away.cfg.metadata.hook_name == HOOK
    assert away.cfg.metadata.signed_align_moves[0]["to"]["name"] == str(target)
    x, y, element = both(full_twin, HOOK)
    check(home, away, x, y, element)
    check_round_trip(tmp_path, gauge)


@pytest.mark.parametrize("architecture", ["topk", "abstopk"])
def test_rescaling_by_decoder_norms_follows(full_twin, tmp_path, architecture):
    source, _, gauge = full_twin
    home = build(
        architecture, tmp_path / "sae", model=source, rescale_acts_by_decoder_norm=True
    )  # fmt: skip
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    x, y, element = both(full_twin, HOOK)
    check(home, SAE.load_from_disk(tmp_path / "ported"), x, y, element)


HOOKS = [
    "blocks.0.hook_resid_pre",
    "blocks.1.hook_resid_post",
    "blocks.1.hook_attn_out",
    "blocks.1.hook_mlp_out",
    "blocks.1.mlp.hook_post",
    "blocks.1.attn.hook_z",
    "model.layers.0",
    "model.layers.1.self_attn",
    "model.layers.1.mlp",
    "model.layers.1.input_layernorm",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.1.self_attn.o_proj",
    "model.norm",
    "model.embed_tokens",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_whose_coordinates_are_known(full_twin, tmp_path, hook):
    source, _, gauge = full_twin
    x, y, element = both(full_twin, hook)
    assert tiny.relative_change(element.apply(x, -1), y) <= 1e-5
    home = build("standard", tmp_path / "sae", hook, model=source, width=x.shape[-1])
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    check(home, SAE.load_from_disk(tmp_path / "ported"), x, y, element)
    check_round_trip(tmp_path, gauge)


@pytest.mark.parametrize(
    "hook",
    [
        "blocks.1.hook_resid_mid",
        "blocks.1.hook_mlp_in",
        "blocks.1.ln1.hook_normalized",
        "blocks.1.ln2.hook_normalized",
        "ln_final.hook_normalized",
        "hook_embed",
    ],
)
def test_hooks_in_the_residual_stream_share_its_coordinates(full_twin, tmp_path, hook):
    source, _, gauge = full_twin
    # read at a module where Hugging Face has the same vectors, up to a gain
    module = {
        "blocks.1.ln1.hook_normalized": "model.layers.1.input_layernorm",
        "blocks.1.ln2.hook_normalized": "model.layers.1.post_attention_layernorm",
        "ln_final.hook_normalized": "model.norm",
        "hook_embed": "model.embed_tokens",
    }.get(hook, HOOK)
    home = build("standard", tmp_path / "sae", hook, model=source)
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    x, y, element = both(full_twin, module)
    check(home, SAE.load_from_disk(tmp_path / "ported"), x, y, element)


def test_the_embedding_hook_is_read_at_the_embedding(tmp_path):
    model = tiny.build("gpt2")
    chart = Chart.for_model("gpt2", n_embd=tiny.WIDTH)
    assert torch.equal(seen(model, chart, "hook_embed"), model.transformer.wte(tiny.tokens()))


@pytest.mark.parametrize("hook", ["blocks.1.mlp.hook_pre", "blocks.1.mlp.hook_pre_linear"])
def test_the_gate_does_not_feel_signs(full_twin, tmp_path, hook):
    module = {"hook_pre": "gate_proj", "hook_pre_linear": "up_proj"}[hook.rpartition(".")[2]]
    source, _, gauge = full_twin
    x, y, element = both(full_twin, f"model.layers.1.mlp.{module}")
    home = build("standard", tmp_path / "sae", hook, model=source, width=x.shape[-1])
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    check(home, SAE.load_from_disk(tmp_path / "ported"), x, y, element)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_queries_keys_and_values_by_their_lens_names(full_twin, tmp_path, name):
    source, _, gauge = full_twin
    x, y, element = both(full_twin, f"model.layers.1.self_attn.{name}_proj")
    hook = f"blocks.1.attn.hook_{name}"
    home = build("standard", tmp_path / "sae", hook, model=source, width=x.shape[-1])
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    check(home, SAE.load_from_disk(tmp_path / "ported"), x, y, element)


@pytest.mark.parametrize(
    "architecture", [name for name in sorted(ARCHITECTURES) if "transcoder" in name]
)
def test_transcoders_label_input_and_output_apart(full_twin, tmp_path, architecture):
    """From the residual stream to the hidden units of an MLP, which move in their own way."""
    source, _, gauge = full_twin
    x, y, _ = both(full_twin, HOOK)
    hidden, _, written = both(full_twin, "blocks.1.mlp.hook_post")
    home = build(
        architecture, tmp_path / "sae", model=source,
        out=("blocks.1.mlp.hook_post", hidden.shape[-1]),
    )  # fmt: skip
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    check(home, SAE.load_from_disk(tmp_path / "ported"), x, y, written)
    check_round_trip(tmp_path, gauge)


def test_a_whitened_dictionary_stays_and_its_whitening_moves(full_twin, tmp_path):
    source, _, gauge = full_twin
    home = build("standard", tmp_path / "sae", model=source)
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    config["normalize_activations"] = "covariance_whitening"
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="fold the whitening"):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    x, y, element = both(full_twin, HOOK)
    rows = x.reshape(-1, WIDTH).double()
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    scale = (values.clamp_min(0) + 1e-2).sqrt()
    save_file(
        {
            "mean": mean.contiguous(),
            "matrix": (vectors / scale).contiguous(),
            "inverse_matrix": (vectors * scale).T.contiguous(),
        },
        tmp_path / "sae" / "activation_whitening.safetensors",
    )
    port(tmp_path / "sae", gauge, tmp_path / "ported")

    def reconstruct(path, sae, activations):
        state = load_file(path / "activation_whitening.safetensors")
        whitened = (activations.double() - state["mean"]) @ state["matrix"]
        features = sae.encode(whitened.float())
        decoded = sae.decode(features).double() @ state["inverse_matrix"] + state["mean"]
        return features, decoded.float()

    away = SAE.load_from_disk(tmp_path / "ported")
    with torch.no_grad():
        features, decoded = reconstruct(tmp_path / "sae", home, x)
        moved, there = reconstruct(tmp_path / "ported", away, y)
    assert tiny.relative_change(features, moved) <= 1e-4
    assert tiny.relative_change(element.apply(decoded, -1), there) <= 1e-4
    check_round_trip(tmp_path, gauge)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("blocks.0.mlp.hook_post", "about which the gauge says nothing"),
        ("blocks.0.attn.hook_z", "about which the gauge says nothing"),
    ],
)
def test_a_space_that_the_gauge_leaves_out_is_refused(twin, tmp_path, hook, message):
    source, _, gauge = twin
    width = {"blocks.0.mlp.hook_post": 80, "blocks.0.attn.hook_z": 64}[hook]
    build("standard", tmp_path / "sae", hook, model=source, width=width)
    with pytest.raises(ArtifactError, match=message):
        port(tmp_path / "sae", gauge, tmp_path / "ported")


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("blocks.0.attn.hook_something", "name the module"),
        ("blocks.0.attn.hook_pattern", "indexed by positions"),
        ("blocks.0.ln1.hook_scale", "one number a token"),
        ("blocks.0.hook_attn_in", "for every head"),
        ("model.layers.0.mlp.act_fn.nothing", "no hook"),
        ("transformer.somewhere", "no hook"),
    ],
)
def test_other_hooks_are_refused_with_the_reason(full_twin, tmp_path, hook, message):
    source, _, gauge = full_twin
    build("standard", tmp_path / "sae", hook, model=source)
    with pytest.raises(ArtifactError, match=message):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    assert not (tmp_path / "ported").exists()


def test_layer_norm_moves_under_a_permutation(tmp_path, gauge):
    home = build("standard", tmp_path / "sae", normalize_activations="layer_norm")
    with pytest.raises(ArtifactError, match="subtracts the mean"):
        port(tmp_path / "sae", gauge, tmp_path / "ported")
    element = SignedPermutation.random(WIDTH, seed=2, signed=False)
    permutation = Gauge({"residual": element}, {}, gauge.source, gauge.target)
    port(tmp_path / "sae", permutation, tmp_path / "ported")
    away = SAE.load_from_disk(tmp_path / "ported")
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        moved = element.apply(home(x), 1)
        assert tiny.relative_change(moved, away(element.apply(x, 1))) <= 1e-5


def rewrite(path, **changes):
    config = json.loads((path / "cfg.json").read_text())
    (path / "cfg.json").write_text(json.dumps(config | changes))


META = {"model_name": "someone/model", "hook_name": HOOK}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "crosscoder"}, "crosscoder"),
        ({"architecture": "transcoder"}, "hook_name_out"),
        ({"normalize_activations": "covariance_whitening"}, "fold"),
        ({"normalize_activations": "something"}, "something"),
        ({"metadata": {"model_name": "someone/model"}}, "which hook"),
        ({"metadata": None}, "which hook"),
        ({"metadata": {**META, "hook_head_index": 3}}, "single head"),
        (
            {
                "metadata": {
                    **META,
                    "model_from_pretrained_kwargs": {"refactor_factored_attn_matrices": True},
                }
            },
            "refactor_factored_attn_matrices",
        ),
        ({"metadata": {"model_name": "someone/else", "hook_name": HOOK}}, "--any-source"),
        ({"d_in": "many"}, "many"),
        ({"d_in": 47}, "48 coordinates at"),
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
    with pytest.raises(ArtifactError, match="32 coordinates at"):
        port(tmp_path / "sae", narrow, tmp_path / "ported")


def test_a_user_names_the_hook_of_an_sae_that_does_not(tmp_path, gauge):
    build("standard", tmp_path / "sae", hook=None)
    port(tmp_path / "sae", gauge, tmp_path / "ported", hook=HOOK)


def test_older_saes_name_their_hook_at_the_top(tmp_path, gauge):
    build("standard", tmp_path / "sae")
    config = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    del config["metadata"]
    config |= {"hook_point": HOOK, "model_name": "someone/model", "normalize_activations": None}
    (tmp_path / "sae" / "cfg.json").write_text(json.dumps(config))
    port(tmp_path / "sae", gauge, tmp_path / "ported")
    moved = json.loads((tmp_path / "ported" / "cfg.json").read_text())
    assert moved["model_name"] == "someone/twin"
    assert "metadata" not in moved
    check_round_trip(tmp_path, gauge)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "phi3", "gpt_neox"])
def test_hooks_are_found_in_other_models(model_type):
    chart = Chart.for_model(model_type)
    assert find_hook(chart, "blocks.0.hook_resid_post").template.space == "residual"
    assert find_hook(chart, "blocks.0.mlp.hook_post").reads
    assert find_hook(chart, "blocks.0.attn.hook_z").reads
