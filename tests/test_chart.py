"""Charts: names and shapes they know, gauges they admit, whole models that stay as they are."""

import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig

from signed_align import Axis, Chart, Checkpoint, Gauge, SignedPermutation, apply, scramble
from signed_align.errors import ChartError, GaugeError
from signed_align.groups import Within
from signed_align.labels import Fused, transport_all
from signed_align.miniature import miniature_model
from tests import tiny

torch.set_num_threads(1)

TOLERANCE = 1e-5
WIDTH = tiny.WIDTH
RESIDUAL = Axis("residual")
MOE_TYPES = ["mixtral", "qwen3_moe", "granitemoe", "deepseek_v3", "gpt_oss"]


@functools.cache
def tiny_model(model_type):
    return tiny.build(model_type)


@functools.cache
def moe_model(model_type):
    return miniature_model(AutoConfig.for_model(model_type))


def model_of(model_type):
    return moe_model(model_type) if model_type in MOE_TYPES else tiny_model(model_type)


@functools.cache
def chart_of(model_type):
    return Chart.of(model_of(model_type).config)


@functools.cache
def spaces_of(model_type):
    state = model_of(model_type).state_dict()
    return chart_of(model_type).spaces({name: tensor.shape for name, tensor in state.items()})


def random_gauge(model_type, seed=0, kinds=None, **options):
    chart = chart_of(model_type)
    return chart.random_gauge(
        spaces_of(model_type), seed=seed, kinds=chart.kinds if kinds is None else kinds, **options
    )


def logits(model):
    with torch.no_grad():
        return model(tiny.tokens() % 90).logits


def change_of_logits(model_type, elements):
    """Relative change of a model's logits when all its weights are moved."""
    model, chart, gauge = model_of(model_type), chart_of(model_type), Gauge(elements)
    before = logits(model)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved = transport_all(original, chart.axes, gauge, lambda name: chart.origin(name, gauge))
    try:
        model.load_state_dict(moved)
        return tiny.relative_change(before, logits(model))
    finally:
        model.load_state_dict(original)


# ---- whole models ----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", tiny.ALL_TYPES + MOE_TYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_moved_in_every_space_computes_the_same(model_type, seed):
    assert change_of_logits(model_type, random_gauge(model_type, seed)) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gpt2", "mixtral", "deepseek_v3"])
def test_a_model_moved_in_one_kind_of_space_computes_the_same(model_type):
    for kind in chart_of(model_type).kinds:
        kinds = ("heads", "values", "keys", "nopes") if kind in ("heads", "values") else (kind,)
        if kind in ("keys", "nopes"):
            continue  # with whole heads, above
        elements = random_gauge(model_type, 3, kinds)
        assert not all(element.is_identity for element in elements.values())
        assert change_of_logits(model_type, elements) <= TOLERANCE


@pytest.mark.parametrize("kind", ["heads", "values", "keys"])
def test_coordinates_inside_heads_can_move_while_heads_stay(kind):
    """A gauge of one of the spaces of heads leaves the others, so heads keep their places."""
    elements = random_gauge("llama", 3, (kind,))
    chart_of("llama").require_native(Gauge(elements))
    assert change_of_logits("llama", elements) <= TOLERANCE


@pytest.mark.parametrize("model_type", tiny.LAYER_NORM_TYPES)
def test_layer_norm_models_change_under_single_signs(model_type):
    elements = {"residual": SignedPermutation.random(WIDTH, seed=1)}
    assert change_of_logits(model_type, elements) > 1e-2


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_gauges_without_signs_have_none(model_type):
    elements = random_gauge(model_type, signed=False)
    assert all(bool((element.sign == 1).all()) for element in elements.values())
    assert change_of_logits(model_type, elements) <= TOLERANCE


# ---- random gauges ---------------------------------------------------------------------------


@given(
    model_type=st.sampled_from(tiny.ALL_TYPES + MOE_TYPES),
    seed=st.integers(0, 10**6),
    signed=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_a_random_gauge_is_native(model_type, seed, signed):
    elements = random_gauge(model_type, seed, signed=signed)
    assert set(elements) == set(spaces_of(model_type))
    gauge = Gauge(elements)
    chart_of(model_type).require_native(gauge)
    chart_of(model_type).require_native(gauge.inverse())


def test_residual_alone_is_drawn_unless_more_is_asked_for():
    spaces, chart = spaces_of("llama"), chart_of("llama")
    assert set(chart.random_gauge(spaces)) == {"residual"}
    assert set(chart.random_gauge(spaces, kinds=("mlp",))) == {
        "mlp:layers.0.mlp", "mlp:layers.1.mlp"
    }  # fmt: skip


def test_spaces_are_named_by_kind_and_module():
    assert next(iter(spaces_of("llama"))) == "residual"
    assert set(spaces_of("llama")) == {
        "residual",
        *(f"{kind}:layers.{n}.self_attn" for kind in ("heads", "values", "keys") for n in (0, 1)),
        *(f"mlp:layers.{n}.mlp" for n in (0, 1)),
    }
    assert all(space.name == name for name, space in spaces_of("llama").items())


def test_units_stay_in_their_expert_when_experts_stay():
    elements = random_gauge("mixtral", kinds=("mlp",))
    group = spaces_of("mixtral")["mlp:layers.0.mlp.experts"].group
    blocks = group.block_perm(elements["mlp:layers.0.mlp.experts"])
    assert torch.equal(blocks, torch.arange(group.blocks))


# ---- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["", "model.", "base_model.model.", "base_model.model.model.", "language_model."]
)
def test_prefixes_are_left_out(prefix):
    chart = chart_of("llama")
    name, mlp = "layers.1.mlp.down_proj.weight", "mlp:layers.1.mlp"
    assert chart.axes(prefix + name, (WIDTH, 80)) == (RESIDUAL, Axis(mlp))
    assert chart.pattern(prefix + name) == "layers.*.mlp.down_proj.weight"
    label, numbers = chart.module(prefix + "layers.1.mlp.down_proj")
    assert (label.output, numbers) == (RESIDUAL, ("1",))


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "axes"),
    [
        ("llama", "model.norm.weight", (WIDTH,), (RESIDUAL.unsigned,)),
        ("llama", "model.embed_tokens.weight", (9, WIDTH), (Axis("vocabulary", False), RESIDUAL)),
        ("llama", "model.layers.0.self_attn.o_proj.bias", (WIDTH,), (RESIDUAL,)),
        ("llama", "model.layers.0.mlp.up_proj.bias", (80,), (Axis("mlp:layers.0.mlp"),)),
        ("llama", "model.layers.0.mlp.gate_proj.bias", (80,), (Axis("mlp:layers.0.mlp", False),)),
        ("gpt2", "transformer.h.0.ln_1.weight", (WIDTH,), (RESIDUAL.unsigned,)),
        ("gpt2", "h.0.ln_1.bias", (WIDTH,), (RESIDUAL,)),
        ("gpt2", "h.1.mlp.c_fc.weight", (WIDTH, 192), (RESIDUAL, Axis("mlp:h.1.mlp", False))),
        ("gpt2", "wpe.weight", (64, WIDTH), (None, RESIDUAL)),
    ],
)
def test_labels(model_type, name, shape, axes):
    assert chart_of(model_type).axes(name, shape) == axes


def test_a_layer_number_is_bound_to_its_own_spaces():
    chart = Chart.for_model("llama")
    (rows, _) = chart.axes("layers.17.mlp.up_proj.weight", (11008, 4096))
    assert rows == Axis("mlp:layers.17.mlp")
    (rows, _) = chart.axes("layers.17.self_attn.q_proj.weight", (4096, 4096))
    assert isinstance(rows, Fused)
    assert rows.spaces == ("heads:layers.17.self_attn", "keys:layers.17.self_attn")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.x.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_norm.foo",
        "visual.patch_embed.weight",
        "modelXlayers.0.mlp.down_proj.weight",
        "weight",
        "",
    ],
)
def test_an_unknown_weight_is_an_error_that_names_it(name):
    with pytest.raises(ChartError, match=re.escape(repr(name))):
        chart_of("llama").axes(name, (WIDTH, WIDTH))


def test_an_unknown_module_is_an_error_that_names_it():
    with pytest.raises(ChartError, match=r"'layers\.0\.mlp\.foo'"):
        chart_of("llama").module("layers.0.mlp.foo")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.norm.weight", (47,), r"\(48\)"),
        ("model.norm.weight", (48, 1), r"\(48\)"),
        ("model.layers.0.mlp.down_proj.weight", (47, 80), r"\(48, mlp units\)"),
        ("model.layers.0.mlp.down_proj.weight", (80, 48), r"\(48, mlp units\)"),
        ("model.layers.0.self_attn.q_proj.weight", (63, 48), r"\(self_attn units, 48\)"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 48, 1), r"\(self_attn units, 48\)"),
    ],
)
def test_a_weight_of_the_wrong_shape_is_refused(name, shape, wanted):
    with pytest.raises(ChartError, match=wanted) as caught:
        chart_of("llama").axes(name, shape)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"],
)
def test_constants_that_a_checkpoint_may_hold_are_not_moved(name):
    assert chart_of("llama").is_buffer(name)
    assert chart_of("llama").axes(name, (8,)) == (None,)


def test_old_masks_of_gpt2_are_constants_and_its_biases_are_not():
    chart = chart_of("gpt2")
    assert chart.is_buffer("h.0.attn.bias")
    assert chart.axes("h.0.attn.bias", (1, 1, 64, 64)) == (None,) * 4
    assert not chart.is_buffer("h.0.attn.c_attn.bias")


@pytest.mark.parametrize("model_type", tiny.ALL_TYPES)
def test_blocks_before_a_hook_are_counted(model_type):
    chart = chart_of(model_type)
    stack = {"gpt2": "transformer.h"}.get(model_type, "model.layers")
    assert chart.blocks_before(f"{stack}.0") == 1
    assert chart.blocks_before(f"{stack}.7") == 8
    assert chart.blocks_before(f"{stack}.7.mlp") is None
    assert chart.blocks_before("lm_head") is None


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", ["model.embed_tokens.weight", "lm_head.weight"]),
        ("gpt2", ["transformer.wte.weight", "lm_head.weight"]),
    ],
)
def test_token_matrices(model_type, expected):
    assert chart_of(model_type).token_matrices(model_of(model_type).state_dict()) == expected


def test_without_its_sites_a_chart_labels_the_residual_stream_alone():
    chart = chart_of("llama").residual_alone()
    assert chart.kinds == ("residual",)
    assert chart.axes("layers.1.mlp.down_proj.weight", (WIDTH, 80)) == (RESIDUAL, None)
    assert chart.axes("layers.1.self_attn.q_proj.weight", (64, WIDTH)) == (None, RESIDUAL)


# ---- checkpoint keys -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of saved miniatures, whose keys are those of checkpoints."""

    @functools.cache
    def save(model_type):
        path = tmp_path_factory.mktemp(model_type)
        moe_model(model_type).save_pretrained(path)
        return path

    return save


@pytest.mark.parametrize(
    ("model_type", "key", "site", "axis"),
    [
        ("mixtral", "block_sparse_moe.experts.2.w1.weight", "mlp.experts", 0),
        ("mixtral", "block_sparse_moe.experts.0.w2.weight", "mlp.experts", 1),
        ("qwen3_moe", "mlp.experts.1.up_proj.weight", "mlp.experts", 0),
        ("deepseek_v3", "mlp.experts.1.down_proj.weight", "mlp.experts", 1),
    ],
)
def test_keys_of_single_experts_are_known(saved, model_type, key, site, axis):
    chart, name = chart_of(model_type), f"model.layers.1.{key}"
    shape = load_file(saved(model_type) / "model.safetensors")[name].shape
    axes = chart.axes(name, shape)
    assert axes[1 - axis] == RESIDUAL
    assert isinstance(axes[axis], Fused)
    assert axes[axis].only == int(re.search(r"experts\.(\d+)", key)[1])
    assert f"mlp:layers.1.{site}" in axes[axis].spaces


def test_keys_of_joined_experts_are_known(saved):
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    shape = load_file(saved("granitemoe") / "model.safetensors")[name].shape
    axes = chart_of("granitemoe").axes(name, shape)
    assert axes[2] == RESIDUAL
    assert axes[0] == axes[1]
    assert "experts:layers.0.block_sparse_moe.experts" in axes[0].spaces


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_checkpoints_and_models_have_the_same_spaces(saved, model_type):
    spaces = Checkpoint.open(saved(model_type)).spaces
    assert {name: space.group for name, space in spaces.items()} == {
        name: space.group for name, space in spaces_of(model_type).items()
    }


def test_an_expert_is_made_of_the_one_that_moves_to_its_place():
    space = "experts:layers.0.mlp.experts"
    count = spaces_of("mixtral")[space].group.size
    perm = torch.arange(count).roll(1)
    gauge = Gauge({space: SignedPermutation(perm, torch.ones(count, dtype=torch.int8))})
    chart = chart_of("mixtral")
    key = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
    for expert in range(count):
        assert chart.origin(key.format(0, expert), gauge) == key.format(0, int(perm[expert]))
        assert chart.origin(key.format(1, expert), gauge) == key.format(1, expert)
    assert chart.origin("model.norm.weight", gauge) == "model.norm.weight"


# ---- files -----------------------------------------------------------------------------------


def same_bytes(a, b):
    files = sorted(file.name for file in a.glob("*.safetensors"))
    assert files == sorted(file.name for file in b.glob("*.safetensors"))
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in files)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", *MOE_TYPES])
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_a_twin_in_every_space_computes_the_same_and_moves_back(tmp_path, model_type, shard):
    model, source, twin = model_of(model_type), tmp_path / "source", tmp_path / "twin"
    model.save_pretrained(source, max_shard_size=shard)
    assert (len(list(source.glob("*.safetensors"))) > 1) is (shard != "5GB")
    gauge = scramble(source, twin, seed=4, spaces=["all"])
    assert {name.partition(":")[0] for name in gauge.elements} == set(chart_of(model_type).kinds)
    assert tiny.relative_change(logits(model), logits(tiny.load(twin))) <= TOLERANCE
    apply(gauge, twin, tmp_path / "back", inverse=True)
    assert same_bytes(source, tmp_path / "back")
    assert not same_bytes(source, twin)


def test_experts_change_places_between_keys_and_files(tmp_path):
    moe_model("mixtral").save_pretrained(tmp_path / "source", max_shard_size="60KB")
    before = Checkpoint.open(tmp_path / "source")
    elements = before.chart.random_gauge(before.spaces, seed=4, kinds=["experts"])
    gauge = Gauge(elements, source=before.identity)
    apply(gauge, tmp_path / "source", tmp_path / "twin")
    after = Checkpoint.open(tmp_path / "twin")
    key = "model.layers.{}.block_sparse_moe.experts.{}.w2.weight"
    files = set()
    for layer in (0, 1):
        perm = gauge.elements[f"experts:layers.{layer}.mlp.experts"].perm
        assert not torch.equal(perm, torch.arange(len(perm)))
        for expert, origin in enumerate(perm.tolist()):
            source, target = key.format(layer, origin), key.format(layer, expert)
            assert torch.equal(after.tensor(target), before.tensor(source))
            files.add(before.files[source] == after.files[target].name)
            files.add(before.files[source].name == before.files[target].name)
    assert False in files, "some expert moves to another file"


# ---- native gauges ---------------------------------------------------------------------------


def refused(model_type, elements, message):
    with pytest.raises(GaugeError, match=message):
        chart_of(model_type).require_native(Gauge(elements))


def test_a_signed_gauge_is_refused_on_layer_norm_with_the_reason():
    assert chart_of("gpt2").native_group is Within.PERMUTATION_AND_GLOBAL_SIGN
    refused("gpt2", {"residual": SignedPermutation.random(WIDTH, seed=1)}, "subtracts the mean")
    chart_of("gpt2").require_native(
        Gauge({"residual": SignedPermutation.random(WIDTH, signed=False)})
    )


def test_a_gauge_of_another_width_is_refused():
    message = "the gauge has 32 residual coordinates, the model 48"
    refused("llama", {"residual": SignedPermutation.identity(32)}, message)


@pytest.mark.parametrize("space", ["mlp", "mlp:layers.0", "foo:layers.0.mlp", "heads:layers.0.mlp"])
def test_an_unknown_space_is_refused_with_those_that_are_known(space):
    refused("llama", {space: SignedPermutation.identity(48)}, f"{space!r}.*residual.*mlp")


def test_a_space_of_another_size_is_refused():
    refused(
        "llama", {"values:layers.0.self_attn": SignedPermutation.identity(17)}, "17 coordinates"
    )


def test_a_space_of_a_layer_that_the_model_lacks_is_refused(tmp_path):
    source = tiny.save(tiny_model("llama"), tmp_path / "source")
    gauge = Gauge({"mlp:layers.7.mlp": SignedPermutation.random(80)})
    with pytest.raises(GaugeError, match=r"'mlp:layers\.7\.mlp'"):
        Checkpoint.open(source).require_movable(gauge)


def test_heads_and_values_must_move_the_same_heads():
    groups = {kind: spaces_of("llama")[f"{kind}:layers.0.self_attn"].group for kind in (
        "heads", "values"
    )}  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    there, away = torch.tensor([0, 1]), torch.tensor([1, 0])
    elements = {
        "heads:layers.0.self_attn": groups["heads"].random(generator, block_perm=there),
        "values:layers.0.self_attn": groups["values"].random(generator, block_perm=away),
    }
    refused("llama", elements, r"heads or experts of layers\.0\.self_attn in two ways")


@pytest.mark.parametrize("kind", ["heads", "values", "keys"])
def test_heads_may_not_move_in_one_of_their_spaces_alone(kind):
    """Queries, keys, values and outputs of a head go together, or the head is torn apart."""
    space = f"{kind}:layers.0.self_attn"
    group = spaces_of("llama")[space].group
    moving = group.random(torch.Generator().manual_seed(0), block_perm=torch.tensor([1, 0]))
    refused("llama", {space: moving}, "heads")


def test_units_may_not_leave_their_expert_unless_experts_move():
    space = "mlp:layers.0.mlp.experts"
    group = spaces_of("mixtral")[space].group
    away = torch.arange(group.blocks).roll(1)
    moving = group.random(torch.Generator().manual_seed(0), block_perm=away)
    refused("mixtral", {space: moving}, "experts")


def flip(size, *coordinates):
    sign = torch.ones(size, dtype=torch.int8)
    sign[list(coordinates)] = -1
    return SignedPermutation(torch.arange(size), sign)


def test_a_rotary_plane_changes_sign_as_a_whole():
    space = "keys:layers.0.self_attn"
    size = spaces_of("llama")[space].group.size
    chart_of("llama").require_native(Gauge({space: flip(size, 0, 8)}))
    message = rf"flips signs that may not be flipped \(space '{space}'\)"
    refused("llama", {space: flip(size, 0)}, message)
    refused("llama", {space: flip(size, 0, 1)}, message)


def test_rotated_coordinates_may_not_change_places():
    space = "keys:layers.0.self_attn"
    perm = torch.arange(spaces_of("llama")[space].group.size)
    perm[:2] = torch.tensor([1, 0])
    element = SignedPermutation(perm, torch.ones(len(perm), dtype=torch.int8))
    refused("llama", {space: element}, "rotary embedding")


def test_units_without_a_gate_keep_their_signs():
    refused("gpt2", {"mlp:h.0.mlp": flip(192, 0)}, "flips signs that may not be flipped")
    chart_of("llama").require_native(Gauge({"mlp:layers.0.mlp": flip(80, 0)}))


def test_coordinates_may_not_leave_their_head():
    space = "values:layers.0.self_attn"
    element = SignedPermutation.random(spaces_of("llama")[space].group.size, seed=1)
    refused("llama", {space: element}, "moves coordinates between heads")
