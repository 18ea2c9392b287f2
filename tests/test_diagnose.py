"""What relates two checkpoints: pairs of every label, where it stops, what it is not fooled by."""

import importlib.util
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from signed_align import Checkpoint, Gauge, SignedAlignError, SignedPermutation, diagnose
from signed_align import diagnosis as stages
from signed_align.diagnosis import Relation
from signed_align.likeness import TokenRows, compare_functions
from tests import tiny
from tests.test_cli import run

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "labelled_pairs.py"
SPEC = importlib.util.spec_from_file_location("labelled_pairs", SCRIPT)
labelled = sys.modules["labelled_pairs"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(labelled)

TEXT = labelled.text()
STOPS = {
    "architecture": "config",
    "dense rotation": "activations",
    "fine-tuned rotation": "activations",
    "unrelated": "activations",
}
"""Where a diagnosis stops, if not at weights."""

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Pairs of Llamas."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield labelled.Family("llama", tmp_path_factory.mktemp("pairs"))
    torch.set_num_threads(threads)


def rewritten(source, out, change):
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, out)
    save_file(change(load_file(out / WEIGHTS)), out / WEIGHTS, metadata={"format": "pt"})
    return out


def with_config(path, **settings):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


# ---- the labels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*labelled.EASY, *labelled.HARDER], ids=lambda make: make.__name__)
def test_every_label(family, make):
    pair = make(family)
    found = diagnose(pair.source, pair.target, text=TEXT)
    assert found.verdict == pair.verdict
    assert found.coordinates == (pair.coordinates or pair.verdict)
    assert found.stage == STOPS.get(pair.label, "weights")
    assert 0 < found.confidence <= 1
    assert {entry["stage"] for entry in found.evidence} <= {"config", "weights", "activations"}
    assert found.evidence[-1]["stage"] == found.stage
    assert (found.next is not None) == ("permutation" in found.coordinates.value)


@pytest.mark.slow
def test_the_labelled_set(tmp_path, one_thread):
    """At most one error in all, and nothing unrelated or rotated is called portable."""
    wrong, count, families = [], 0, set()
    for pair in labelled.labelled_pairs(tmp_path):
        found = diagnose(pair.source, pair.target, text=TEXT)
        count += 1
        families.add(pair.family)
        if found.verdict != pair.verdict or found.coordinates != (pair.coordinates or pair.verdict):
            wrong.append((pair.name, found.verdict.value))
        if not Relation(pair.verdict).is_portable and pair.coordinates is None:
            assert not found.coordinates.is_portable, pair.name
    assert count >= 60
    assert len(families) >= 6
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("name", labelled.FAMILIES)
def test_rotations_keep_the_function_and_nothing_else(name):
    """The rotated pairs are what they claim to be."""
    torch.manual_seed(0)
    model = labelled.build(name, 0, labelled.FAMILIES[name]).eval()
    turned = labelled.rotated(model)
    ids = torch.randint(3, labelled.TOKENS, (2, 16))
    with torch.no_grad():
        before, after = (one(ids, output_hidden_states=True) for one in (model, turned))
    assert tiny.relative_change(before.logits, after.logits) < 1e-4
    first, second = before.hidden_states[0], after.hidden_states[0]
    assert tiny.relative_change(first, second) > 0.5
    torch.testing.assert_close(first @ first.mT, second @ second.mT, rtol=1e-3, atol=1e-4)


# ---- spaces --------------------------------------------------------------------------------------


def relations(found):
    return {kind: entry["relation"] for kind, entry in found.spaces.items()}


def test_every_kind_of_space_has_its_relation(family):
    pair = family.everywhere()
    found = diagnose(pair.source, pair.target)
    assert relations(found) == {
        "residual": "signed_permutation",
        "mlp": "signed_permutation",
        "values": "signed_permutation",
        "keys": "signed_permutation",
        "heads": "permutation",
    }
    assert found.confidence == 1.0
    residual = found.spaces["residual"]
    assert residual["coordinates"] == labelled.WIDTH
    assert residual["sure"] == 1.0
    assert residual["moved"] > 0.8
    assert 0.2 < residual["negative"] < 0.8


def test_changes_of_sites_alone_are_seen(family):
    pair = family.sites_alone()
    found = relations(diagnose(pair.source, pair.target))
    assert found.pop("residual") == "same_coordinates"
    assert set(found.values()) == {"permutation"}


def test_spaces_that_are_not_recognised_are_named(family, tmp_path):
    """The residual stream of one model with the MLPs of another."""
    donor = load_file(family.unrelated().target / WEIGHTS)

    def change(tensors):
        return {name: donor[name] if ".mlp." in name else old for name, old in tensors.items()}

    found = diagnose(family.base, rewritten(family.base, tmp_path / "b", change))
    assert found.verdict == "same_coordinates"
    assert relations(found) == dict.fromkeys(found.spaces, "same_coordinates") | {
        "mlp": "not_recovered"
    }
    assert "what lives in mlp" in found.advice


def test_both_directions_say_the_same(family):
    pair = family.tuned_twin()
    there, back = diagnose(pair.source, pair.target), diagnose(pair.target, pair.source)
    assert there.verdict == back.verdict
    assert there.gauge.elements["residual"] == back.gauge.elements["residual"].inverse()


def test_a_weak_coordinate_decides_nothing():
    """Of one coordinate that moves with the sign -, only its margin says whether it counts."""
    element = SignedPermutation(torch.tensor([1, 0, 2, 3]), torch.tensor([1, 1, 1, -1]))
    weak = Gauge({"residual": element}, {"residual": torch.tensor([0.9, 0.9, 0.9, 0.01])})
    assert stages._space_of(weak, "residual", 0.05)["relation"] == "permutation"
    sure = Gauge({"residual": element}, {"residual": torch.full((4,), 0.9)})
    assert stages._space_of(sure, "residual", 0.05)["relation"] == "signed_permutation"
    none = Gauge({"residual": element}, {"residual": torch.tensor([0.9, 0.01, 0.01, 0.01])})
    assert stages._space_of(none, "residual", 0.05)["relation"] == "not_recovered"


def test_the_next_command_runs_and_finds_the_gauge(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(family.base, tmp_path / "a model")
    shutil.copytree(family.everywhere().target, tmp_path / "b")
    found = diagnose("a model", "b")
    program, *arguments = shlex.split(found.next)
    assert program == "signed-align"
    run(*arguments)
    gauge = Gauge.load("a-to-b.safetensors")
    assert gauge.source.name == "a model"
    assert gauge.elements["residual"] == found.gauge.elements["residual"]
    assert set(gauge.elements) == set(found.gauge.elements)


# ---- equal tensors -------------------------------------------------------------------------------


def test_a_copy_in_another_dtype(family, tmp_path):
    model = labelled.load(family.base)
    copy = labelled.save(model, tmp_path / "half", torch.bfloat16)
    for ends in ((family.base, copy), (copy, family.base)):
        found = diagnose(*ends)
        assert found.verdict == "same_coordinates"
        assert found.confidence == 1.0
        assert sorted(found.evidence[-1]["dtypes"]) == [["bfloat16"], ["float32"]]
        assert found.next is None


def test_equal_tensors_under_other_settings_are_not_identical(family, tmp_path):
    other = with_config(
        shutil.copytree(family.base, tmp_path / "b"),
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
    )
    found = diagnose(family.base, other)
    assert found.verdict == "same_coordinates"
    assert found.evidence[0]["settings"] == ["rope_parameters"]


def test_one_bit_is_enough_not_to_be_identical(family, tmp_path):
    def change(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name].view(torch.int32)[3, 5] ^= 1
        return tensors

    found = diagnose(family.base, rewritten(family.base, tmp_path / "b", change))
    assert found.verdict == "same_coordinates"
    assert set(relations(found).values()) == {"same_coordinates"}


def test_tied_or_not_is_no_difference(tmp_path):
    qwen = labelled.build("qwen2", 0, labelled.FAMILIES["qwen2"]).eval()
    tied = labelled.save(qwen, tmp_path / "tied")
    free = labelled.save(labelled.untied(qwen), tmp_path / "free")
    assert len(Checkpoint.open(free).files) == len(Checkpoint.open(tied).files) + 1
    assert diagnose(tied, free).verdict == "same_coordinates"
    assert diagnose(free, tied).verdict == "same_coordinates"


# ---- architectures and vocabularies --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "part", "values"),
    [
        ({"hidden_size": 96}, "width", [64, 96]),
        ({"num_hidden_layers": 1}, "layers", [2, 1]),
        ({"num_key_value_heads": 1}, "key-value heads", [2, 1]),
        ({"intermediate_size": 64}, "MLP size", [96, 64]),
        ({"head_dim": 32}, "head size", [16, 32]),
        ({"attention_bias": True}, "weights of one alone", None),
    ],
    ids=str,
)
def test_the_part_that_differs_is_named(family, tmp_path, settings, part, values):
    shape = labelled.FAMILIES["llama"] | settings
    other = labelled.save(labelled.build("llama", 0, shape), tmp_path / "other")
    found = diagnose(family.base, other)
    assert found.verdict == "different_architecture"
    assert found.stage == "config"
    (entry,) = found.evidence
    assert part in entry["parts"]
    assert values is None or entry["parts"][part] == values


def test_other_types_are_other_architectures(family, tmp_path):
    settings = labelled.FAMILIES["qwen3"]
    other = labelled.save(labelled.build("qwen3", 0, settings), tmp_path / "other")
    found = diagnose(family.base, other)
    assert found.verdict == "different_architecture"
    assert found.evidence[0]["parts"]["model type"] == ["llama", "qwen3"]


def test_what_differs_in_a_vocabulary_is_counted(family):
    pair = family.resized()
    numbers = diagnose(pair.source, pair.target).evidence[1]
    assert numbers["parts"] == ["rows", "tokens"]
    assert numbers["rows"] == numbers["tokens"] == [512, 520]
    assert numbers["shared"] == 512
    assert numbers["only_in_one"] == [0, 8]
    moved = family.reordered()
    numbers = diagnose(moved.source, moved.target).evidence[1]
    assert numbers["parts"] == ["order"]
    assert numbers["shared_at_other_rows"] > 500


def test_rows_paired_by_number_count_half(family):
    named, bare = (diagnose(p.source, p.target) for p in (family.resized(), family.no_tokenizers()))
    assert bare.coordinates == named.coordinates
    assert bare.confidence == named.confidence / 2


def test_coordinates_without_a_common_token(family, tmp_path):
    """What is not about tokens is enough for a fine-tune with a vocabulary of its own."""
    out = shutil.copytree(family.light().target, tmp_path / "other")
    words = [f"{word}{word}"[:3] + "!" for word in labelled.all_words()]
    vocabulary = {word: row for row, word in enumerate(dict.fromkeys(words))}
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    tokenizer["added_tokens"] = []
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = diagnose(family.base, out)
    assert found.verdict == "different_vocabulary"
    assert found.evidence[1]["shared"] < labelled.WIDTH
    assert found.coordinates == "same_coordinates"


# ---- less common evidence ------------------------------------------------------------------------


def noisy_tokens(tensors):
    """Token matrices that say nothing, and nothing else changed."""
    generator = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    return tensors


def test_all_weights_speak_where_token_matrices_do_not(family, tmp_path):
    twin = family.signed().target
    for start, verdict in ((family.base, "same_coordinates"), (twin, "signed_permutation")):
        out = rewritten(start, tmp_path / verdict, noisy_tokens)
        found = diagnose(family.base, out)
        assert found.evidence[1]["finding"] == "no_gauge"
        assert found.verdict == verdict
        assert found.stage == "weights"
    assert "--accept-weak" in found.next
    truth = diagnose(family.base, twin).gauge.elements["residual"]
    assert found.gauge.elements["residual"] == truth


def test_activations_speak_where_weights_do_not(family, monkeypatch):
    pair = family.everywhere()
    truth = diagnose(pair.source, pair.target).gauge
    monkeypatch.setattr(
        stages, "STAGES", (stages.by_config, stages.by_activations, stages.by_function)
    )
    found = diagnose(pair.source, pair.target, text=TEXT)
    assert found.gauge.elements == truth.elements
    assert found.verdict == "signed_permutation"
    assert found.stage == "activations"
    assert found.next.endswith("--from activations")
    other = family.unrelated()
    assert diagnose(other.source, other.target, text=TEXT).verdict == "unrelated"


def test_a_rotation_of_few_tokens_is_known_by_its_function(tmp_path):
    settings = labelled.FAMILIES["llama"] | {"vocab_size": 60}
    model = labelled.build("llama", 0, settings).eval()
    model.save_pretrained(tmp_path / "a")
    labelled.rotated(model).save_pretrained(tmp_path / "b")
    found = diagnose(tmp_path / "a", tmp_path / "b")
    assert found.verdict == "dense_rotation"
    assert found.confidence <= 0.5
    labelled.build("llama", 1, settings).save_pretrained(tmp_path / "c")
    assert diagnose(tmp_path / "a", tmp_path / "c").verdict == "unrelated"


def test_a_rotation_beats_a_gauge_of_some_coordinates(family, tmp_path):
    """Half of the stream rotated: what is left in place is no reason to call it portable."""
    half = labelled.WIDTH // 2 - 8
    rotation = torch.eye(labelled.WIDTH, dtype=torch.float64)
    rotation[:half, :half] = labelled.random_rotation(half, 0, keep_mean=False)
    model = labelled.rotated(labelled.load(family.base), rotation=rotation)
    found = diagnose(family.base, labelled.save(model, tmp_path / "half"), text=TEXT)
    assert found.evidence[1]["sure_fraction"] > 0.5
    assert found.verdict == "dense_rotation"


def test_text_is_cut_where_positions_end(tmp_path):
    settings = labelled.FAMILIES["gpt2"] | {"n_positions": 16}
    ends = [
        labelled.save(labelled.build("gpt2", seed, settings), tmp_path / str(seed))
        for seed in (0, 1)
    ]
    found = diagnose(*ends, text=TEXT)
    assert found.verdict == "unrelated"
    assert found.stage == "activations"
    assert "r2" in found.evidence[-1]


def test_fits_of_rotations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 32, generator=generator, dtype=torch.float64)
    y = torch.randn(400, 32, generator=generator, dtype=torch.float64)
    turned = x @ labelled.random_rotation(32, 1, keep_mean=False)
    fit = TokenRows(x, turned).rotation
    assert fit.r2 > 1 - 1e-9
    assert fit.gram_difference < 1e-9
    assert TokenRows(x, turned + 0.3 * y).rotation.r2 == pytest.approx(1 - 0.09 / 1.09, abs=0.03)
    assert TokenRows(x, y).rotation.r2 < 0
    assert TokenRows(x[:40], turned[:40]).rotation is None
    common = 30 * y[:, :1]  # a direction in which all vocabularies vary
    strangers = TokenRows(x + common, torch.roll(y, 1, 0) + common)
    assert strangers.rotation.gram_difference < 0.2
    assert strangers.rotation.r2 < 0
    element = SignedPermutation.random(32, seed=2)
    rows = TokenRows(x, element.apply(x, 1))
    assert rows.explained_by(element) == 1.0
    assert rows.explained_by(SignedPermutation.identity(32)) < 0


def test_functions_are_compared_token_by_token(family):
    """Models with their tokens in another order agree once rows are paired, and only then."""
    pair = family.reordered()
    ends = Checkpoint.open(family.light().target), Checkpoint.open(pair.target)
    moved = stages.moved_tokens(*ends)
    same = compare_functions(*ends, moved, text=TEXT)
    assert same.r2 > 0.9999
    assert same.same_prediction == 1.0
    assert compare_functions(*ends, None, text=TEXT).r2 < 0.5


# ---- refusals and the command line ---------------------------------------------------------------


def test_what_cannot_be_read_is_refused(family, tmp_path):
    quantised = with_config(
        shutil.copytree(family.base, tmp_path / "q"), quantization_config={"quant_method": "gptq"}
    )
    with pytest.raises(SignedAlignError, match="is quantised"):
        diagnose(family.base, quantised)
    with pytest.raises(SignedAlignError, match="cannot be read"):
        diagnose(family.base, family.base, text=tmp_path / "none.txt")
    with pytest.raises(SignedAlignError, match="cannot use the device 'nowhere'"):
        diagnose(family.base, family.base, device="nowhere")

    def broken(tensors):
        tensors["model.embed_tokens.weight"][3] = float("nan")
        return tensors

    with pytest.raises(SignedAlignError, match="NaN"):
        diagnose(family.base, rewritten(family.base, tmp_path / "nan", broken))


KEYS = {
    "verdict", "coordinates", "confidence", "stage", "spaces", "evidence", "source", "target",
    "next", "advice", "warnings",
}  # fmt: skip


def test_the_command(family, tmp_path):
    pair, plot = family.signed(), tmp_path / "margins.png"
    result = run("diagnose", pair.source, pair.target, "--json", "--plot", plot)
    data = json.loads(result.stdout)
    assert data.keys() >= KEYS
    assert data["verdict"] == "signed_permutation"
    assert plot.read_bytes().startswith(b"\x89PNG")
    run("diagnose", pair.source, pair.target, "--plot", plot, code=2)
    said = run("diagnose", pair.source, pair.target).stdout.splitlines()
    assert said[0].startswith("signed_permutation: ")
    assert said[-1] == f"Next: {data['next']}"


def test_the_command_on_strangers(family, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    pair, plot = family.unrelated(), tmp_path / "margins.png"
    options = ["--text", tmp_path / "text.txt", "--tokens", 512, "--plot", plot]
    data = json.loads(run("diagnose", pair.source, pair.target, *options, "--json").stdout)
    assert data["verdict"] == "unrelated"
    assert data["next"] is None
    assert data["spaces"] == {}
    assert any("no gauge" in warning for warning in data["warnings"])
    assert not plot.exists()
