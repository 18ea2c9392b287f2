"""Parallel transport: neighbours' gauges composed are right where the ends cannot be matched."""

import shutil
import tempfile
import weakref
from dataclasses import replace
from functools import reduce

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from signed_align import (
    Gauge,
    SignedAlignError,
    SignedPermutation,
    recover,
    scramble,
    trajectory,
    transport_along,
)
from signed_align.errors import CheckpointError, GaugeError, SignedAlignWarning
from signed_align.trajectory import path_of_runs, plot_trajectory
from tests import tiny
from tests.test_cli import fails, run, run_json
from tests.test_recovery import CHARACTERS, TEXT, add_tokenizer
from tests.test_training import Sentences

RIGHT = {"permutation_accuracy": 1.0, "sign_accuracy": 1.0}
STEPS = (5, 10, 50, 100)
METHODS = ["activations", "weights"]


def text_for(method):
    return TEXT if method == "activations" else None


def blend(start, end, share, path, tokenizer=True):
    """A checkpoint on the straight line between two models' weights."""
    model = tiny.build("llama")
    ends = start.state_dict(), end.state_dict()
    model.load_state_dict(
        {name: torch.lerp(ends[0][name], ends[1][name], share) for name in ends[0]}
    )
    tiny.save(model, path)
    return add_tokenizer(path) if tokenizer else path


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A model, three twins made one from another, and the true gauges between neighbours."""
    root = tmp_path_factory.mktemp("twins")
    path = [add_tokenizer(tiny.save(tiny.build("llama"), root / "0"))]
    truths = []
    for number in (1, 2, 3):
        truths.append(scramble(path[-1], root / str(number), seed=number))
        path.append(root / str(number))
    return path, truths


@pytest.fixture(scope="module")
def drift(tmp_path_factory):
    """From one random model to an unrelated one in steps, each seen in coordinates of its own."""
    root = tmp_path_factory.mktemp("drift")
    start, end = tiny.build("llama", seed=0), tiny.build("llama", seed=1)
    path, turns = [], []
    for number in range(9):
        plain = blend(start, end, number / 8, root / f"plain-{number}")
        path.append(root / str(number))
        turns.append(scramble(plain, path[-1], seed=number))
    return path, turns[0].inverse().element("residual").then(turns[-1].element("residual"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base with a tokenizer, two runs to unrelated models, and two that have hardly begun."""
    root = tmp_path_factory.mktemp("runs")
    start = tiny.build("llama", seed=0)
    add_tokenizer(tiny.save(start, root / "base"))
    for name, seed, reach in (
        ("far-a", 1, 1),
        ("far-b", 2, 1),
        ("near-a", 1, 0.2),
        ("near-b", 2, 0.2),
    ):
        end = tiny.build("llama", seed=seed)
        for number, step in enumerate(STEPS, 1):
            place = root / name / f"checkpoint-{step}"
            blend(start, end, reach * number / len(STEPS), place, tokenizer=False)
        (root / name / "runs").mkdir()
        shutil.copy(place / "config.json", root / name)
    (root / "text.txt").write_text("\n".join(TEXT))
    return root


def along(runs, name, **settings):
    path, base = path_of_runs(runs / f"{name}-a", runs / f"{name}-b", runs / "base")
    return transport_along(path, base=base, text=TEXT, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_along_twins_the_true_gauges_are_composed(twins, method):
    path, truths = twins
    truth = reduce(Gauge.then, truths)
    found = transport_along(path, base=2, method=method, text=text_for(method), truth=truth)
    for step, true_step in zip(found.steps, truths, strict=True):
        assert step.gauge.elements == true_step.elements
    assert found.gauge.elements == found.endpoint.elements == truth.elements
    assert found.accuracy == {"transport": RIGHT, "endpoint": RIGHT, "via_base": RIGHT}
    assert found.holonomy.element("residual").is_identity
    assert found.not_returned == found.lost == []
    assert not truth.element("residual").is_identity
    assert (found.gauge.source, found.gauge.target) == (truth.source, truth.target)


@pytest.mark.filterwarnings("ignore:.*were lost")
@pytest.mark.parametrize("method", METHODS)
def test_transport_is_right_where_the_ends_are_unrelated(drift, method):
    path, truth = drift
    found = transport_along(path, method=method, text=text_for(method))
    assert found.gauge.element("residual").agreement(truth) == RIGHT
    assert len(found.lost) <= 1
    assert found.endpoint.element("residual").agreement(truth)["sign_accuracy"] < 0.3


@pytest.mark.filterwarnings("ignore:.*were lost")
def test_a_composed_margin_is_the_smallest_along_the_path(drift):
    found = transport_along(drift[0], text=TEXT)
    for coordinate in range(tiny.WIDTH):
        place, smallest = coordinate, 1.0
        for step in reversed(found.steps):
            smallest = min(smallest, float(step.gauge.margins["residual"][place]))
            place = int(step.gauge.element("residual").perm[place])
        assert float(found.gauge.margins["residual"][coordinate]) == smallest


@pytest.mark.parametrize("ends", [(0, 3), (0, 1)])
def test_the_endpoint_is_what_recover_finds(twins, ends):
    """Also for a path of one step, where it is the transported gauge."""
    path, _ = twins
    found = transport_along(path[ends[0] : ends[1] + 1], text=TEXT).endpoint
    direct = recover(path[ends[0]], path[ends[1]], text=TEXT)
    assert found.elements == direct.elements
    assert torch.equal(found.margins["residual"], direct.margins["residual"])
    assert {key: found.provenance[key] for key in ("tokens", "samples", "left_out")} == {
        key: direct.provenance[key] for key in ("tokens", "samples", "left_out")
    }


def test_tokens_massive_in_either_of_a_pair_are_left_out_of_both(twins, tmp_path):
    path, _ = twins
    for number, token in ((0, 3), (1, 4)):
        shutil.copytree(path[number], tmp_path / str(number))
        file = tmp_path / str(number) / "model.safetensors"
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][token] *= 1e4
        save_file(tensors, file, metadata={"format": "pt"})
    text = [line.replace("!", "#").replace('"', "#") for line in TEXT] + ["!a", '"b']
    found = transport_along([tmp_path / "0", tmp_path / "1"], text=text, max_tokens=5000)
    # both tokens, in the embedding and behind the first block; the final norm makes them alike
    assert found.endpoint.provenance["left_out"] == 4
    assert found.gauge.provenance["left_out"] == [4]
    direct = recover(tmp_path / "0", tmp_path / "1", text=text, max_tokens=5000)
    assert found.endpoint.provenance["samples"] == direct.provenance["samples"]
    assert torch.equal(found.endpoint.margins["residual"], direct.margins["residual"])


# ---- two runs ------------------------------------------------------------------------------------


def test_two_runs_are_joined_at_their_base_in_the_order_of_steps(runs):
    path, base = path_of_runs(runs / "far-a", runs / "far-b", runs / "base")
    assert base == 4
    names = [f"far-a/checkpoint-{step}" for step in reversed(STEPS)]
    names += ["base", *(f"far-b/checkpoint-{step}" for step in STEPS)]
    assert path == [str(runs / name) for name in names]


@pytest.mark.filterwarnings("ignore:.*were lost")
def test_runs_to_unrelated_models_are_transported_and_the_baselines_fail(runs):
    found = along(runs, "far", truth="identity")
    assert found.accuracy["transport"] == RIGHT
    assert found.accuracy["endpoint"]["sign_accuracy"] < 0.3
    assert found.accuracy["via_base"]["sign_accuracy"] < 0.3
    assert all(step.accuracy == RIGHT for step in found.steps)
    # a coordinate comes back where the direct match agrees with transport
    wrong = found.endpoint.element("residual").agreement(found.gauge.element("residual"))
    returned = found.to_dict()["holonomy"]["returned_fraction"]
    assert returned == pytest.approx(wrong["sign_accuracy"])
    assert len(found.not_returned) == round((1 - returned) * tiny.WIDTH)


@pytest.mark.filterwarnings("ignore:.*were lost")
def test_the_way_round_runs_that_stay_close_is_the_identity(runs):
    found = along(runs, "near")
    assert found.holonomy.element("residual").is_identity
    assert found.not_returned == []
    assert found.holonomy.source.name == found.holonomy.target.name == str(runs / "base")
    assert found.accuracy == {}


@pytest.mark.filterwarnings("ignore:.*were lost")
def test_a_coordinate_that_does_not_come_back_is_named_in_the_base(runs, monkeypatch):
    """A wrong direct match of two coordinates shows at these two, seen from the base."""
    true_match = trajectory._match

    def swapped(source, seen, target, *rest):
        gauge = true_match(source, seen, target, *rest)
        if "near-a/checkpoint-100" in source.name and "near-b/checkpoint-100" in target.name:
            perm = torch.arange(tiny.WIDTH)
            perm[[3, 7]] = perm[[7, 3]]
            swap = SignedPermutation(perm, torch.ones(tiny.WIDTH, dtype=torch.int8))
            gauge = replace(gauge, elements={"residual": gauge.element("residual").then(swap)})
        return gauge

    monkeypatch.setattr(trajectory, "_match", swapped)
    assert along(runs, "near").not_returned == [3, 7]


@pytest.mark.filterwarnings("ignore:.*were lost")
@pytest.mark.usefixtures("one_thread")
def test_runs_that_trainer_wrote(runs, tmp_path, capsys):
    """Hot enough that neighbours are easier to match than the ends; errors are flagged."""
    for name, seed in (("a", 0), ("b", 1)):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=30, save_steps=6, learning_rate=1e-2,
            seed=seed, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(tiny.load(runs / "base"), arguments, train_dataset=Sentences()).train()
    capsys.readouterr()  # Trainer prints its losses
    path, base = path_of_runs(tmp_path / "a", tmp_path / "b", runs / "base")
    assert (len(path), base) == (11, 5)
    assert path[0].endswith("a/checkpoint-30")
    found = transport_along(path, base=base, text=TEXT, truth="identity")
    scores = {name: one["sign_accuracy"] for name, one in found.accuracy.items()}
    assert scores["transport"] >= max(scores["endpoint"], scores["via_base"])
    element = found.gauge.element("residual")
    wrong = (element.perm != torch.arange(tiny.WIDTH)) | (element.sign < 0)
    assert set(wrong.nonzero().flatten().tolist()) <= set(found.lost)


# ---- what is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_coordinate_that_turns_to_noise_is_lost_and_says_so(tmp_path, method):
    """Coordinate 11 of the third checkpoint is noise; the fourth is a twin of the second."""
    model = tiny.build("llama", tie_word_embeddings=True)
    with torch.no_grad():  # blocks that add little, so that the embedding decides
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.01)
    path = [add_tokenizer(tiny.save(model, tmp_path / "0")), tmp_path / "1", tmp_path / "2"]
    scramble(path[0], path[1], seed=1)
    shutil.copytree(path[1], path[2])
    file = path[2] / "model.safetensors"
    tensors = load_file(file)
    noise = torch.randn(tiny.VOCABULARY, generator=torch.Generator().manual_seed(3))
    tensors["model.embed_tokens.weight"][:, 11] = noise * tiny.WIDTH**-0.5
    save_file(tensors, file, metadata={"format": "pt"})
    truth = scramble(path[1], tmp_path / "3", seed=2)
    path.append(tmp_path / "3")

    text = text_for(method)
    with pytest.warns(SignedAlignWarning, match="1 of 48 coordinates were lost"):
        found = transport_along(path, method=method, text=text)
    (lost,) = found.lost
    assert truth.element("residual").perm[lost] == 11
    assert [step.lost for step in found.steps] == [0, 1, 1]
    assert found.gauge.provenance["lost"] == [lost]
    found.gauge.save(tmp_path / "gauge")
    loaded = Gauge.load(tmp_path / "gauge")
    weak = loaded.margins["residual"] < loaded.provenance["lost_below"]
    assert weak.nonzero().flatten().tolist() == loaded.provenance["lost"] == [lost]
    # the ends are twins, so matching them directly loses nothing
    assert (found.endpoint.margins["residual"] > 0.05).all()
    with pytest.warns(SignedAlignWarning, match="48 of 48"):
        assert len(transport_along(path, method=method, text=text, lost_below=1).lost) == 48


# ---- models one at a time, activations once ------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*were lost")
def test_each_model_runs_once_and_few_activations_are_kept(runs, monkeypatch):
    loaded, alive, most = [], [], []
    load_model, activations = trajectory.load_model, trajectory._activations

    def counted(checkpoint, **settings):
        loaded.append(checkpoint.name)
        most.append(sum(reference() is not None for reference in alive))
        return load_model(checkpoint, **settings)

    def watched(*arguments):
        result = activations(*arguments)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setattr(trajectory, "load_model", counted)
    monkeypatch.setattr(trajectory, "_activations", watched)
    along(runs, "near")
    path, _ = path_of_runs(runs / "near-a", runs / "near-b", runs / "base")
    assert loaded == path
    # the first, the base and the last neighbour, while the next model runs
    assert most == [0, 1, 2, 2, 2, 2, 3, 3, 3]


def test_large_activations_wait_in_a_file_that_leaves_nothing(twins, tmp_path, monkeypatch):
    path, _ = twins
    at_hand = transport_along(path, text=TEXT)
    monkeypatch.setattr(trajectory, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mapped = []
    in_a_file = trajectory._in_a_file
    monkeypatch.setattr(
        trajectory, "_in_a_file", lambda blocks: mapped.append(1) or in_a_file(blocks)
    )
    in_files = transport_along(path, text=TEXT)
    assert len(mapped) == len(path)
    assert list(tmp_path.iterdir()) == []
    assert in_files.gauge.elements == at_hand.gauge.elements
    assert torch.equal(in_files.gauge.margins["residual"], at_hand.gauge.margins["residual"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"cannot be written to .*none.*TMPDIR"):
        transport_along(path, text=TEXT)


# ---- refusals ------------------------------------------------------------------------------------


def test_what_is_no_path_is_refused(twins):
    path, truths = twins
    for bad, settings, match in [
        (path[:1], {}, "two checkpoints or more; got 1"),
        (path, {"base": 3}, "between the ends"),
        (path, {"lost_below": float("nan")}, "got nan"),
        (path, {"method": "weights", "text": TEXT}, "no part"),
        (path, {"truth": truths[0]}, "target is"),
        (path, {"truth": truths[1]}, "source is"),
    ]:
        with pytest.raises(GaugeError, match=match):
            transport_along(bad, **settings)


@pytest.mark.parametrize(
    ("model_type", "settings", "match"),
    [
        ("gpt2", {}, "a gpt2 model"),
        ("llama", {"num_hidden_layers": 1}, "has 2 layers and .* 1;"),
        ("llama", {"hidden_size": 32}, "48 residual coordinates and .* 32;"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_of_two_architectures_are_refused(
    twins, tmp_path, model_type, settings, match, method
):
    path, _ = twins
    other = add_tokenizer(tiny.save(tiny.build(model_type, **settings), tmp_path / "other"))
    with pytest.raises(CheckpointError, match=match):
        transport_along([*path, other], method=method, text=text_for(method))


def test_tokenizers_must_agree(twins, runs, tmp_path):
    path, _ = twins
    other = shutil.copytree(path[1], tmp_path / "other")
    add_tokenizer(other, CHARACTERS[::-1])
    with pytest.raises(CheckpointError, match="different tokenizers"):
        transport_along([path[0], other, path[2]], text=TEXT)
    bare = [str(runs / "near-a" / f"checkpoint-{step}") for step in STEPS]
    with pytest.raises(CheckpointError, match="none of the 4 checkpoints has a tokenizer"):
        transport_along(bare, text=TEXT)
    # rows of token matrices of the same numbers belong together, unless tokens say otherwise
    assert transport_along(bare, method="weights", truth="identity").accuracy["transport"] == RIGHT
    with pytest.raises(CheckpointError, match=r"has a tokenizer and .*checkpoint-100 has none"):
        transport_along([runs / "base", *bare], method="weights")


def test_weights_that_are_not_finite_are_refused_by_name(twins, tmp_path):
    path, _ = twins
    broken = shutil.copytree(path[1], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"norm\.weight.*broken holds NaN"):
        transport_along([path[0], broken, path[2]], text=TEXT)


def test_runs_without_checkpoints_are_refused(runs, tmp_path):
    for name, match in (("none", "not a directory"), ("empty", "has no checkpoints")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=match):
            path_of_runs(runs / "far-a", tmp_path / name, runs / "base")
    (tmp_path / "empty" / "checkpoint-3").mkdir()
    (tmp_path / "empty" / "checkpoint-3" / "checkpoint-is-incomplete.txt").touch()
    with pytest.raises(CheckpointError, match="not written to its end"):
        path_of_runs(tmp_path / "empty", runs / "far-a", runs / "base")


def test_too_little_text_is_said(twins):
    with pytest.warns(SignedAlignWarning, match="20 tokens for 48 coordinates"):
        transport_along(twins[0][:2], text=TEXT[:1])


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_along_checkpoints(twins, runs, tmp_path):
    path, truths = twins
    reduce(Gauge.then, truths).save(tmp_path / "true")
    arguments = ["transport", *path, "--text", runs / "text.txt", "--truth", tmp_path / "true"]
    data = run_json(*arguments, "-o", tmp_path / "g", "--plot", tmp_path / "plot.png")
    assert data["permutation_accuracy"] == data["sign_accuracy"] == 1.0
    assert data["kinds"]["residual"]["sign_accuracy"] == 1.0
    assert data["accuracy"] == {"transport": RIGHT, "endpoint": RIGHT}
    assert set(data["baselines"]) == {"endpoint"}
    assert data["holonomy"] is None
    assert data["lost"] == data["provenance"]["lost"] == []
    assert [step["target"] for step in data["steps"]] == [str(place) for place in path[1:]]
    for step in data["steps"]:
        assert (
            set(step["margin"]) == set(step["composed_margin"]) == {"min", "q05", "median", "q95"}
        )
        assert step["weak_fraction"] == step["lost"] == 0
        assert step["moved_fraction"] > 0.8
        assert "sign_accuracy" not in step  # a gauge from first to last says nothing in between
    assert Gauge.load(tmp_path / "g").elements == reduce(Gauge.then, truths).elements
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    fails(*arguments, "-o", tmp_path / "g", match="--force")


def test_the_command_along_two_runs(runs, tmp_path):
    arguments = [
        "transport", "--runs", runs / "far-a", runs / "far-b", "--base", runs / "base",
        "--truth", "identity", "--text", runs / "text.txt",
    ]  # fmt: skip
    data = run_json(*arguments, "-o", tmp_path / "g", "--plot", tmp_path / "plot.svg")
    assert set(data["baselines"]) == {"endpoint", "via_base"}
    assert data["baselines"]["via_base"]["sign_accuracy"] < 0.3
    assert data["holonomy"]["not_returned"]
    assert all(
        step["sign_accuracy"] == 1.0 and step["moved_fraction"] == 0 for step in data["steps"]
    )
    assert data["verdict"] == data["provenance"]["verdict"]
    assert data["verdict"]["moved_fraction"] == 0
    lines = run(*arguments, "-o", tmp_path / "h").stdout
    assert "along 9 checkpoints, from activations" in lines
    assert "sure counts the weakest step" in lines
    assert "far-b/checkpoint-100" in lines
    assert f"lost (margin < 0 on the way): {len(data['lost'])} of 48" in lines
    assert "holonomy: 0." in lines
    names = [step["target"] for step in data["steps"]]
    assert data["provenance"]["path"] == [str(runs / "far-a" / "checkpoint-100"), *names]


def test_the_command_lists_what_was_lost(twins, tmp_path):
    path, _ = twins
    arguments = ["transport", *path, "--from", "weights", "--lost-below", "0.999"]
    data = run_json(*arguments, "-o", tmp_path / "g")
    assert data["lost"] == data["provenance"]["lost"] == list(range(48))
    assert data["steps"][0]["lost"] == 48
    assert "48 of 48 coordinates were lost" in data["warnings"][0]
    assert "10, 11, … (36 more with --json)" in run(*arguments, "-o", tmp_path / "h").stdout


def test_the_command_refuses_in_one_sentence(twins, runs, tmp_path):
    path, _ = twins
    out = ["-o", tmp_path / "g"]
    both = ["--runs", runs / "far-a", runs / "far-b"]
    fails("transport", path[0], *out, match="two checkpoints or more; got 1")
    fails("transport", *out, match="either checkpoints")
    fails("transport", *path, *both, "--base", runs / "base", *out, match="either checkpoints")
    fails("transport", *both, *out, match="go together")
    fails("transport", *path, "--base", runs / "base", *out, match="go together")
    fails("transport", "--runs", tmp_path, runs / "far-b", "--base", runs / "base", *out,
          match="has no checkpoints")  # fmt: skip
    fails("transport", *path, *out, "--truth", tmp_path / "none", match="no gauge file")
    fails("transport", *path, *out, "--plot", tmp_path / "p.txt", match="image format")
    fails("transport", *path, "-o", tmp_path / "g.png", "--plot", tmp_path / "g.png",
          match="overlaps")  # fmt: skip
    fails("transport", *path, "-o", path[1] / "g", match="overlaps the input")
    assert list(tmp_path.iterdir()) == []


def test_a_plot_with_and_without_a_truth(twins, tmp_path):
    path, _ = twins
    for name, truth in (("a.png", None), ("b.png", "identity")):
        found = transport_along(path, method="weights", truth=truth)
        plot_trajectory(found, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(SignedAlignError):
        transport_along([])
