"""Table 1 of the design, for whole models: the function is unmoved, and wrong labels move it."""

import re

import pytest
import torch

from signed_align import Axis, Chart, Gauge, SignedPermutation, transport
from signed_align.chart import NativeGroup
from signed_align.errors import ChartError, GaugeError
from tests import tiny

TOLERANCE = 1e-5


def chart_of(model):
    return Chart.for_model(model.config.model_type, model.config.hidden_size)


def change_of_logits(model, element, relabel=lambda name, axes: axes):
    """Relative change of a model's logits when all its weights are moved by ``element``."""
    before, chart = tiny.logits(model), chart_of(model)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(
        {
            name: transport(
                tensor, relabel(name, chart.axes(name, tensor.shape)), Gauge({"residual": element})
            )
            for name, tensor in original.items()
        }
    )
    after = tiny.logits(model)
    model.load_state_dict(original)
    return tiny.relative_change(before, after)


@pytest.mark.parametrize("model_type", tiny.RMS_TYPES)
def test_rms_norm_models_are_invariant_under_signed_permutations(model_type):
    model = tiny.build(model_type)
    assert change_of_logits(model, SignedPermutation.random(tiny.WIDTH, seed=1)) <= TOLERANCE


@pytest.mark.parametrize("model_type", tiny.LAYER_NORM_TYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_layer_norm_models_are_invariant_under_permutations_and_a_global_sign(model_type, sign):
    perm = SignedPermutation.random(tiny.WIDTH, seed=1).perm
    element = SignedPermutation(perm, torch.full((tiny.WIDTH,), sign))
    assert change_of_logits(tiny.build(model_type), element) <= TOLERANCE


@pytest.mark.parametrize("model_type", tiny.LAYER_NORM_TYPES)
def test_layer_norm_models_change_under_single_signs(model_type):
    element = SignedPermutation.random(tiny.WIDTH, seed=1)
    assert change_of_logits(tiny.build(model_type), element) > 1e-2


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings_move_alike(tied):
    model = tiny.build("llama", tie_word_embeddings=tied)
    assert change_of_logits(model, SignedPermutation.random(tiny.WIDTH, seed=2)) <= TOLERANCE


def drop_signs(name, axes):
    """Only in one place: without any sign the move is a permutation, which is a gauge too."""
    return tuple(axis and axis.unsigned for axis in axes) if "down_proj" in name else axes


def sign_the_gains(name, axes):
    if "norm" in name and len(axes) == 1:
        return tuple(axis and Axis(axis.space) for axis in axes)
    return axes


def leave(part):
    return lambda name, axes: (None,) * len(axes) if part in name else axes


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "phi3", "granite"])
@pytest.mark.parametrize(
    "mutation",
    [drop_signs, sign_the_gains, leave("o_proj"), leave("norm"), leave("embed_tokens")],
    ids=["signs dropped", "gains signed", "writer left", "norms left", "embedding left"],
)
def test_a_wrong_label_changes_the_function(model_type, mutation):
    """The laws above would not hold of a chart with one of these mistakes."""
    model = tiny.build(model_type, tie_word_embeddings=False)
    element = SignedPermutation.random(tiny.WIDTH, seed=1)
    assert change_of_logits(model, element, mutation) > 1e-3


def test_every_family_accepts_the_bare_model_class_names():
    chart = Chart.for_model("llama", 48)
    with_prefix = chart.axes("model.layers.11.mlp.down_proj.weight", (48, 80))
    assert with_prefix == chart.axes("layers.11.mlp.down_proj.weight", (48, 80))
    assert with_prefix == (Axis("residual"), None)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.x.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_norm.foo",
        "visual.patch_embed.weight",
        "weight",
    ],
)
def test_an_unknown_weight_is_an_error_that_names_it(name):
    with pytest.raises(ChartError, match=re.escape(repr(name))):
        Chart.for_model("llama", 48).axes(name, (48, 48))


def test_a_weight_of_the_wrong_shape_is_refused():
    with pytest.raises(ChartError, match="shape"):
        Chart.for_model("llama", 48).axes("model.norm.weight", (47,))
    with pytest.raises(ChartError, match="shape"):
        Chart.for_model("llama", 48).axes("model.norm.weight", (48, 1))


def test_an_unknown_model_type_is_refused_with_those_known():
    with pytest.raises(ChartError, match=r"t5.*llama"):
        Chart.for_model("t5", 48)


def test_a_signed_gauge_is_refused_on_layer_norm_with_the_reason():
    chart = Chart.for_model("gpt2", 48)
    assert chart.native_group is NativeGroup.PERMUTATION_AND_GLOBAL_SIGN
    with pytest.raises(GaugeError, match="subtracts the mean"):
        chart.require_native(Gauge({"residual": SignedPermutation.random(48, seed=1)}))
    chart.require_native(Gauge({"residual": SignedPermutation.random(48, signed=False)}))


def test_a_gauge_of_another_width_or_space_is_refused():
    chart = Chart.for_model("llama", 48)
    with pytest.raises(GaugeError, match="32 residual coordinates, the model 48"):
        chart.require_native(Gauge({"residual": SignedPermutation.identity(32)}))
    with pytest.raises(GaugeError, match="'mlp'"):
        chart.require_native(Gauge({"mlp": SignedPermutation.identity(48)}))
