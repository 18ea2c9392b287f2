"""Steering vectors: they steer the twin as they steer the source, whatever file they come in."""

import os
import struct
import zipfile

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from signed_align import Checkpoint, Gauge, SignedPermutation, scramble
from signed_align.adapters import archives, recognise
from signed_align.adapters.steering import SteeringFamily, read_vectors, steering_effect
from signed_align.errors import ArtifactError, ChartError, SignedAlignError
from signed_align.gauge import ModelIdentity
from signed_align.hooks import find_hook, listening
from signed_align.steering import continuation_scores, contrast_direction, steered
from tests import tiny
from tests.porting import port
from tests.test_recovery import add_tokenizer

WIDTH, UNITS, HEADS = tiny.WIDTH, 80, 64
SIZES = {
    "blocks.0.hook_resid_post": WIDTH,
    "blocks.1.hook_resid_pre": WIDTH,
    "blocks.1.hook_attn_out": WIDTH,
    "hook_embed": WIDTH,
    "blocks.0.mlp.hook_post": UNITS,
    "blocks.1.attn.hook_z": HEADS,
    "model.layers.1": WIDTH,
    "model.layers.0.mlp": WIDTH,
    "model.layers.1.input_layernorm": WIDTH,
    "model.layers.1.mlp.up_proj": UNITS,
    "model.layers.0.mlp.gate_proj": UNITS,
    "model.layers.1.self_attn.v_proj": 32,
    "model.layers.1.self_attn.o_proj": WIDTH,
}
POST = "blocks.0.hook_resid_post"


class Pair:
    """A model, its twin in all spaces, the gauge between them, and both loaded."""

    def __init__(self, root):
        self.source = add_tokenizer(tiny.save(tiny.build("llama"), root / "source"))
        self.twin = root / "twin"
        self.gauge = scramble(self.source, self.twin, seed=3, spaces=["all"])
        self.home, self.away = tiny.load(self.source), tiny.load(self.twin)
        self.chart = Checkpoint.open(self.source).chart

    def moved(self, vectors):
        return self.gauge.element("residual").apply(vectors, -1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("pair"))


def vector(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(pair, path, **options):
    """Port a file to the twin; check that the way back ends where it began."""
    there, back = path.parent / "there" / path.name, path.parent / "back" / path.name
    report = port(path, pair.gauge, there, **options)
    port(there, pair.gauge, back, inverse=True, **options)
    assert back.read_bytes() == path.read_bytes()
    assert there.read_bytes() != path.read_bytes()
    return there, report


def refused(pair, path, match, **options):
    with pytest.raises(SignedAlignError, match=match):
        port(path, pair.gauge, path.parent / "refused", **options)
    assert not (path.parent / "refused").exists()


def saved(tmp_path, content, name="vectors.pt"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


# ---- the law: a moved vector does on the twin what it did on the source --------------------------


@pytest.mark.parametrize("hook", SIZES)
def test_products_with_activations_and_steered_logits_agree(pair, tmp_path, hook):
    home = {hook: 3 * vector(SIZES[hook])}
    there, _ = there_and_back(pair, saved(tmp_path, home))
    away = torch.load(there, weights_only=True)
    place = find_hook(pair.chart, hook)
    with torch.no_grad(), listening(pair.home, pair.chart, place) as caught:
        plain = pair.home(tiny.tokens()).logits
    with torch.no_grad(), listening(pair.away, pair.chart, place) as others:
        pair.away(tiny.tokens())
    product = caught[0] @ home[hook]
    assert tiny.relative_change(product, others[0] @ away[hook]) <= 1e-5
    assert tiny.relative_change(product, others[0] @ home[hook]) > 1e-2
    with steered(pair.home, pair.chart, home):
        wanted = tiny.logits(pair.home)
    with steered(pair.away, pair.chart, away):
        assert tiny.relative_change(wanted, tiny.logits(pair.away)) <= 1e-5
    with steered(pair.away, pair.chart, home):
        assert tiny.relative_change(wanted, tiny.logits(pair.away)) > 1e-3
    assert tiny.relative_change(wanted, plain) > 1e-3
    assert torch.equal(plain, tiny.logits(pair.home))


def test_strength_multiplies_and_wrong_sizes_are_refused(pair):
    with steered(pair.home, pair.chart, {POST: 2 * vector(WIDTH)}):
        wanted = tiny.logits(pair.home)
    with steered(pair.home, pair.chart, {POST: vector(WIDTH)}, strength=2):
        assert torch.equal(wanted, tiny.logits(pair.home))
    with (
        pytest.raises(ChartError, match="shape"),
        steered(pair.home, pair.chart, {POST: vector(5)}),
    ):
        pass
    absent = {"blocks.9.hook_resid_post": vector(WIDTH)}
    with pytest.raises(ChartError), steered(pair.home, pair.chart, absent):
        pass


# ---- formats -------------------------------------------------------------------------------------

STACK = vector(2, WIDTH, seed=4)
CONTENTS = {
    "one vector": vector(WIDTH),
    "a row for each layer": STACK,
    "positions and layers": vector(3, 2, WIDTH),
    "by layer": {0: vector(WIDTH), 1: vector(WIDTH, seed=1)},
    "rows of one matrix": {layer: STACK[layer] for layer in range(2)},
    "nested": {
        "refusal": {"mean": vector(WIDTH), "layer": 1},
        "name": "x",
        "scale": torch.ones(()),
    },
    "lists": [vector(WIDTH), [vector(WIDTH, seed=1), "text", None]],
    "half precision": {0: vector(WIDTH).half(), 1: vector(WIDTH).bfloat16()},
    "a parameter": torch.nn.Parameter(vector(WIDTH)),
    "a transposed matrix": vector(WIDTH, 2).T,
}


def flat(content):
    if isinstance(content, torch.Tensor):
        return [content.detach()]
    items = content.values() if isinstance(content, dict) else content
    return [t for item in items if isinstance(item, (dict, list, torch.Tensor)) for t in flat(item)]


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_torch_files(pair, tmp_path, content, suffix):
    there, report = there_and_back(pair, saved(tmp_path, content, f"vectors{suffix}"))
    assert report["kind"] == "steering vectors"
    assert report["notes"] == ["taken to be on the residual stream"]
    for old, new in zip(flat(content), flat(torch.load(there, weights_only=True)), strict=True):
        assert torch.equal(new, pair.moved(old) if old.ndim else old)


def test_rows_of_one_matrix_are_written_once(pair, tmp_path):
    rows = vector(400, WIDTH)
    path = saved(tmp_path, dict.fromkeys(range(20), rows[:200]))
    there, _ = there_and_back(pair, path)
    assert there.stat().st_size == path.stat().st_size
    views = saved(tmp_path, {"wide": rows[:1].expand(3, WIDTH), "part": rows[0]}, "views.pt")
    port(views, pair.gauge, tmp_path / "moved.pt")
    moved = torch.load(tmp_path / "moved.pt", weights_only=True)
    assert torch.equal(moved["wide"], pair.moved(rows[:1].expand(3, WIDTH)))
    assert torch.equal(moved["part"], pair.moved(rows[0]))


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files(pair, tmp_path, dtype, order):
    array = np.array(STACK.numpy(), dtype=dtype, order=order)
    np.save(tmp_path / "vectors.npy", array)
    there, _ = there_and_back(pair, tmp_path / "vectors.npy")
    moved = np.load(there)
    assert moved.dtype == array.dtype
    assert moved.flags.f_contiguous == array.flags.f_contiguous
    wanted = pair.moved(torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))).numpy()
    assert np.array_equal(moved, wanted)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files(pair, tmp_path, save):
    arrays = {
        "0": STACK.numpy(),
        "blocks.0.mlp.hook_post": vector(UNITS).numpy(),
        "names": np.array(["a", "b"]),
        "scale": np.float32(2),
    }
    save(tmp_path / "vectors.npz", **arrays)
    there, _ = there_and_back(pair, tmp_path / "vectors.npz")
    with np.load(there) as moved:
        assert np.array_equal(moved["0"], pair.moved(STACK).numpy())
        assert list(moved["names"]) == ["a", "b"]
        assert moved["scale"] == 2
        assert not np.array_equal(moved["blocks.0.mlp.hook_post"], arrays["blocks.0.mlp.hook_post"])


def test_arrays_of_text_are_no_vectors(pair, tmp_path):
    np.save(tmp_path / "names.npy", np.array(["a", "b"]))
    assert recognise(tmp_path / "names.npy") is None
    np.save(tmp_path / "wide.npy", np.zeros((2, WIDTH), np.longdouble))
    refused(pair, tmp_path / "wide.npy", "cannot be moved exactly")


def test_members_of_an_npz_without_a_suffix_move_too(pair, tmp_path):
    np.save(tmp_path / "array.npy", STACK.numpy())
    with zipfile.ZipFile(tmp_path / "vectors.npz", "w") as archive:
        archive.write(tmp_path / "array.npy", "bare")
    there, _ = there_and_back(pair, tmp_path / "vectors.npz")
    assert np.array_equal(np.load(there)["bare"], pair.moved(STACK).numpy())
    with zipfile.ZipFile(tmp_path / "vectors.npz", "a") as archive:
        archive.write(tmp_path / "array.npy", "bare.npy")
    refused(pair, tmp_path / "vectors.npz", "two arrays of one name")


@pytest.mark.parametrize("metadata", [None, {"model": "SOURCE", "note": "ü"}])
def test_safetensors_files_and_the_model_they_name(pair, tmp_path, metadata):
    if metadata:
        metadata = {**metadata, "model": str(pair.source)}
    content = {"layer_0": vector(WIDTH), "layer_1": vector(WIDTH).bfloat16()}
    save_file(content, tmp_path / "vectors.safetensors", metadata)
    there, report = there_and_back(pair, tmp_path / "vectors.safetensors")
    moved = load_file(there)
    assert all(torch.equal(moved[name], pair.moved(content[name])) for name in content)
    assert report["source_verified"] is bool(metadata)
    with safe_open(there, framework="pt") as file:
        expected = metadata and {**metadata, "model": pair.gauge.target.name}
        assert file.metadata() == expected
    if metadata:
        save_file(content, tmp_path / "vectors.safetensors", {"model": "someone/else"})
        refused(pair, tmp_path / "vectors.safetensors", "any-source")


def control_vector(
    path, directions, hint="llama", count="add_uint32", architecture="controlvector"
):
    writer = gguf.GGUFWriter(path, architecture)
    if hint:
        writer.add_string("controlvector.model_hint", hint)
    getattr(writer, count)("controlvector.layer_count", len(directions))
    writer.add_array("controlvector.tags", ["a", "b"])
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("count", ["add_uint32", "add_int32"])
def test_control_vectors(pair, tmp_path, dtype, count):
    directions = {layer: vector(WIDTH, seed=layer).numpy().astype(dtype) for layer in (1, 0)}
    path = control_vector(tmp_path / "vectors.gguf", directions, count=count)
    there, report = there_and_back(pair, path)
    assert report["made_on"] == str(pair.source)  # as said
    assert [row["axes"] for row in report["labels"]] == ["(residual)"] * 2
    for tensor in gguf.GGUFReader(there).tensors:
        layer = int(tensor.name.partition(".")[2])
        moved = pair.moved(torch.from_numpy(directions[layer])).numpy()
        assert np.array_equal(tensor.data, moved)
        assert tensor.data.dtype == dtype
    home = read_vectors(path, pair.home, pair.chart)
    assert list(home) == ["blocks.1.hook_resid_post", "blocks.0.hook_resid_post"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hint": "qwen2"}, "of the type 'qwen2'"),
        ({"directions": {1: np.ones(WIDTH + 1, np.float32)}}, "shape"),
        ({"directions": {1: np.ones((1, WIDTH), np.float32)}}, "shape"),
        ({"directions": {"one": np.ones(WIDTH, np.float32)}}, "direction.N"),
        ({"architecture": "llama"}, "not an artifact"),
    ],
)
def test_other_gguf_files_are_refused(pair, tmp_path, changes, match):
    settings = {"directions": {1: np.ones(WIDTH, np.float32)}, **changes}
    refused(pair, control_vector(tmp_path / "vectors.gguf", **settings), match)


def test_gguf_files_that_are_no_control_vectors_say_what_they_are(pair, tmp_path):
    ones = {1: np.ones(WIDTH, np.float32)}
    path = control_vector(tmp_path / "v.gguf", ones, architecture="llama")
    with pytest.raises(ArtifactError, match="architecture 'llama'"):
        SteeringFamily().inspect(path)
    without = control_vector(tmp_path / "vectors.gguf", ones, hint=None)
    there_and_back(pair, without)


# ---- which hook ----------------------------------------------------------------------------------


def test_a_hook_given_by_the_user_labels_what_names_none(pair, tmp_path):
    path = saved(tmp_path, {"probe": vector(UNITS), POST: vector(WIDTH)})
    refused(pair, path, "80 coordinates and names no hook.*48.*--hook")
    there, report = there_and_back(pair, path, hook="blocks.1.mlp.hook_post")
    spaces = {row["tensor"]: row["spaces"] for row in report["labels"]}
    assert spaces == {"probe": ["mlp:layers.1.mlp"], POST: ["residual"]}
    moved = torch.load(there, weights_only=True)
    element = pair.gauge.element("mlp:layers.1.mlp")
    assert torch.equal(moved["probe"], element.apply(vector(UNITS), 0))
    assert report["notes"] == []
    refused(pair, path, "64 coordinates at", hook="blocks.1.attn.hook_z")


def test_several_layers_at_a_hook_of_one_layer_are_refused(pair, tmp_path):
    several = "every layer has coordinates of its own"
    for content in (vector(2, UNITS), {0: vector(UNITS), 1: vector(UNITS)}):
        refused(pair, saved(tmp_path, content), several, hook="blocks.1.mlp.hook_post")
    there_and_back(pair, saved(tmp_path, vector(1, UNITS)), hook="blocks.1.mlp.hook_post")
    layers = saved(tmp_path, vector(2, WIDTH), "layers.pt")
    there_and_back(pair, layers, hook="blocks.1.hook_resid_mid")


@pytest.mark.parametrize(
    "layer_type",
    ["decoder_block", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"],
)
def test_the_layer_types_of_the_package_steering_vectors(pair, tmp_path, layer_type):
    home = {"layer_activations": {1: 3 * vector(WIDTH)}, "layer_type": layer_type}
    path = saved(tmp_path, home)
    there, report = there_and_back(pair, path)
    assert report["notes"] == []
    at_home = read_vectors(path, pair.home, pair.chart)
    with steered(pair.home, pair.chart, at_home):
        wanted = tiny.logits(pair.home)
    with steered(pair.away, pair.chart, read_vectors(there, pair.away, pair.chart)):
        assert tiny.relative_change(wanted, tiny.logits(pair.away)) <= 1e-5
    assert next(iter(at_home)).startswith("layers.1")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"layer_activations": {1: vector(WIDTH)}, "layer_type": "nothing"}, "layer_type"),
        ({"blocks.0.attn.hook_other": vector(WIDTH)}, "hook_other"),
        ({"blocks.0.hook_pattern": vector(WIDTH)}, "positions"),
        ({"model.layers.0.mlp.act_fn": vector(UNITS)}, "act_fn"),
        ({"lm_head.out": vector(WIDTH), "model.layers.7.x": vector(WIDTH)}, "model.layers.7.x"),
        ({"blocks.0.mlp.hook_post": vector(WIDTH)}, "80 coordinates at"),
        ({"a": vector(WIDTH), "top": torch.arange(5)}, "indices"),
        ({"a": vector(WIDTH), "b": [0.5] * WIDTH}, "plain numbers"),
        ({"a": vector(WIDTH), "b": vector(WIDTH - 1)}, "--hook"),
        ({"state": {0: {"exp_avg": vector(WIDTH)}}, "param_groups": []}, "groups|not an"),
        ({"model.layers.0.self_attn.o_proj.weight": vector(WIDTH, WIDTH)}, "not an artifact"),
        ({"W_dec": vector(9, WIDTH)}, "not an artifact"),
        ({"text": "only"}, "not an artifact"),
        ({"a": vector(WIDTH).to(torch.complex64)}, "not an artifact"),
    ],
)
def test_what_is_not_understood_is_refused(pair, tmp_path, content, match):
    refused(pair, saved(tmp_path, content), match)


def test_a_square_tensor_is_refused_since_either_axis_could_be_that_of_coordinates(pair, tmp_path):
    with pytest.raises(ArtifactError, match="which axis"):
        port(saved(tmp_path, vector(WIDTH, WIDTH)), pair.gauge, tmp_path / "moved.pt")


def test_even_quantities_keep_their_signs(pair, tmp_path):
    content = {name: vector(WIDTH).abs() for name in ("std", "variance", "norms", "mask")}
    content["mean"] = vector(WIDTH)
    there, _ = there_and_back(pair, saved(tmp_path, content))
    moved = torch.load(there)
    element = pair.gauge.element("residual")
    for name in ("std", "variance", "norms", "mask"):
        assert torch.equal(moved[name], element.apply(content[name], 0, signed=False)), name
    assert torch.equal(moved["mean"], element.apply(content["mean"], 0))
    nested = {"std": {0: vector(WIDTH).abs()}, "mean_diff": vector(WIDTH)}
    moved = torch.load(there_and_back(pair, saved(tmp_path, nested, "nested.pt"))[0])
    assert torch.equal(moved["std"][0], element.apply(nested["std"][0], 0, signed=False))
    assert torch.equal(moved["mean_diff"], element.apply(nested["mean_diff"], 0))
    there = there_and_back(pair, saved(tmp_path, vector(WIDTH).abs(), "std.pt"))[0]
    assert bool((torch.load(there) >= 0).all())


@pytest.mark.parametrize(
    "name", ["max_activation", "unit_norm_direction", "std_dev", "mean_over_std", "loss"]
)
def test_names_that_speak_against_signs_are_refused(pair, tmp_path, name):
    refused(pair, saved(tmp_path, {name: vector(WIDTH)}), "not clear")
    refused(pair, saved(tmp_path, vector(WIDTH), f"{name}.pt"), "not clear")


def test_a_mask_in_floating_point_is_refused(pair, tmp_path):
    refused(pair, saved(tmp_path, {"blocks.0.hook_resid_post": torch.ones(WIDTH)}), "booleans")


@pytest.mark.parametrize("key", ["L0H3", "head_3", "q_proj", "neuron_directions", "mlp_0"])
def test_parts_of_the_model_need_a_hook(pair, tmp_path, key):
    refused(pair, saved(tmp_path, {key: vector(WIDTH)}), "--hook")


@pytest.mark.parametrize("key", ["hook", "hook_name"])
def test_a_hook_that_the_file_states_counts(pair, tmp_path, key):
    vectors = {"vector": vector(UNITS)}
    path = saved(tmp_path, {key: "blocks.1.mlp.hook_post", **vectors})
    report = there_and_back(pair, path)[1]
    assert report["labels"][0]["spaces"] == ["mlp:layers.1.mlp"]
    file = tmp_path / "vectors.safetensors"
    save_file(vectors, file, metadata={key: "blocks.1.mlp.hook_post"})
    there_and_back(pair, file)
    refused(pair, saved(tmp_path, {key: "nowhere", **vectors}), "nowhere")
    np.savez(
        tmp_path / "v.npz", vector=vectors["vector"].numpy(), **{key: "blocks.1.mlp.hook_post"}
    )
    report = there_and_back(pair, tmp_path / "v.npz")[1]
    assert report["labels"][0]["spaces"] == ["mlp:layers.1.mlp"]
    nested = {"metadata": {key: "blocks.1.mlp.hook_post"}, **vectors}
    report = there_and_back(pair, saved(tmp_path, nested, "nested.pt"))[1]
    assert report["labels"][0]["spaces"] == ["mlp:layers.1.mlp"]


@pytest.mark.parametrize(
    "beside", [{"top": [1, 2, 3]}, {"scores": dict.fromkeys(range(WIDTH), 0.5)}]
)
def test_plain_numbers_that_could_be_along_the_coordinates_are_refused(pair, tmp_path, beside):
    refused(pair, saved(tmp_path, {"vector": vector(WIDTH), **beside}), next(iter(beside)))
    there_and_back(pair, saved(tmp_path, {"vector": vector(WIDTH), "layers": [0, 1], "seed": 3}))


@pytest.mark.parametrize("prefix", ["", "probe."])
def test_a_linear_layer_is_a_probe(pair, tmp_path, prefix):
    content = {f"{prefix}weight": vector(3, WIDTH), f"{prefix}bias": torch.ones(3)}
    there, _ = there_and_back(pair, saved(tmp_path, content))
    moved = torch.load(there)
    assert torch.equal(moved[f"{prefix}weight"], pair.moved(content[f"{prefix}weight"]))
    assert torch.equal(moved[f"{prefix}bias"], torch.ones(3))


def test_layers_that_the_model_does_not_have_are_refused(pair, tmp_path):
    content = {"blocks.7.hook_resid_post": vector(WIDTH)}
    with pytest.raises(ArtifactError, match="2 layers"):
        port(saved(tmp_path, content), pair.gauge, tmp_path / "moved.pt")


def test_a_gauge_of_the_residual_stream_leaves_other_hooks_alone(pair, tmp_path):
    element = pair.gauge.element("residual")
    identity = ModelIdentity("someone/model", "a" * 64, "llama")
    gauge = Gauge({"residual": element}, {}, identity, identity)
    port(saved(tmp_path, vector(WIDTH)), gauge, tmp_path / "moved.pt")
    assert torch.equal(torch.load(tmp_path / "moved.pt"), element.apply(vector(WIDTH), 0))
    with pytest.raises(ArtifactError):
        port(saved(tmp_path, {"blocks.0.mlp.hook_post": vector(UNITS)}), gauge, tmp_path / "m.pt")
    narrow = Gauge({"residual": SignedPermutation.random(32)}, {}, identity, identity)
    with pytest.raises(ArtifactError, match="--hook"):
        port(saved(tmp_path, vector(WIDTH)), narrow, tmp_path / "m.pt")


def test_only_files_are_recognised(tmp_path):
    family = SteeringFamily()
    (tmp_path / "folder.pt").mkdir()
    assert not family.recognises(tmp_path / "folder.pt")
    assert not family.recognises(tmp_path / "missing.pt")
    assert isinstance(recognise(saved(tmp_path, vector(WIDTH))), SteeringFamily)
    assert family.inspect(saved(tmp_path, {1: STACK}))["tensors"] == {"1": [2, WIDTH]}


# ---- hostile and damaged files -------------------------------------------------------------------


class Bomb:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", ["v.pt", "v.bin", "v.npy", "v.npz"])
def test_code_in_files_is_not_run(pair, tmp_path, name):
    mark, path = tmp_path / "mark", tmp_path / name
    content = {"a": vector(WIDTH), "b": Bomb(mark)}
    if name.endswith(".npy"):
        np.save(path, np.array([content], dtype=object), allow_pickle=True)
    elif name.endswith(".npz"):
        np.savez(path, array=np.array([content], dtype=object))
    else:
        torch.save(content, path)
    refused(pair, path, "weights_only=True" if name[-1] != "y" and name[-1] != "z" else "code")
    assert not mark.exists()


class SteeringVector:
    """What the package steering-vectors pickles."""

    def __init__(self):
        self.layer_activations = {1: vector(WIDTH)}


def test_the_pickled_object_of_steering_vectors_is_refused_with_what_to_do(pair, tmp_path):
    refused(pair, saved(tmp_path, SteeringVector()), r"dict\(v.layer_activations\)")


def test_damaged_files_are_refused(pair, tmp_path):
    whole = control_vector(tmp_path / "v.gguf", {1: vector(WIDTH).numpy()}).read_bytes()
    for length in (3, 40, len(whole) // 2, len(whole) - 40):
        (tmp_path / "v.gguf").write_bytes(whole[:length])
        refused(pair, tmp_path / "v.gguf", "not a readable GGUF")
    (tmp_path / "v.gguf").write_bytes(whole[:8] + struct.pack("<QQ", 2**60, 2**60) + whole[24:])
    refused(pair, tmp_path / "v.gguf", "not a readable GGUF")
    for name in ("v.pt", "v.npy", "v.npz", "v.safetensors"):
        (tmp_path / name).write_bytes(b"nothing at all")
        refused(pair, tmp_path / name, "readable|is not read")


@pytest.mark.parametrize(
    "shape", ["(48000000000000,)", "(-48,)", "(1, -1)", "(49,)", "(True,)", "'x'", "(((", "(" * 300]
)
def test_arrays_that_lie_about_their_size_are_refused(pair, tmp_path, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode("latin1")
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(4 * WIDTH)
    (tmp_path / "v.npy").write_bytes(data)
    refused(pair, tmp_path / "v.npy", "size|readable")


@pytest.mark.parametrize("name", ["v.npz", "v.pt"])
def test_archives_that_unpack_to_too_much_are_refused(pair, tmp_path, monkeypatch, name):
    if name == "v.npz":
        np.savez_compressed(tmp_path / name, a=np.zeros((1000, WIDTH), np.float32))
    else:
        saved(tmp_path, vector(1000, WIDTH), name)
    monkeypatch.setattr(archives, "MOST_UNPACKED", (1000, 0))
    refused(pair, tmp_path / name, "unpacks to")


@pytest.mark.parametrize("member", ["../evil.npy", "/etc/evil.npy", "a/b.npy"])
def test_archives_with_paths_are_refused(pair, tmp_path, member):
    np.save(tmp_path / "a.npy", vector(WIDTH).numpy())
    with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
        archive.write(tmp_path / "a.npy", member)
    refused(pair, tmp_path / "v.npz", "nested")


def test_containers_that_hold_themselves_are_refused(pair, tmp_path):
    content = [vector(WIDTH)]
    content.append(content)
    refused(pair, saved(tmp_path, content), "hold themselves")


# ---- effects -------------------------------------------------------------------------------------

PROMPTS = ["abcab", "zyx", "the cat sat"]
ENDS = (["ab", "q"], ["zz", "x y"])


def test_the_effect_is_the_same_on_both_sides(pair, tmp_path):
    path = saved(tmp_path, {0: vector(WIDTH), "blocks.1.mlp.hook_post": vector(UNITS)})
    there, _ = there_and_back(pair, path)
    home = steering_effect(pair.source, path, PROMPTS, *ENDS, strength=2.0)
    away = steering_effect(pair.twin, there, PROMPTS, *ENDS, strength=2.0)
    lost = steering_effect(pair.twin, path, PROMPTS, *ENDS, strength=2.0)
    assert abs(home["effect"]) > 1e-2
    assert home["effect"] == pytest.approx(away["effect"], abs=1e-4)
    assert home["unsteered"] == pytest.approx(away["unsteered"], abs=1e-4)
    assert home["effect"] != pytest.approx(lost["effect"], abs=1e-2)
    assert home["effect"] == pytest.approx(home["steered"] - home["unsteered"])
    assert home["effect"] == pytest.approx(sum(row["effect"] for row in home["prompts"]) / 3)
    assert home["hooks"] == ["blocks.0.hook_resid_post", "blocks.1.mlp.hook_post"]
    nothing = steering_effect(pair.source, path, PROMPTS, *ENDS, strength=0.0)
    assert nothing["effect"] == 0


def test_continuations_are_scored_by_all_their_tokens(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.source)
    tokens = tokenizer("abcxy")["input_ids"]
    with torch.no_grad():
        logs = pair.home(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    wanted = logs[-3, tokens[-2]] + logs[-2, tokens[-1]]
    pairs = [("abc", "xy"), ("a", "longer than the other")]
    scores = continuation_scores(pair.home, tokenizer, pairs)
    assert float(scores[0]) == pytest.approx(float(wanted), abs=1e-5)
    for bad in (("", "a"), ("a", "")):
        with pytest.raises(SignedAlignError, match="token"):
            continuation_scores(pair.home, tokenizer, [bad])


def test_rows_of_a_matrix_steer_the_outputs_of_the_blocks(pair, tmp_path):
    rows = read_vectors(saved(tmp_path, STACK), pair.home, pair.chart)
    assert torch.equal(rows["blocks.1.hook_resid_post"], STACK[1])
    with pytest.raises(ArtifactError, match="2 blocks"):
        read_vectors(saved(tmp_path, vector(3, WIDTH)), pair.home, pair.chart)
    with pytest.raises(ArtifactError, match="a hook"):
        read_vectors(saved(tmp_path, vector(WIDTH)), pair.home, pair.chart)
    named = read_vectors(saved(tmp_path, vector(WIDTH)), pair.home, pair.chart, hook=POST)
    assert list(named) == [POST]
    both = saved(tmp_path, {"0": vector(WIDTH), POST: vector(WIDTH)})
    with pytest.raises(ArtifactError, match="two vectors"):
        read_vectors(both, pair.home, pair.chart)


def test_effects_need_texts_and_places(pair, tmp_path):
    path = saved(tmp_path, {"blocks.0.mlp.hook_pre": vector(UNITS)})
    with pytest.raises(ArtifactError, match="cannot steer"):
        steering_effect(pair.source, path, PROMPTS, *ENDS)
    with pytest.raises(ArtifactError, match="at least one positive"):
        steering_effect(pair.source, path, PROMPTS, [], ["x"])


def test_contrast_directions_correspond(pair):
    texts = ["abab", "a longer text"], ["zzz", "yx"]
    for hook, space in ((POST, "residual"), ("blocks.1.mlp.hook_post", "mlp:layers.1.mlp")):
        home = contrast_direction(pair.source, *texts, hook)
        away = contrast_direction(pair.twin, *texts, hook)
        wanted = pair.gauge.element(space).apply(home, 0)
        assert tiny.relative_change(wanted, away) <= 1e-5
        unit = contrast_direction(pair.source, *texts, hook, normalise=True)
        assert torch.allclose(unit, home / home.norm())
    with pytest.raises(SignedAlignError, match="token"):
        contrast_direction(pair.source, [""], ["x"], POST)


def test_a_contrast_direction_is_a_difference_of_means_at_the_last_token(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.source)

    def last(text):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            return pair.home(ids, output_hidden_states=True).hidden_states[1][0, -1]

    found = contrast_direction(pair.source, ["abab", "a longer text"], ["zzz"], POST)
    wanted = (last("abab") + last("a longer text")) / 2 - last("zzz")
    assert tiny.relative_change(wanted, found) <= 1e-5
