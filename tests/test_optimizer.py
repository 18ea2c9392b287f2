"""Optimizer state: training goes on in the new coordinates as it would have in the old ones."""

import copy
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

from signed_align import scramble
from signed_align.adapters.optimizer import parameter_labels
from signed_align.chart import StoredTensor
from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, GaugeError
from signed_align.labels import Axis, Fused, Section, reduced, transport_all
from tests import tiny
from tests.porting import port

BEFORE, AFTER = 4, 3
MODELS = {
    "llama": {},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4, "experts_implementation": "eager"},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::signed_align.errors.SignedAlignWarning"),
    pytest.mark.usefixtures("one_thread"),
]


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of gradient and momentum."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * (0.9 * momentum + 0.1 * p.grad).sign())
                momentum.lerp_(p.grad, 0.01)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD whose trained weight is an average of ``z``, which the steps are taken in."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                z.sub_(group["lr"] * p.grad)
                p.lerp_(z, 1 / (group["k"] + 1))


def hf_adafactor(parameters, beta1=None):
    return TransformersAdafactor(
        parameters, lr=1e-2, scale_parameter=False, relative_step=False, beta1=beta1
    )


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "transformers Adafactor": hf_adafactor,
    "transformers Adafactor with momentum": partial(hf_adafactor, beta1=0.9),
    "Muon": partial(torch.optim.Muon, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2, t0=1),
    "Lion": partial(Lion, lr=1e-3),
    "schedule-free SGD": partial(ScheduleFreeSGD, lr=0.1),
}
EVEN_ONLY = {"Adagrad", "Adadelta", "Adafactor", "transformers Adafactor"}
"""These keep no entry that a sign flips."""

AVERAGES = {"ASGD"}
"""Their state is an average that the run itself does not read: see its own test."""

CASES = [("llama", name) for name in OPTIMIZERS if name not in AVERAGES] + [
    (model, name)
    for model in ("gpt2", "mixtral")
    for name in ("AdamW", "Adafactor", "transformers Adafactor")
]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """By model type: the model, in double precision, and a gauge of all its spaces."""
    made = {}

    def get(model_type):
        if model_type not in made:
            root = tmp_path_factory.mktemp(model_type)
            model = tiny.build(model_type, **MODELS[model_type])
            source = tiny.save(model, root / "source")
            gauge = scramble(source, root / "target", seed=3, spaces=["all"])
            made[model_type] = (model.double(), gauge, Checkpoint.open(source).chart)
        model, gauge, chart = made[model_type]
        return copy.deepcopy(model), gauge, chart

    return get


def trainable(model, name):
    """The parameters for an optimizer; Muon takes matrices alone."""
    if name == "Muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def steps(model, optimizer, numbers):
    """Train; returns the losses."""
    losses = []
    for number in numbers:
        batch = tiny.tokens(16, seed=number)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(weights, template, make, state, name=""):
    """Continue a run from weights and a file of optimizer state; losses and weights."""
    model = copy.deepcopy(template)
    model.load_state_dict(weights)
    optimizer = make(trainable(model, name))
    if state is not None:
        optimizer.load_state_dict(torch.load(state, weights_only=True))
    losses = steps(model, optimizer, range(BEFORE, BEFORE + AFTER))
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def departure(home, away):
    """The largest relative difference of two runs' losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(home, away, strict=True))


def distance(home, away):
    """The largest difference of two state dicts' values, relative to the largest value."""
    return max(
        tiny.relative_change(tensor, away[name]) for name, tensor in home.items() if tensor.ndim
    )


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_training_goes_on_as_it_would_have(tmp_path, twins, model_type, name):
    model, gauge, chart = twins(model_type)
    make = OPTIMIZERS[name]
    optimizer = make(trainable(model, name))
    steps(model, optimizer, range(BEFORE))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    weights = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    report = port(tmp_path / "optimizer.pt", gauge, tmp_path / "moved" / "optimizer.pt")
    assert report["kind"] == "optimizer state"
    assert not report["source_verified"]

    losses, final = resumed(weights, model, make, tmp_path / "optimizer.pt", name)
    moved = transport_all(weights, chart.axes, gauge)
    away = partial(resumed, moved, model, make, name=name)
    # Muon orthogonalises in bfloat16, whose rounding depends on the order of coordinates.
    loss_tolerance, weight_tolerance = (1e-4, 5e-3) if name == "Muon" else (1e-6, 1e-3)
    arrived, there = away(state=tmp_path / "moved" / "optimizer.pt")
    assert departure(losses, arrived) <= loss_tolerance
    assert distance(transport_all(final, chart.axes, gauge), there) <= weight_tolerance

    unmoved, _ = away(state=tmp_path / "optimizer.pt")
    assert departure(losses, unmoved) > 3e-4
    if name not in EVEN_ONLY:
        unsigned = tmp_path / "unsigned.pt"
        port(tmp_path / "optimizer.pt", gauge.without_signs(), unsigned, verify=False)
        permuted, _ = away(state=unsigned)
        assert departure(losses, permuted) > 3e-4

    back = tmp_path / "back" / "optimizer.pt"
    port(tmp_path / "moved" / "optimizer.pt", gauge, back, inverse=True)
    assert back.read_bytes() == (tmp_path / "optimizer.pt").read_bytes()


def test_the_average_that_asgd_keeps_moves_as_the_weight(tmp_path, twins):
    model, gauge, chart = twins("llama")
    optimizer = OPTIMIZERS["ASGD"](model.parameters())
    steps(model, optimizer, range(BEFORE))
    torch.save(optimizer.state_dict(), tmp_path / "asgd.pt")
    port(tmp_path / "asgd.pt", gauge, tmp_path / "moved.pt")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        average = optimizer.state[parameter]["ax"]
        state = torch.load(tmp_path / "moved.pt", weights_only=True)["state"][number]
        expected = transport_all({name: average}, chart.axes, gauge)[name]
        assert torch.equal(state["ax"], expected)
        assert state["eta"] == optimizer.state[parameter]["eta"]


# ---- which parameter is which ----------------------------------------------------------------


def trainer_groups(model):
    decayed = {n for n, p in model.named_parameters() if p.ndim > 1}
    return [
        {"params": [p for n, p in model.named_parameters() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n not in decayed],
         "weight_decay": 0.0},
    ]  # fmt: skip


def reversed_names(model):
    return list(model.named_parameters())[::-1]


def frozen_embeddings(model):
    model.get_input_embeddings().requires_grad_(False)
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: list(model.parameters()),
        lambda model: list(model.named_parameters()),
        reversed_names,
        trainer_groups,
        frozen_embeddings,
    ],
    ids=["all", "named", "named backwards", "two groups", "frozen"],
)
def test_parameters_are_found_in_every_usual_order(tmp_path, twins, groups):
    model, gauge, chart = twins("llama")
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    steps(model, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    port(tmp_path / "state.pt", gauge, tmp_path / "moved.pt")
    moved = torch.load(tmp_path / "moved.pt", weights_only=True)["state"]
    given = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(given) > 15
    for number, parameter in enumerate(given):
        name, state = names[parameter], optimizer.state[parameter]
        expected = transport_all({name: state["exp_avg"]}, chart.axes, gauge)[name]
        assert torch.equal(moved[number]["exp_avg"], expected)
        squares = transport_all({name: state["exp_avg_sq"]}, chart.axes, gauge.without_signs())
        assert torch.equal(moved[number]["exp_avg_sq"], squares[name])


def test_a_parameter_without_gradient_needs_no_state(tmp_path, twins):
    model, gauge, _ = twins("mixtral")
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, range(1))
    state = optimizer.state_dict()
    del state["state"][3]
    torch.save(state, tmp_path / "state.pt")
    port(tmp_path / "state.pt", gauge, tmp_path / "moved.pt")
    moved = torch.load(tmp_path / "moved.pt", weights_only=True)
    assert moved["param_groups"] == state["param_groups"]
    assert set(moved["state"]) == set(state["state"])


def layer_alone(model):
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)


def backwards(model, state):
    """As if the parameters had been given in another order, of other shapes."""
    last = len(state["state"]) - 1
    state["state"] = {last - number: entries for number, entries in state["state"].items()}


def set_entry(entry, value):
    def change(_, state):
        state["state"][0][entry] = value

    return change


def keyed_by_name(_, state):
    state["state"] = {f"layer.{number}": entries for number, entries in state["state"].items()}


def grokadamw(_, state):
    state["param_groups"][0]["state"] = {}


def squares_with_signs(_, state):
    state["state"][0]["exp_avg_sq"].neg_()


def low_rank(_, state):
    state["state"][0]["exp_avg"] = torch.zeros(4, tiny.WIDTH)


def stray_names(_, state):
    group = state["param_groups"][0]
    group["param_names"] = [f"other.{number}" for number in group["params"]]


def swapped_names(model, state):
    names = [name for name, _ in model.named_parameters()]
    state["param_groups"][0]["param_names"] = [*names[1:], names[0]]


def quantised(_, state):
    codes = torch.zeros(120, tiny.WIDTH, dtype=torch.uint8)
    state["state"][0] = {"step": 1, "exp_avg": codes, "exp_avg_sq": codes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quantised, "quantised"),
        (set_entry("state1", torch.zeros(4)), "bitsandbytes"),
        (set_entry("__bnb_optimizer_quant_state__", {}), "bitsandbytes"),
        (set_entry("old_dirs", [torch.zeros(4)]), "LBFGS"),
        (set_entry("exp_avg_diff", torch.zeros(120, tiny.WIDTH)), "'exp_avg_diff'.*not understood"),
        (set_entry("step", torch.zeros(3)), "not a single number"),
        (set_entry("exp_avg", "text"), "not a tensor"),
        (squares_with_signs, "negative"),
        (low_rank, "number and shapes"),
        (backwards, "number and shapes.*named_parameters"),
        (keyed_by_name, "FSDP"),
        (grokadamw, "more than a setting"),
        (stray_names, "names a parameter 'other.0'"),
        (swapped_names, "shape"),
        (lambda _, state: state["param_groups"][0]["params"].reverse(), "not numbered"),
        (lambda _, state: state["param_groups"].append({"params": []}), "number and shapes"),
        (lambda _, state: state.update(extra=1), "found state, param_groups, extra"),
    ],
)
def test_state_that_is_not_understood_is_refused(tmp_path, twins, change, message):
    model, gauge, _ = twins("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, range(1))
    state = optimizer.state_dict()
    change(model, state)
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(ArtifactError, match=message):
        port(tmp_path / "optimizer.pt", gauge, tmp_path / "moved.pt")
    assert not (tmp_path / "moved.pt").exists()


def test_parameters_that_shapes_do_not_tell_apart_are_refused_unless_named(tmp_path, twins):
    model, gauge, _ = twins("llama")
    layer_alone(model)
    for named, place in ((False, "bare.pt"), (True, "named.pt")):
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained if named else [p for _, p in trained])
        steps(model, optimizer, range(1))
        torch.save(optimizer.state_dict(), tmp_path / place)
    with pytest.raises(ArtifactError, match=r"layers\.\d.*could be|could be.*layers"):
        port(tmp_path / "bare.pt", gauge, tmp_path / "moved.pt")
    port(tmp_path / "named.pt", gauge, tmp_path / "moved.pt")


def test_a_parameter_that_checkpoints_store_otherwise_is_refused(twins):
    _, _, chart = twins("llama")
    stored = {"layers.*.mlp.up_proj.weight": StoredTensor((None, None))}
    label = parameter_labels(replace(chart, stored=stored))
    assert label("model.layers.0.mlp.down_proj.weight", (tiny.WIDTH, 80))
    with pytest.raises(ArtifactError, match="another layout"):
        label("model.layers.0.mlp.up_proj.weight", (80, tiny.WIDTH))


def test_the_state_of_lbfgs_is_refused(tmp_path, twins):
    _, gauge, _ = twins("llama")
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.LBFGS([weight])
    optimizer.step(lambda: (weight**2).sum())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(ArtifactError, match="LBFGS"):
        port(tmp_path / "optimizer.pt", gauge, tmp_path / "moved.pt")


class Hostile:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("name", ["optimizer.pt", "state.pt"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, twins, name):
    _, gauge, _ = twins("llama")
    torch.save({"state": {0: {"exp_avg": Hostile(tmp_path / "ran")}}, "param_groups": []},
               tmp_path / name)  # fmt: skip
    with pytest.raises(ArtifactError):
        port(tmp_path / name, gauge, tmp_path / "moved.pt")
    assert not (tmp_path / "ran").exists()


def test_a_state_that_names_no_model_is_refused(tmp_path, twins):
    model, gauge, _ = twins("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.save(optimizer.state_dict(), tmp_path / "sgd.pt")
    with pytest.raises(ArtifactError, match="does not say which model"):
        port(tmp_path / "sgd.pt", gauge, tmp_path / "moved.pt", made_on=None)
    port(tmp_path / "sgd.pt", gauge, tmp_path / "moved.pt", made_on=gauge.source.name)


# ---- labels of sums ----------------------------------------------------------------------------


def test_a_sum_over_one_axis_keeps_the_labels_of_the_others():
    unit, row = Axis("mlp"), Axis("residual")
    assert reduced((unit, row), 0) == (None, row.unsigned)
    assert reduced((unit, row), 1) == (unit.unsigned, None)
    assert reduced((unit, row), 1, keep=False) == (unit.unsigned,)
    expert = Axis("experts", signed=False)
    units = Fused((4,), (Section((8,), ((expert, (0,)), (Axis("mlp"), (0, 1)))),), span=2)
    # a sum over the units of each expert is indexed by the expert alone
    assert reduced((units, units, row), 1) == (expert, None, row.unsigned)
    assert reduced((units, row, units), 2, keep=False) == (expert, row.unsigned)
    assert reduced((units, row, units), 1) == (units.unsigned, None, units.unsigned)
    with pytest.raises(GaugeError, match="all experts"):
        reduced((units, units, row), 0)
