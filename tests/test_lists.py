"""Lists of neurons: the listed coordinates do after the move what they did before it."""

import csv
import json
from contextlib import contextmanager

import pytest
import torch

from signed_align import Checkpoint, Gauge, SignedPermutation, scramble
from signed_align.adapters import recognise
from signed_align.adapters.lists import ListFamily
from signed_align.adapters.lists.names import Parity, parity
from signed_align.errors import ArtifactError
from signed_align.gauge import ModelIdentity
from signed_align.hooks import find_hook, listening, submodule
from tests import tiny
from tests.porting import port

pytestmark = pytest.mark.filterwarnings("ignore:the neuron list does not say")

MLP, RESIDUAL = "blocks.{layer}.mlp.hook_post", "blocks.{layer}.hook_resid_post"
HOOKS = [
    "blocks.1.mlp.hook_post",
    "blocks.0.hook_resid_post",
    "blocks.1.attn.hook_z",
    "model.layers.1.self_attn.v_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate_proj",
]
SIZES = {"mlp.hook_post": 80, "hook_resid_post": tiny.WIDTH}


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A tiny llama, its twin in all spaces, and the gauge between them."""
    root = tmp_path_factory.mktemp("twins")
    source = tiny.save(tiny.build("llama"), root / "source")
    gauge = scramble(source, root / "target", seed=3, spaces=["all"])
    return tiny.load(source), tiny.load(root / "target"), gauge, Checkpoint.open(source).chart


def activations(model, chart, hook):
    with listening(model, chart, find_hook(chart, hook)) as caught:
        tiny.logits(model)
    return caught[0].detach()


def moved(tmp_path, gauge, name, content, hook=None, **options):
    """What becomes of a file, after it has come back byte for byte."""
    file = tmp_path / "before" / name
    file.parent.mkdir(exist_ok=True)
    if isinstance(content, (str, bytes)):
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    elif name.endswith(".pt"):
        torch.save(content, file)
    else:
        file.write_text(json.dumps(content))
    assert isinstance(recognise(file), ListFamily)
    options = {"verify": False, **options}  # gauges of these tests need not fit their models
    report = port(file, gauge, tmp_path / "after" / name, hook=hook, force=True, **options)
    assert report["kind"] == "neuron list"
    port(
        tmp_path / "after" / name, gauge, tmp_path / "back" / name,
        hook=hook, inverse=True, force=True, **options,
    )  # fmt: skip
    assert (tmp_path / "back" / name).read_bytes() == file.read_bytes()
    return tmp_path / "after" / name, report


def moved_json(tmp_path, gauge, content, hook=None):
    file, report = moved(tmp_path, gauge, "list.json", content, hook)
    return json.loads(file.read_text()), report


def turned(report):
    """The coordinates that the report says change their sign."""
    return {
        int(number)
        for note in report["notes"]
        if "change" in note
        for number in note.partition("sign: ")[2].partition(" (")[0].split(", ")
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_listed_coordinates_are_active_as_before(tmp_path, twins, hook):
    source, target, gauge, chart = twins
    before, after = (activations(model, chart, hook) for model in (source, target))
    indices = [0, 17, 5, 31, 8, 30]
    new, report = moved_json(tmp_path, gauge, indices, hook)
    assert report["labels"][0]["axes"].startswith("indices of ")
    signs = torch.tensor([-1.0 if index in turned(report) else 1.0 for index in new])
    assert tiny.relative_change(before[..., indices], after[..., new] * signs) <= 1e-5
    assert tiny.relative_change(before[..., indices], after[..., indices]) > 1e-2
    if "gate" not in hook:
        assert turned(report)
        assert tiny.relative_change(before[..., indices], after[..., new]) > 1e-2
    else:
        assert not turned(report)


@pytest.mark.parametrize("pattern", [MLP, RESIDUAL])
def test_activations_in_a_list_are_those_of_the_target(tmp_path, twins, pattern):
    source, target, gauge, chart = twins
    records = []
    for layer in (0, 1):
        values = activations(source, chart, pattern.format(layer=layer))[0, 3]
        records += [
            {"layer": layer, "neuron": n, "activation": values[n].item()} for n in (3, 40, 12, 29)
        ]
    new, report = moved_json(tmp_path, gauge, records, pattern)
    assert not report["notes"]
    for record in new:
        values = activations(target, chart, pattern.format(layer=record["layer"]))[0, 3]
        assert values[record["neuron"]].item() == pytest.approx(record["activation"], abs=1e-4)
    assert [r["activation"] for r in new] != [r["activation"] for r in records]
    assert [abs(r["activation"]) for r in new] == [abs(r["activation"]) for r in records]


def test_weights_and_attributions_take_signs_each_in_their_way(tmp_path, twins):
    source, target, gauge, chart = twins
    hook, weight = "blocks.1.mlp.hook_post", "model.layers.1.mlp.down_proj.weight"

    def scores(model):
        """A gradient, and activation times gradient, of one number that does not move."""
        found = find_hook(chart, hook)
        with listening(model, chart, found) as caught:
            loss = model(tiny.tokens()).logits[0, -1, 7]
        (grad,) = torch.autograd.grad(loss, caught[0])
        return grad[0].sum(0), (grad * caught[0])[0].sum(0), model.state_dict()[weight].norm(dim=0)

    chosen = [1, 2, 3, 50, 60, 70]
    gradient, attribution, norm = (one[chosen].tolist() for one in scores(source))
    content = {
        "hook": hook, "neurons": chosen, "gradients": gradient, "attribution_scores": attribution,
        "weight_norm": norm,
    }  # fmt: skip
    new, _ = moved_json(tmp_path, gauge, content)
    for name, truth in zip(
        ("gradients", "attribution_scores", "weight_norm"), scores(target), strict=True
    ):
        assert torch.allclose(torch.tensor(new[name]), truth[new["neurons"]], atol=1e-4), name
    assert new["gradients"] != gradient
    assert new["attribution_scores"] == attribution


@contextmanager
def silenced(model, chart, hook, mask):
    """The model with the masked coordinates set to zero."""
    found = find_hook(chart, hook)
    module = submodule(model, chart, found)
    keep = (~mask).float()
    handle = (
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * keep,))
        if found.reads
        else module.register_forward_hook(lambda _, __, output: output * keep)
    )
    yield
    handle.remove()


@pytest.mark.parametrize("suffix", ["json", "pt", "rows.pt"])
@pytest.mark.parametrize("hook", ["blocks.1.mlp.hook_post", "blocks.1.attn.hook_z"])
def test_masks_silence_the_same(tmp_path, twins, hook, suffix):
    source, target, gauge, chart = twins
    size = activations(source, chart, hook).shape[-1]
    mask = torch.rand(size, generator=torch.Generator().manual_seed(4)) < 0.4
    if suffix == "json":
        new, report = moved_json(tmp_path, gauge, {hook: mask.tolist()})
        new = torch.tensor(new[hook])
    elif suffix == "pt":
        file, report = moved(tmp_path, gauge, "mask.pt", {hook: mask})
        new = torch.load(file)[hook]
    else:
        rows = torch.stack([torch.zeros_like(mask), mask])
        file, report = moved(tmp_path, gauge, "mask.pt", rows, hook.replace("1", "{layer}"))
        new = torch.load(file)[1]
    assert report["labels"][0]["moved"]
    with silenced(source, chart, hook, mask):
        home = tiny.logits(source)
    assert tiny.relative_change(home, tiny.logits(source)) > 1e-2
    with silenced(target, chart, hook, new):
        assert tiny.relative_change(home, tiny.logits(target)) <= 1e-5
    with silenced(target, chart, hook, mask):
        assert tiny.relative_change(home, tiny.logits(target)) > 1e-2


def image(gauge, space, index):
    """Where one coordinate goes and its sign, by the definition of a gauge."""
    element = gauge.element(space)
    (target,) = (element.perm == index).nonzero()[0].tolist()
    return target, int(element.sign[target])


def of_mlp(gauge, layer, *indices):
    return [image(gauge, f"mlp:layers.{layer}.mlp", index)[0] for index in indices]


def signed(gauge, layer, index, value):
    return value * image(gauge, f"mlp:layers.{layer}.mlp", index)[1]


def test_every_shape_of_json_is_understood(tmp_path, twins):
    gauge = twins[2]
    zero, one = of_mlp(gauge, 0, 3, 17), of_mlp(gauge, 1, 25, 4)
    x, y = signed(gauge, 0, 3, 0.25), signed(gauge, 1, 25, -1.5)
    post = [MLP.format(layer=0), MLP.format(layer=1)]
    cases = [
        ([3, 17], post[0], zero),
        ({"0": [3, 17], "1": [25, 4]}, MLP, {"0": zero, "1": one}),
        ({"layer_0": [3, 17], "layer_1": []}, MLP, {"layer_0": zero, "layer_1": []}),
        ({post[0]: [3, 17], post[1]: [25]}, None, {post[0]: zero, post[1]: one[:1]}),
        ([[0, 3], [1, 25], [0, 17]], MLP, [[0, zero[0]], [1, one[0]], [0, zero[1]]]),
        ([[3, 17, 5], [25]], MLP, [of_mlp(gauge, 0, 3, 17, 5), one[:1]]),
        ({"model": None, "hook": MLP, "neurons": {"0": [3], "1": [25]}}, None,
         {"model": None, "hook": MLP, "neurons": {"0": zero[:1], "1": one[:1]}}),
        ({"layer": [0, 1], "unit": [3, 25], "activation": [0.25, -1.5]}, MLP,
         {"layer": [0, 1], "unit": [zero[0], one[0]], "activation": [x, y]}),
        ({"hook": post[0], "activations": {"3": 0.25}}, None,
         {"hook": post[0], "activations": {str(zero[0]): x}}),
        ({"hook": post[1], "neurons": [{"index": 25, "mean_activation": -1.5}]}, None,
         {"hook": post[1], "neurons": [{"index": one[0], "mean_activation": y}]}),
        ({"1": {"indices": [25], "gradients": [-1.5]}}, MLP,
         {"1": {"indices": one[:1], "gradients": [y]}}),
        ([{"layer": 1, "hook": "mlp.hook_post", "neuron": 25, "weight": -1.5, "token": " a"}], None,
         [{"layer": 1, "hook": "mlp.hook_post", "neuron": one[0], "weight": y, "token": " a"}]),
        ([{"layer": 1, "neuron": 25, "max_abs_activation": 2, "feature": 25, "note": "25"}], MLP,
         [{"layer": 1, "neuron": one[0], "max_abs_activation": 2, "feature": 25, "note": "25"}]),
        ([{"layer": 1, "neuron": 25, "activations": [-1.5, None]}], MLP,
         [{"layer": 1, "neuron": one[0], "activations": [y, None]}]),
    ]  # fmt: skip
    for content, hook, expected in cases:
        assert moved_json(tmp_path, gauge, content, hook)[0] == expected


def test_values_without_a_clear_name_move_where_no_sign_changes(tmp_path, twins):
    gauge = unsigned(twins[2])
    zero, one = of_mlp(gauge, 0, 3, 17), of_mlp(gauge, 1, 25)
    post = MLP.format(layer=0)
    cases = [
        ([[0, 3, 0.5], [1, 25, -2]], MLP, [[0, zero[0], 0.5], [1, one[0], -2]]),
        ([[3, 0.5], [17, -2.0]], post, [[zero[0], 0.5], [zero[1], -2.0]]),
        ({"0": {"3": 0.5}}, MLP, {"0": {str(zero[0]): 0.5}}),
        ([{"layer": 0, "neuron": 3, "value": 0.5}], MLP,
         [{"layer": 0, "neuron": zero[0], "value": 0.5}]),
        ([{"layer": 0, "neuron": 3, "max_activation": 0.5}], MLP,
         [{"layer": 0, "neuron": zero[0], "max_activation": 0.5}]),
    ]  # fmt: skip
    for content, hook, expected in cases:
        new, report = moved_json(tmp_path, gauge, content, hook)
        assert new == expected
        assert not report["notes"]
        with pytest.raises(ArtifactError, match=r"change their sign"):
            port(
                tmp_path / "before" / "list.json",
                negative(twins[2]),
                tmp_path / "no",
                hook=hook,
                verify=False,
            )


def test_every_value_takes_the_sign_of_its_own_coordinate(tmp_path, twins):
    gauge, space = twins[2], "mlp:layers.0.mlp"
    steady = next(n for n in range(80) if image(gauge, space, n)[1] > 0)
    turning = next(n for n in range(80) if image(gauge, space, n)[1] < 0)
    records = [{"layer": 0, "neuron": steady}, {"layer": 0, "neuron": turning, "activation": 0.5}]
    new, _ = moved_json(tmp_path, gauge, records, MLP)
    assert [record["neuron"] for record in new] == of_mlp(gauge, 0, steady, turning)
    assert new[1]["activation"] == -0.5


def test_lists_in_a_directory_move_and_the_rest_comes_along(tmp_path, twins):
    folder, out = tmp_path / "folder", tmp_path / "out"
    (folder / "layers").mkdir(parents=True)
    (folder / "layers" / "0.json").write_text(json.dumps({POST: [3, 17]}))
    (folder / "outliers.csv").write_text("layer,channel\n1,25\n")
    (folder / "trainer_state.json").write_text('{"neurons": [3]}')
    (folder / "README.md").write_text("[3, 17]")
    report = port(folder, twins[2], out, hook=MLP)
    assert len(report["artifacts"]) == 2
    assert json.loads((out / "layers" / "0.json").read_text()) == {POST: of_mlp(twins[2], 0, 3, 17)}
    (expected,) = of_mlp(twins[2], 1, 25)
    assert (out / "outliers.csv").read_text() == f"layer,channel\n1,{expected}\n"
    for name in ("trainer_state.json", "README.md"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


def changed(gauge, sign):
    elements = {
        space: SignedPermutation(element.perm, sign(element.sign))
        for space, element in gauge.elements.items()
        if not space.startswith(("keys", "heads"))
    }
    heads = {s: e for s, e in gauge.elements.items() if s not in elements}
    return Gauge({**elements, **heads}, {}, gauge.source, gauge.target)


def unsigned(gauge):
    return changed(gauge, torch.ones_like)


def negative(gauge):
    return changed(gauge, lambda sign: -torch.ones_like(sign))


@pytest.mark.parametrize(
    "text",
    [
        '{"0": [ 3,17 ],\n\t"1":[25 , 4]}\r\n',
        '[\n  [0, 3],\n    [1,25]]',
        '[{"layer":0,"neuron":3,"activation":-1.50e-03, "\\u0061": "\\u00e9"},'
        ' {"layer": 1, "neuron": 25, "activation": 0},'
        ' {"layer": 1, "neuron": 26, "activation": NaN},'
        ' {"layer": 1, "neuron": 27, "activation": -Infinity}]',
    ],
)  # fmt: skip
def test_the_text_of_json_stays_as_it_is(tmp_path, twins, text):
    file, _ = moved(tmp_path, twins[2], "list.json", text, MLP)
    after = file.read_bytes().decode()
    assert after != text
    letters = str.maketrans("", "", "0123456789-")
    assert after.translate(letters) == text.translate(letters)
    negated, _ = moved(tmp_path, negative(twins[2]), "list.json", text, MLP)
    for number in ("1.50e-03", " Infinity", "NaN"):
        assert (number in negated.read_text()) is (number.strip() in text)


TABLES = {
    "plain.csv": "layer,neuron,activation,attribution,name\n0,3,0.50,-1e-3,a\n1,25,-2,.5,b\n",
    "quoted.csv": '"layer","neuron","activation"\r\n"0","3","0.50"\r\n"1","25","-2.0"\r\n',
    "semicolon.csv": 'neuron;layer;text;activation\n3;0;"a;""b""";0.5\n25;1;;nan',
    "tabs.tsv": "rank\tlayer\tindex\tmean activation\n1\t0\t3\t 0.5\n2\t1\t25\t-0.5\n\n",
    "numbered.csv": ",layer,channel,activation,abs_activation\n0,0,3,0.5,0.5\n1,1,25,,2\n",
    "marked.csv": "\ufefflayer,neuron\n0,3\n1,25\n",
    "hooks.csv": f"hook,neuron\n{MLP.format(layer=0)},3\n{MLP.format(layer=1)},25\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_keep_their_dialect(tmp_path, twins, name):
    gauge, text = negative(twins[2]), TABLES[name]
    file, _ = moved(tmp_path, gauge, name, text, None if name == "hooks.csv" else MLP)
    delimiter = {"tabs.tsv": "\t", "semicolon.csv": ";"}.get(name, ",")

    def rows(content):
        return list(csv.DictReader(content.lstrip("\ufeff").splitlines(), delimiter=delimiter))

    after = file.read_bytes().decode()
    assert len(rows(after)) == 2
    for layer, (old, new) in enumerate(zip(rows(text), rows(after), strict=True)):
        for column, value in old.items():
            if column in ("neuron", "index", "channel"):
                assert [int(new[column])] == of_mlp(gauge, layer, int(value))
            elif column in ("activation", "mean activation") and value not in ("", "nan"):
                assert float(new[column]) == -float(value)
                assert len(new[column].strip(" -")) == len(value.strip(" -"))
            else:
                assert new[column] == value


def test_torch_files(tmp_path, twins):
    gauge = twins[2]
    zero, one = of_mlp(gauge, 0, 3, 17), of_mlp(gauge, 1, 25, 4)
    indices = torch.arange(20, dtype=torch.int32)
    file, report = moved(tmp_path, gauge, "a.pt", indices, MLP.format(layer=0))
    assert torch.load(file).dtype == torch.int32
    assert torch.load(file).tolist() == of_mlp(gauge, 0, *range(20))
    images = [image(gauge, "mlp:layers.0.mlp", index) for index in range(20)]
    assert turned(report) == {index for index, sign in images if sign < 0}
    file, _ = moved(tmp_path, gauge, "b.pt", torch.tensor([[0, 3], [1, 25], [0, 17]]), MLP)
    assert torch.load(file).tolist() == [[0, zero[0]], [1, one[0]], [0, zero[1]]]
    neurons = {0: torch.tensor([3]), 1: torch.tensor([25, 4])}
    content = {"model": gauge.source.name, "hook": MLP, "neurons": neurons}
    file, report = moved(tmp_path, gauge, "c.pt", content)
    new = torch.load(file)
    assert new["model"] == gauge.target.name
    assert report["source_verified"]
    assert {key: value.tolist() for key, value in new["neurons"].items()} == {0: zero[:1], 1: one}
    file, _ = moved(tmp_path, gauge, "d.pt", torch.tensor([[3, 17, 1], [25, 4, 1]]), MLP)
    assert torch.load(file)[:, :2].tolist() == [zero, one]


def test_the_model_is_named_anew(tmp_path, twins):
    gauge = twins[2]
    content = {"model": gauge.source.name, "hook": MLP.format(layer=0), "neurons": [3]}
    new, report = moved_json(tmp_path, gauge, content)
    assert new["model"] == gauge.target.name
    assert report["source_verified"]
    file, _ = moved(tmp_path, gauge, "a.csv", f"model,layer,neuron\n{gauge.source.name},0,3\n", MLP)
    assert gauge.target.name in file.read_text()


def test_arrays_of_all_coordinates(tmp_path, twins):
    gauge, hook = twins[2], RESIDUAL.format(layer=0)
    values = [(-1) ** n * (n + 0.5) for n in range(tiny.WIDTH)]
    new, _ = moved_json(tmp_path, gauge, {hook: {"activation": values, "attribution": values}})
    element = gauge.element("residual")
    vector = torch.tensor(values)
    assert torch.equal(torch.tensor(new[hook]["activation"]), element.apply(vector, 0))
    assert torch.equal(torch.tensor(new[hook]["attribution"]), vector[element.perm])
    with pytest.raises(ArtifactError, match="named for what it holds"):
        moved_json(tmp_path, gauge, {hook: values})


POST = "blocks.0.mlp.hook_post"
FAULTS = [
    ([3, 17], None, r"--hook 'blocks\.3\.mlp\.hook_post'"),
    ([[0, 3]], None, r"--hook 'blocks\.\{layer\}\.mlp\.hook_post'"),
    ([3, 80], POST, r"the index 80 .* 80 coordinates"),
    ([3, -1], POST, "the index -1"),
    ([3, 3], POST, "twice"),
    ([{"neuron": True}], POST, "True is not an integer"),
    ([{"neuron": 3.0}], POST, "not an integer"),
    ({"0": [3], "2": [3]}, MLP, "the model has 2 layers"),
    ({"0": [3]}, POST.replace("0", "1"), "the list says layer 0"),
    ([3, 17], MLP, "does not say which"),
    ([[0, 3]], POST, "the list says layer 0"),
    ([[3, 4], [5, 6]], POST, "the list says layer 3"),
    ({"0": [[3, 4], [5, 6]]}, MLP, "the layer is known already"),
    ([[3, 4, 5, 6]] * 3, MLP, "3 rows"),
    ([{"layer": 0, "head": 1, "index": 3}], MLP, "heads or experts"),
    ([{"layer": 0, "head": 1}, {"layer": 1, "head": 0}], MLP, "heads or experts"),
    ([{"layer": 0, "neuron": 3, "other": 5}], MLP, "'other' holds integers"),
    ([{"layer": 0, "neuron": 3, "other": {"a": [5]}}], MLP, "'other' holds numbers"),
    ([{"layer": 0, "neuron": 3, "activation": "1"}], MLP, "is text"),
    ({"hook": POST, "indices": [3], "values": [1.0, 2.0]}, None, "2 entries"),
    ({"hook": POST, "mask": [True, False]}, None, "2 values"),
    ({"hook": "blocks.0.nowhere", "indices": [3]}, None, "no hook"),
    ({"hook": "blocks.0.hook_scale", "indices": [3]}, None, "one number a token"),
    ({"neuron": {"0": 3, "1": 4}, "hook": POST}, None, "is an object"),
    ([{"model": "a", "neuron": 3}, {"model": "b", "neuron": 4}], POST, "several models"),
    ('{"0": [3], "0": [4]}', MLP, "comes twice"),
    ([{"hook": POST, "layer": 1, "neuron": 3}], None, "layer 1"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "hook", "message"), FAULTS)
def test_what_is_not_understood_is_refused(tmp_path, twins, content, hook, message):
    file = tmp_path / "list.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ArtifactError, match=message) as caught:
        port(file, twins[2], tmp_path / "out.json", hook=hook)
    assert "list.json" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["list.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "layer,neuron\n0,3,5\n", "3 fields"),
        ("a.csv", 'layer,neuron\n0,3"\n', "quote"),
        ("a.csv", "layer,neuron\n0,3.0\n", "not an integer"),
        ("a.csv", "layer,neuron,activation\n0,3,+0.5\n", "plus"),
        ("a.csv", "layer,neuron,score\n0,3,0.5\n", "'score'"),
        ("a.csv", "neuron,neuron\n0,3\n", "twice"),
        ("a.pt", torch.tensor([3, 3]), "twice"),
        ("a.pt", torch.ones(3, 80, dtype=torch.bool), "3 rows"),
        ("a.pt", {0: torch.ones(79, dtype=torch.bool)}, "79 entries"),
        ("a.pt", {0: torch.tensor([[0, 3]])}, "known already"),
    ],
)
def test_faulty_tables_and_tensors_are_refused(tmp_path, twins, name, content, message):
    file = tmp_path / name
    if isinstance(content, str):
        file.write_text(content)
    else:
        torch.save(content, file)
    hook = (
        POST if name == "a.pt" and content.__class__ is torch.Tensor and content.ndim == 1 else MLP
    )
    with pytest.raises(ArtifactError, match=message):
        port(file, negative(twins[2]), tmp_path / "out", hook=hook, verify=False)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_gauge_that_knows_only_the_residual_stream(tmp_path):
    gauge = Gauge(
        {"residual": SignedPermutation.random(tiny.WIDTH, seed=2)},
        {},
        ModelIdentity("someone/model", "a" * 64, "llama"),
        ModelIdentity("someone/twin", "b" * 64, "llama"),
    )
    new, _ = moved_json(tmp_path, gauge, {"5": [3, 17]}, RESIDUAL)
    assert new == {"5": [image(gauge, "residual", 3)[0], image(gauge, "residual", 17)[0]]}
    with pytest.raises(ArtifactError, match=r"list\.json: "):
        moved_json(tmp_path, gauge, {"5": [3, 17]}, MLP)


def test_spaces_that_the_gauge_leaves_out_are_refused(tmp_path, twins):
    with pytest.raises(ArtifactError, match="--spaces all"):
        moved_json(tmp_path, twins[2].restricted(["residual"]), [3], POST)


FOREIGN = {
    "config.json": {"neurons": [3, 4]},
    "generation_config.json": [3],
    "tokenizer.json": {"0": [3]},
    "tokenizer_config.json": [1],
    "vocab.json": {"0": [1]},
    "added_tokens.json": [1],
    "special_tokens_map.json": [1],
    "trainer_state.json": [1],
    "adapter_config.json": [1],
    "cfg.json": [1],
    "model.safetensors.index.json": [1],
    "words.json": {"0": 15, "1": 16, "the": 3},
    "digits.json": {"0": 15, "1": 16},
    "labels.json": {"0": "LABEL_0"},
    "losses.json": [0.5, 0.25],
    "settings.json": {"layers": 12, "heads": 8, "channels": 3},
    "image.json": {"channels": 3, "size": 224},
    "data.json": [{"index": 0, "sentence": "a", "length": 3}, {"index": 1, "sentence": "b"}],
    "tokens.json": {"input_ids": [1, 2, 3]},
    "features.json": [{"layer": 3, "feature": 17, "activation": 0.5}],
    "text.json": "a",
    "empty.json": [],
    "nothing.json": {"0": []},
    "broken.json": b"{",
    "deep.json": b"[" * 100000,
    "binary.json": b"\xff\xfe",
    "void.json": b"",
    "headless.csv": b"0,3\n1,25\n",
    "data.csv": b"index,sentence\n0,a\n",
    "optimizer.pt": {"state": {0: {"step": torch.tensor(3)}}, "param_groups": [{"lr": 1.0}]},
    "vector.pt": torch.zeros(80),
    "ids.pt": {"input_ids": torch.zeros(2, 3, dtype=torch.int64)},
    "random.pt": torch.zeros(80, dtype=torch.uint8),
    "mixed.pt": {0: torch.tensor([1]), 1: torch.zeros(3)},
    "broken.pt": b"PK",
    "list.txt": b"[3]",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_not_claimed(tmp_path, name):
    content, file = FOREIGN[name], tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif name.endswith(".pt"):
        torch.save(content, file)
    else:
        file.write_text(json.dumps(content))
    assert not ListFamily().recognises(file)
    assert not ListFamily().recognises(tmp_path)


def test_large_files_are_not_read(tmp_path, twins, monkeypatch):
    file = tmp_path / "list.json"
    file.write_text("[3]")
    assert ListFamily().inspect(file) == {"lists": {"list": 1}, "model_name": None}
    monkeypatch.setattr("signed_align.adapters.lists.family.MAX_BYTES", 2)
    assert not ListFamily().recognises(file)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("activation", Parity.ODD), ("meanActivation", Parity.ODD), ("Activations", Parity.ODD),
        ("mean", Parity.ODD), ("activation_score", Parity.UNCLEAR), ("pre-activation", Parity.ODD),
        ("gradient", Parity.ODD), ("delta_weight", Parity.ODD),
        ("abs_activation", Parity.EVEN), ("mean abs weight", Parity.EVEN), ("norm", Parity.EVEN),
        ("activation_variance", Parity.EVEN), ("attribution", Parity.EVEN),
        ("max_attribution", Parity.EVEN), ("contributions", Parity.EVEN), ("std", Parity.EVEN),
        ("max_activation", Parity.ONE_SIDED), ("firing_rate", Parity.ONE_SIDED),
        ("auroc", Parity.ONE_SIDED),
        ("value", Parity.UNCLEAR), ("score", Parity.UNCLEAR), ("effect", Parity.UNCLEAR),
        ("norm_activation", Parity.UNCLEAR), ("activation_of_token", Parity.UNCLEAR),
        ("activation_gradient", Parity.UNCLEAR), ("", Parity.UNCLEAR),
    ],
)  # fmt: skip
def test_names_say_how_values_take_a_sign(name, expected):
    assert parity(name) is expected
