"""What outputs say of their making, and how much of them stands on weak coordinates."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from signed_align import Gauge, apply, port, recover, scramble
from signed_align.adapters.confidence import MOST_WEAK_ENERGY
from signed_align.errors import (
    ArtifactError,
    GaugeError,
    SignedAlignWarning,
    UnreliableGaugeError,
)
from signed_align.model_card import HEADING, add_section
from signed_align.provenance import Record, text_hash
from tests import tiny
from tests.test_cli import fails, run, run_json
from tests.test_lora import adapter_on
from tests.test_recovery import TEXT, add_tokenizer

HOOK = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model with a tokenizer, its twin, the true gauge as a file, an adapter and a text."""
    root = tmp_path_factory.mktemp("provenance")
    add_tokenizer(tiny.save(tiny.build("qwen3", attention_bias=False), root / "model"))
    scramble(root / "model", root / "twin", seed=1).save(root / "true.safetensors")
    adapter_on(root / "model", root / "adapter", target_modules=["q_proj", "down_proj"])
    (root / "text.txt").write_text("\n".join(TEXT))
    return root


def test_a_gauge_says_how_it_was_made(work, tmp_path):
    out = tmp_path / "g.safetensors"
    text = ["--text", work / "text.txt"]
    run("gauge", work / "model", work / "twin", "-o", out, *text)
    made = Gauge.load(out)
    assert made.provenance["group"] == "signed_permutation"
    assert made.provenance["objective"] == "sign_marginalized"
    assert made.provenance["text_hash"] == text_hash(TEXT)
    assert made.provenance["command"].startswith(f"signed-align gauge {work / 'model'}")
    assert made.provenance["versions"]["signed-align"]
    assert made.provenance["verification"]["claim"] == "equal"
    for end in (made.source, made.target):
        assert len(end.fingerprint) == len(end.config_hash) == 64
    assert made.source.config_hash == made.target.config_hash


def test_a_revision_is_that_of_the_hub_cache(work, tmp_path):
    snapshot = tmp_path / "models--x--y" / "snapshots" / "0123abc"
    shutil.copytree(work / "model", snapshot)
    gauge = recover(snapshot, work / "twin")
    assert (gauge.source.revision, gauge.target.revision) == ("0123abc", "")


def test_the_chain_of_a_ported_artifact(work, tmp_path):
    gauge, there, back = work / "true.safetensors", tmp_path / "there", tmp_path / "back"
    run("port", work / "adapter", "--gauge", gauge, "-o", there)
    run("port", there, "--gauge", gauge, "-o", back, "--inverse")
    shown = run_json("inspect", back)
    names = [(step["source"]["name"], step["target"]["name"]) for step in shown["moves"]]
    model, twin = str(work / "model"), str(work / "twin")
    assert names == [(model, twin), (twin, model)]
    assert [step["gauge"]["hash"] for step in shown["moves"]] == [
        Gauge.load(gauge).content_hash, Gauge.load(gauge).content_hash,
    ]  # fmt: skip
    assert all(step["command"].startswith("signed-align port ") for step in shown["moves"])
    assert shown["changed"] == []
    said = run("inspect", back).stdout
    assert said.count("\n  port ") == 2
    # what it was moved to is a proof of where it is
    again = port(there, Gauge.load(gauge), tmp_path / "again", inverse=True)
    assert again["source_verified"]
    with pytest.raises(GaugeError, match="was moved to the coordinates of"):
        port(there, Gauge.load(gauge), tmp_path / "twice")


def test_a_change_after_the_move_is_noticed(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    port(work / "adapter", gauge, tmp_path / "there")
    file = tmp_path / "there" / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    assert run_json("inspect", tmp_path / "there")["changed"] == ["adapter_model.safetensors"]
    report = port(tmp_path / "there", gauge, tmp_path / "back", inverse=True)
    assert any("changed since" in note for note in report["notes"])


def test_records_of_checkpoints_and_merges(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    apply(gauge, work / "model", tmp_path / "moved")
    (step,) = Record.of(tmp_path / "moved").steps
    assert (step["action"], step["source"]["name"]) == ("apply", str(work / "model"))
    assert step["target"]["fingerprint"] == gauge.target.fingerprint
    recipe = {
        "merge_method": "signed_align",
        "dtype": "float32",
        "models": [
            {"model": str(work / name), "parameters": {"weight": 1}} for name in ("model", "twin")
        ],
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    data = run_json("merge", tmp_path / "recipe.yml", tmp_path / "merged")
    assert data["verification"]["claim"] == "equal"
    assert data["verification"]["difference"] < 1e-4
    shown = run_json("inspect", tmp_path / "merged")
    (step,) = shown["moves"]
    assert [model["name"] for model in step["models"]] == [str(work / "model"), str(work / "twin")]
    assert step["target"]["name"] == str(tmp_path / "merged")
    assert step["reference"]["name"] == str(work / "model")
    assert len(step["gauges"]) == 1
    assert shown["changed"] == []
    card = (tmp_path / "merged" / "README.md").read_text()
    assert card.count(HEADING) == 1
    assert "Verified (equal: logits)" in card


def test_the_model_card_of_an_adapter(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    adapter = shutil.copytree(work / "adapter", tmp_path / "adapter")
    model = work / "model"
    (adapter / "README.md").write_text(
        f"---\nbase_model: {model}\nlicense: mit\n---\n# Mine\n\nMade on {model}.\n"
    )
    port(adapter, gauge, tmp_path / "there")
    card = (tmp_path / "there" / "README.md").read_text()
    assert card.startswith(
        f"---\nbase_model: {work / 'twin'}\nlicense: mit\n---\n# Mine\n\nMade on"
    )
    assert card.count(HEADING) == 1
    assert "It was not verified by running it" not in card  # its weights were compared
    port(tmp_path / "there", gauge, tmp_path / "back", inverse=True)
    card = (tmp_path / "back" / "README.md").read_text()
    assert f"base_model: {model}\n" in card
    assert card.count(HEADING) == 1
    assert "all 2 steps" in card


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "x"}', "\udcff", '{"a":' * 5000])
def test_a_damaged_record_is_refused(work, tmp_path, text):
    adapter = shutil.copytree(work / "adapter", tmp_path / "adapter")
    (adapter / "signed_align.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArtifactError, match="not a provenance record"):
        port(adapter, Gauge.load(work / "true.safetensors"), tmp_path / "out")
    assert "not a provenance record" in fails("inspect", adapter, match="record")


# ---- confidence ----------------------------------------------------------------------------------


def with_margins(gauge, weak):
    margin = torch.ones(tiny.WIDTH)
    margin[weak] = 0.01
    return replace(gauge, margins={"residual": margin})


def test_weak_energy_is_that_of_the_coordinates_the_artifact_uses(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    element = gauge.element("residual")
    vector = torch.zeros(tiny.WIDTH)
    vector[element.perm[7]] = 3.0  # target coordinate 7
    vector[element.perm[9]] = 4.0
    save_file({HOOK: vector}, tmp_path / "v.safetensors")
    options = {"made_on": str(work / "model")}

    def ported(weak, **more):
        return port(
            tmp_path / "v.safetensors", with_margins(gauge, weak), tmp_path / "out.safetensors",
            force=True, **options, **more,
        )  # fmt: skip

    assert port(
        tmp_path / "v.safetensors", gauge, tmp_path / "out.safetensors", **options
    )["weak_energy"] is None  # fmt: skip
    assert ported([1, 2, 3])["weak_energy"] == 0
    with pytest.raises(UnreliableGaugeError, match=r"36\.0% of the energy.*--accept-weak") as found:
        ported([7])
    assert found.value.details["verdict"]["weakest_tensor"] == HOOK
    assert ported([7], accept_weak=True)["weak_energy"] == pytest.approx(9 / 25)
    with pytest.raises(UnreliableGaugeError, match=r"64\.0%"):
        ported([9])


def test_weak_energy_of_every_kind_of_artifact(work, tmp_path):
    """All of it where every coordinate is weak; none where none is; lists count their entries."""
    gauge = Gauge.load(work / "true.safetensors")
    element = gauge.element("residual")
    listed = [int(element.perm[j]) for j in (0, 1, 2, 3)]
    (tmp_path / "list.json").write_text(json.dumps({"hook": HOOK, "indices": listed}))
    model = tiny.load(work / "model").train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    options = {"made_on": str(work / "model"), "accept_weak": True, "force": True}
    for artifact in (tmp_path / "list.json", tmp_path / "optimizer.pt", work / "adapter"):
        out = tmp_path / "out" / artifact.name

        def energy(weak, artifact=artifact, out=out):
            return port(artifact, with_margins(gauge, weak), out, **options)["weak_energy"]

        assert energy([]) == 0
        assert energy(list(range(tiny.WIDTH))) == 1
        assert 0 < energy([0, 5]) < 1
    assert energy([0, 5]) < MOST_WEAK_ENERGY
    out = tmp_path / "out" / "list.json"
    report = port(tmp_path / "list.json", with_margins(gauge, [1]), out, **options)
    assert report["weak_energy"] == 0.25


# ---- verification --------------------------------------------------------------------------------


def test_a_gauge_with_a_wrong_claim_is_not_written(work, tmp_path):
    pair = [work / "model", work / "twin"]
    result = run(
        "gauge", *pair, "-o", tmp_path / "g", "--objective", "permutation", "--verify", "--json",
        code=4,
    )  # fmt: skip
    measured = json.loads(result.stdout)
    assert measured["exit_code"] == 4
    assert measured["verification"]["against"] > 0.3
    assert not (tmp_path / "g").exists()
    # a baseline is known to be wrong, so that it is not run unless it is asked for
    run("gauge", *pair, "-o", tmp_path / "g", "--objective", "permutation")


def test_a_fine_tune_is_measured(work, tmp_path):
    model = tiny.load(work / "twin")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    add_tokenizer(tiny.save(model, tmp_path / "tuned"))
    out = tmp_path / "g.safetensors"
    data = run_json("gauge", work / "model", tmp_path / "tuned", "-o", out, "--verify")
    found = data["verification"]
    assert found["claim"] == "similar"
    assert 0.8 < found["explained"] < 1
    ported = run_json(
        "port", work / "adapter", "--gauge", out, "-o", tmp_path / "ported", "--verify"
    )
    (effect,) = ported["verification"]["effects"]
    assert 0.5 < effect["arrives"] < 1.5
    assert "of its effect arrives" in run(
        "port", work / "adapter", "--gauge", out, "-o", tmp_path / "p", "--verify"
    ).stdout  # fmt: skip


def test_verify_says_what_it_cannot_run(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    gone = replace(gauge, target=replace(gauge.target, name="nobody/twin"))
    gone.save(tmp_path / "gone.safetensors")
    arguments = ["port", work / "adapter", "--gauge", tmp_path / "gone.safetensors"]
    assert "not at hand" in run(*arguments, "-o", tmp_path / "a").stdout
    fails(*arguments, "-o", tmp_path / "b", "--verify", match="nobody/twin is not at hand")
    assert not (tmp_path / "b").exists()


# ---- several artifacts, changes, and cards -------------------------------------------------------


def test_each_artifact_of_a_directory_has_its_record(work, tmp_path):
    """Moved on as a whole or one by one, each is known to be where it is."""
    gauge = Gauge.load(work / "true.safetensors")
    many = tmp_path / "many"
    shutil.copytree(work / "adapter", many / "adapter")
    save_file({HOOK: torch.randn(tiny.WIDTH)}, many / "v.safetensors")
    port(many, gauge, tmp_path / "there", made_on=str(work / "model"))
    for what in ("there", "there/v.safetensors", "there/adapter"):
        with pytest.raises(GaugeError, match="was moved to the coordinates of"):
            port(tmp_path / what, gauge, tmp_path / "twice")
    shown = run_json("inspect", tmp_path / "there" / "v.safetensors")
    assert len(shown["moves"]) == 1
    port(tmp_path / "there", gauge, tmp_path / "back", inverse=True)
    assert (many / "v.safetensors").read_bytes() == (tmp_path / "back/v.safetensors").read_bytes()
    for what in ("adapter", "v.safetensors"):
        steps = Record.of(tmp_path / "back" / what).steps
        assert [step["target"]["name"] for step in steps] == [
            str(work / "twin"),
            str(work / "model"),
        ]
    # a file that is renamed with its record is still the same
    for name in ("v.safetensors", "v.safetensors.signed_align.json"):
        (tmp_path / "there" / name).rename(tmp_path / name.replace("v.", "w."))
    assert run_json("inspect", tmp_path / "w.safetensors")["changed"] == []
    report = port(tmp_path / "w.safetensors", gauge, tmp_path / "x.safetensors", inverse=True)
    assert report["source_verified"]
    assert report["made_on"] == str(work / "twin")


def test_a_record_does_not_speak_for_what_was_made_anew(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    port(work / "adapter", gauge, tmp_path / "there")
    # trained on the first model, and saved to the place of the one that was moved
    shutil.copy(work / "adapter" / "adapter_config.json", tmp_path / "there")
    file = tmp_path / "there" / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(GaugeError, match="other end of the gauge"):
        port(tmp_path / "there", gauge, tmp_path / "wrong", inverse=True)
    report = port(tmp_path / "there", gauge, tmp_path / "right")
    assert any("changed since" in note for note in report["notes"])
    with pytest.raises(GaugeError, match="other end of the gauge"):
        port(work / "adapter", gauge, tmp_path / "said", made_on=str(work / "twin"))


def test_a_model_that_changed_after_its_move_is_said(work, tmp_path):
    apply(Gauge.load(work / "true.safetensors"), work / "model", tmp_path / "moved")
    assert run_json("inspect", tmp_path / "moved")["changed"] == []
    file = tmp_path / "moved" / "model.safetensors"
    weights = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    assert run_json("inspect", tmp_path / "moved")["changed"] == ["weights"]


def test_any_source_warns_of_what_is_at_hand_and_elsewhere(work, tmp_path):
    gauge = Gauge.load(work / "true.safetensors")
    adapter_on(work / "twin", tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.warns(SignedAlignWarning, match="probably wrong"):
        port(tmp_path / "adapter", gauge, tmp_path / "moved", any_source=True)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "named",
    [
        "base_model: OLD",
        "base_model: 'OLD'",
        "base_model: OLD  # the base",
        "base_model: OLD/",
        "base_model: [OLD, z]",
        "base_model:\n- OLD\n- z",
        "base_model: OLD\ntags:\n- base_model:adapter:OLD\n- lora",
    ],
)
def test_cards_of_every_form(tmp_path, named, ending):
    card = tmp_path / "README.md"
    text = f"---\n{named}\nlicense: mit\n---\n# Mine\n\n```\n{HEADING}\n```\n\n### More\n\nAfter."
    card.write_bytes(text.replace("OLD", "me/old").replace("\n", ending).encode())
    step = {
        "action": "port", "kind": "adapter", "source": {"name": "me/old"},
        "target": {"name": "b: c #d"}, "gauge": None,
    }  # fmt: skip
    for old, new in (("me/old", "b: c #d"), ("b: c #d", "me/new")):
        add_section(tmp_path, Record((step,)), base=(old, new))
        raw = card.read_bytes().decode()
        assert ("\r\n" in raw) == (ending == "\r\n")
        assert raw.count("\n") == raw.count(ending)
        metadata, body = raw.replace("\r\n", "\n").split("---\n", 2)[1:]
        if new == "me/new":
            found = yaml.safe_load(metadata)
            assert "me/new" in (found["base_model"], *found["base_model"])
            assert "me/old" not in metadata
    assert f"```\n{HEADING}\n```\n\n### More\n\nAfter.\n\n{HEADING}\n\nThis adapter" in body
    assert body.count(HEADING) == 2
