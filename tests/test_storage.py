"""Stored tensors are recognised by what they hold: renamed, transposed, split or joined parts."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from signed_align.chart import RESIDUAL, VOCABULARY, Chart, Layout, Part, StoredTensor
from signed_align.miniature import miniature_model
from signed_align.storage import numbers_in, stored_tensors

torch.set_num_threads(1)

WIDTH, EXPERTS, UNITS, LAYERS = 6, 3, 5, 2
SITE = "layers.*.experts"
EVEN = frozenset({"mlp"})

UNIT = Layout("layers.*.mlp", (Part(("unit",)),))
GATE = Layout("layers.*.mlp", (Part(("unit",), EVEN),))
GATE_UP = Layout("layers.*.mlp", (Part(("unit",), EVEN), Part(("unit",))))
IN_TURN = Layout("layers.*.mlp", (Part((), EVEN), Part(())), outer=("unit",))
QUERIES = Layout("layers.*.attn", (Part(("kv", "query", "key")),))
KEYS = Layout("layers.*.attn", (Part(("kv", "key")),))
EXPERT_UNIT = Layout(SITE, (Part(("unit",)),), outer=("expert",), span=2)
EXPERT_GATE_UP = Layout(SITE, (Part(("unit",), EVEN), Part(("unit",))), outer=("expert",), span=2)
ONE_EXPERTS_UNIT = replace(EXPERT_UNIT, span=1, only=True)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(name, *shape, seed=0):
    """A parameter of each layer."""
    return {
        f"model.layers.{layer}.{name}": drawn(*shape, seed=100 * seed + layer)
        for layer in range(LAYERS)
    }


def look_up(saved, state, labels):
    """What is found, the labels given by pattern."""
    bare = {name: name.removeprefix("model.") for name in {*saved, *state}}
    by_name = {}
    for name in state:
        pattern = ".".join("*" if part.isdigit() else part for part in bare[name].split("."))
        by_name[bare[name]] = labels[pattern]
    return stored_tensors(saved, state, by_name, bare)


def each(state, change, name=lambda name: name):
    return {name(key): change(tensor) for key, tensor in state.items()}


# ---- one tensor, stored otherwise ------------------------------------------------------------


def test_what_is_stored_as_it_is_needs_no_label():
    state = layers("mlp.up.weight", 10, WIDTH)
    assert look_up(dict(state), state, {"layers.*.mlp.up.weight": (UNIT, RESIDUAL)}) == ({}, [])


def test_another_name():
    state = {"model.embed.weight": drawn(20, WIDTH)}
    saved = {"wte": state["model.embed.weight"]}
    found = look_up(saved, state, {"embed.weight": (VOCABULARY, RESIDUAL)})
    assert found == ({"wte": StoredTensor((VOCABULARY, RESIDUAL))}, [])


@pytest.mark.parametrize("shape", [(10, WIDTH), (WIDTH, WIDTH)])
def test_transposed(shape):
    state = layers("mlp.up.weight", *shape)
    labels = {"layers.*.mlp.up.weight": (UNIT, RESIDUAL)}
    for rename in (lambda name: name, lambda name: name.replace("up", "w1")):
        saved = each(state, lambda tensor: tensor.T.contiguous(), rename)
        found, unread = look_up(saved, state, labels)
        assert list(found.values()) == [StoredTensor((RESIDUAL, UNIT))]
        assert unread == []


def test_the_halves_of_gate_and_up():
    state = layers("mlp.gate_up.weight", 2 * UNITS, WIDTH)
    saved = {}
    for name, tensor in state.items():
        saved[name.replace("gate_up", "gate")], saved[name.replace("gate_up", "up")] = (
            tensor[:UNITS].clone(), tensor[UNITS:].clone()
        )  # fmt: skip
    found = look_up(saved, state, {"layers.*.mlp.gate_up.weight": (GATE_UP, RESIDUAL)})
    assert found == (
        {
            "layers.*.mlp.gate.weight": StoredTensor((GATE, RESIDUAL)),
            "layers.*.mlp.up.weight": StoredTensor((UNIT, RESIDUAL)),
        },
        [],
    )


def test_gate_and_up_that_alternate():
    state = layers("mlp.gate_up.weight", 2 * UNITS, WIDTH)
    saved = {}
    for name, tensor in state.items():
        saved[name.replace("gate_up", "gate")] = tensor[::2].clone()
        saved[name.replace("gate_up", "up")] = tensor[1::2].clone()
    found, unread = look_up(saved, state, {"layers.*.mlp.gate_up.weight": (IN_TURN, RESIDUAL)})
    assert unread == []
    assert found["layers.*.mlp.gate.weight"].axes == (GATE, RESIDUAL)
    assert found["layers.*.mlp.up.weight"].axes == (UNIT, RESIDUAL)


# ---- experts ---------------------------------------------------------------------------------


def by_expert(state, part, old, new):
    """Each expert's tensor under a key of its own."""
    return {
        f"{name.replace(old, '')}{expert}.{new}": part(tensor[expert]).contiguous()
        for name, tensor in state.items()
        for expert in range(EXPERTS)
    }


@pytest.mark.parametrize("turned", [False, True])
def test_experts_by_themselves(turned):
    state = layers("experts.down", EXPERTS, WIDTH, UNITS)
    saved = by_expert(state, lambda one: one.T if turned else one, "down", "w2.weight")
    labels = {"layers.*.experts.down": (EXPERT_UNIT, RESIDUAL, EXPERT_UNIT)}
    axes = (RESIDUAL, ONE_EXPERTS_UNIT)
    expected = StoredTensor(axes[::-1] if turned else axes, SITE)
    assert look_up(saved, state, labels) == ({"layers.*.experts.*.w2.weight": expected}, [])


def test_the_gate_of_each_expert():
    state = layers("experts.gate_up", EXPERTS, 2 * UNITS, WIDTH)
    saved = {
        **by_expert(state, lambda one: one[:UNITS], "gate_up", "w1.weight"),
        **by_expert(state, lambda one: one[UNITS:], "gate_up", "w3.weight"),
    }
    labels = {"layers.*.experts.gate_up": (EXPERT_GATE_UP, EXPERT_GATE_UP, RESIDUAL)}
    found, unread = look_up(saved, state, labels)
    assert unread == []
    for key, even in (("w1", EVEN), ("w3", frozenset())):
        stored = found[f"layers.*.experts.*.{key}.weight"]
        unit = replace(ONE_EXPERTS_UNIT, parts=(Part(("unit",), even),))
        assert stored == StoredTensor((unit, RESIDUAL), SITE)


def test_all_experts_turned():
    state = layers("experts.down", EXPERTS, WIDTH, UNITS)
    saved = each(
        state, lambda tensor: tensor.transpose(1, 2).contiguous(), lambda name: f"{name}.weight"
    )
    labels = {"layers.*.experts.down": (EXPERT_UNIT, RESIDUAL, EXPERT_UNIT)}
    expected = StoredTensor((EXPERT_UNIT, EXPERT_UNIT, RESIDUAL))
    assert look_up(saved, state, labels) == ({"layers.*.experts.down.weight": expected}, [])


def test_experts_that_are_numbered_otherwise_are_not_understood():
    """A gauge that moves experts must find them under the number they have in the model."""
    state = layers("experts.down", EXPERTS, WIDTH, UNITS)
    saved = {
        f"{name.replace('down', '')}{(expert + 1) % EXPERTS}.w2.weight": tensor[expert].clone()
        for name, tensor in state.items()
        for expert in range(EXPERTS)
    }
    labels = {"layers.*.experts.down": (EXPERT_UNIT, RESIDUAL, EXPERT_UNIT)}
    found, unread = look_up(saved, state, labels)
    assert found == {}
    assert sorted(unread) == sorted(name.removeprefix("model.") for name in saved)


# ---- several parameters in one tensor --------------------------------------------------------


def test_queries_and_keys_joined():
    queries = layers("attn.q.weight", 8, WIDTH, seed=1)
    keys = layers("attn.k.weight", 4, WIDTH, seed=2)
    saved = {
        name.replace("q.", "qk."): torch.cat([tensor, keys[name.replace("q.", "k.")]])
        for name, tensor in queries.items()
    }
    labels = {
        "layers.*.attn.q.weight": (QUERIES, RESIDUAL), "layers.*.attn.k.weight": (KEYS, RESIDUAL)
    }  # fmt: skip
    found, unread = look_up(saved, {**queries, **keys}, labels)
    assert unread == []
    joined = replace(QUERIES, parts=(*QUERIES.parts, *KEYS.parts))
    assert found == {"layers.*.attn.qk.weight": StoredTensor((joined, RESIDUAL))}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((QUERIES, RESIDUAL), (UNIT, RESIDUAL)),
        ((QUERIES, RESIDUAL), (None, RESIDUAL)),
        ((QUERIES, RESIDUAL), (KEYS, None)),
        ((QUERIES, RESIDUAL), (IN_TURN, RESIDUAL)),
    ],
)
def test_what_no_single_label_covers_is_not_understood(first, second):
    a = layers("attn.q.weight", 8, WIDTH, seed=1)
    b = layers("attn.k.weight", 4, WIDTH, seed=2)
    saved = {
        name.replace("q.", "qk."): torch.cat([tensor, b[name.replace("q.", "k.")]])
        for name, tensor in a.items()
    }
    labels = {"layers.*.attn.q.weight": first, "layers.*.attn.k.weight": second}
    found, unread = look_up(saved, {**a, **b}, labels)
    assert found == {}
    assert len(unread) == LAYERS


# ---- what is not recognised ------------------------------------------------------------------


def test_other_values_are_not_understood():
    state = layers("mlp.up.weight", 10, WIDTH)
    labels = {"layers.*.mlp.up.weight": (UNIT, RESIDUAL)}
    saved = each(state, lambda tensor: tensor + 1, lambda name: name.replace("up", "w1"))
    found, unread = look_up(saved, state, labels)
    assert found == {}
    assert sorted(unread) == ["layers.0.mlp.w1.weight", "layers.1.mlp.w1.weight"]


def test_equal_beginnings_are_not_enough():
    """Values in the middle of a tensor count too, wherever it differs."""
    state = layers("mlp.up.weight", 10, WIDTH)
    saved = {}
    for name, tensor in state.items():
        saved[name.replace("up", "w1")] = tensor.clone()
        saved[name.replace("up", "w1")][-1, -1] += 1
    found, unread = look_up(saved, state, {"layers.*.mlp.up.weight": (UNIT, RESIDUAL)})
    assert found == {}
    assert len(unread) == LAYERS


def test_layers_that_change_places_are_not_understood():
    state = layers("mlp.up.weight", 10, WIDTH)
    (zero, one) = state.values()
    saved = {"model.layers.0.mlp.w1.weight": one, "model.layers.1.mlp.w1.weight": zero}
    found, unread = look_up(saved, state, {"layers.*.mlp.up.weight": (UNIT, RESIDUAL)})
    assert found == {}
    assert len(unread) == LAYERS


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("layers.3.mlp.experts.12.w1.weight", ["3", "12"]),
        ("h.0", ["0"]),
        ("lm_head.weight", []),
        ("layers.3a.mlp2.w1", []),
    ],
)
def test_numbers_in_names(name, numbers):
    assert numbers_in(name) == numbers


# ---- real classes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("mixtral", {"block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.gate.weight"}),
        ("granitemoe", {"block_sparse_moe.input_linear.weight"}),
        ("qwen3_moe", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.down_proj.weight"}),
        ("deepseek_v3", {"mlp.experts.*.up_proj.weight"}),
    ],
)
def test_keys_of_saved_checkpoints_are_labelled(tmp_path, model_type, keys):
    config = AutoConfig.for_model(model_type)
    model = miniature_model(config)
    model.save_pretrained(tmp_path)
    chart = Chart.of(model.config)
    assert {f"layers.*.{key}" for key in keys} <= set(chart.stored)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in saved.items():
        assert len(chart.axes(name, tensor.shape)) == tensor.ndim
    stored = set(chart.spaces({name: tensor.shape for name, tensor in saved.items()}))
    state = model.state_dict()
    assert stored == set(chart.spaces({name: tensor.shape for name, tensor in state.items()}))
