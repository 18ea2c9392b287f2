"""Merging through mergekit: aligned inputs, whatever the method does with them."""

import shutil
import threading

import pytest
import torch
import yaml
from mergekit.merge_methods import get, registered_methods
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file

from signed_align import Gauge, SignedAlignError, SignedPermutation, merge, scramble
from signed_align.errors import UnreliableGaugeError
from signed_align.merge_methods.align import GAUGES, AlignedMergeMethod
from tests import tiny
from tests.test_recovery import CHARACTERS, add_tokenizer

QUIET = MergeOptions(quiet=True)
PLAIN = [m.spec.name for m in registered_methods() if not isinstance(m, AlignedMergeMethod)]

# With one fine-tune these return it as it is, so that aligning it would not show.
THREE_MODELS = {"ram", "ramplus_tl", "sce", "model_stock"}


def recipe(path, method, models, base=None, parameters=None, **top):
    """Write a recipe; ``models`` maps paths to their own parameters."""
    content = {
        "merge_method": method,
        "models": [
            {"model": str(model), "parameters": values} if values else {"model": str(model)}
            for model, values in models.items()
        ],
        "dtype": "float32",
        **({"base_model": str(base)} if base else {}),
        **({"parameters": parameters} if parameters else {}),
        **top,
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base, two fine-tunes of it, and one of them scrambled."""
    root = tmp_path_factory.mktemp("family")
    tiny.save(tiny.build("qwen2", tie_word_embeddings=False), root / "base")
    for seed, name in enumerate(["tuned", "second"]):
        model = tiny.build("qwen2", tie_word_embeddings=False)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        tiny.save(model, root / name)
    gauge = scramble(root / "tuned", root / "twin", seed=5)
    gauge.save(root / "gauge.safetensors")
    return root


def merged_logits(tmp_path, name, *arguments, **options):
    file = recipe(tmp_path / f"{name}.yml", *arguments, **options)
    report = merge(file, tmp_path / name, QUIET)
    return tiny.logits(tiny.load(tmp_path / name)), report


def inputs_of(method, models):
    """A recipe's models with the parameters that ``method`` has, and its base."""
    spec = get(method).spec
    known = {parameter.name for parameter in spec.parameters}
    values = {"weight": 0.5, "density": 0.6}
    chosen = {key: value for key, value in values.items() if key in known}
    base = models[0] if spec.contract.base == "required" else None
    return dict.fromkeys(models, chosen), base


@pytest.mark.parametrize("method", [name for name in PLAIN if name != "passthrough"])
def test_merging_a_twin_is_merging_the_original(tmp_path, family, method):
    """Aligned, with a scrambled fine-tune, every method gives what it gives for the fine-tune."""
    options = MergeOptions(quiet=True, random_seed=0)

    def run(name, prefix, other):
        models = [family / "base", family / other]
        if method in THREE_MODELS:
            models.insert(1, family / "second")
        file = recipe(
            tmp_path / f"{name}.yml",
            prefix + method,
            *inputs_of(method, models),
            parameters={"t": 0.5} if method in ("slerp", "nearswap") else None,
        )
        merge(file, tmp_path / name, options)
        return tiny.logits(tiny.load(tmp_path / name))

    expected = run("expected", "", "tuned")
    assert tiny.relative_change(expected, run("aligned", "signed_align_", "twin")) <= 1e-4
    assert tiny.relative_change(expected, run("straight", "", "twin")) > 1e-2


def test_every_registered_method_has_an_aligned_variant():
    for name in PLAIN:
        inner, aligned = get(name).spec, get(f"signed_align_{name}").spec
        assert aligned.parameters[: len(inner.parameters)] == inner.parameters
        added = [parameter.name for parameter in aligned.parameters[len(inner.parameters) :]]
        assert added == ["gauge", "objective", "spaces", "reference", "accept_weak"]
        assert aligned.contract == inner.contract
    assert get("signed_align").inner is get("linear")


def pair(family, **values):
    return {family / "base": {"weight": 1}, family / "twin": {"weight": 1, **values}}


def test_the_output_has_the_coordinates_of_the_first_model_or_of_the_base(tmp_path, family):
    straight, _ = merged_logits(
        tmp_path,
        "plain",
        "linear",
        {family / "base": {"weight": 1}, family / "tuned": {"weight": 1}},
    )
    first, report = merged_logits(tmp_path, "first", "signed_align", pair(family))
    assert report["reference"] == str(family / "base")
    assert tiny.relative_change(straight, first) <= 1e-4
    swapped = dict(reversed(pair(family).items()))
    second, report = merged_logits(tmp_path, "second", "signed_align", swapped)
    assert report["reference"] == str(family / "twin")
    assert tiny.relative_change(straight, second) <= 1e-4
    weights = [
        tiny.load(path).model.norm.weight for path in (tmp_path / "first", tmp_path / "second")
    ]
    assert not torch.allclose(*weights)
    in_tuned, _ = merged_logits(
        tmp_path, "tuned", "ties", {family / "base": {"weight": 1}}, family / "tuned"
    )
    in_twin, report = merged_logits(
        tmp_path, "twin", "signed_align_ties", {family / "base": {"weight": 1}}, family / "twin"
    )
    assert report["reference"] == str(family / "twin")
    assert tiny.relative_change(in_tuned, in_twin) <= 1e-4
    gain = tiny.load(tmp_path / "tuned").model.norm.weight
    moved = (
        Gauge.load(family / "gauge.safetensors").elements["residual"].apply(gain, 0, signed=False)
    )
    torch.testing.assert_close(tiny.load(tmp_path / "twin").model.norm.weight, moved)


@pytest.mark.parametrize("direction", ["as is", "inverted"])
def test_a_gauge_file_is_used_whichever_way_it_leads(tmp_path, family, direction):
    true = Gauge.load(family / "gauge.safetensors")
    file = tmp_path / "g.safetensors"
    (true.inverse() if direction == "inverted" else true).save(file)
    models = {family / "tuned": {"weight": 1}, family / "twin": {"weight": 1, "gauge": str(file)}}
    aligned, report = merged_logits(tmp_path, "aligned", "signed_align", models)
    assert tiny.relative_change(tiny.logits(tiny.load(family / "tuned")), aligned) <= 1e-5
    assert report["gauges"][0]["provenance"]["method"] == "scramble"


def test_objectives(tmp_path, family):
    def run(objective):
        return merged_logits(
            tmp_path,
            objective,
            "signed_align",
            {family / "tuned": {"weight": 1}, family / "twin": {"weight": 1}},
            parameters={"objective": objective},
        )[0]

    truth = tiny.logits(tiny.load(family / "tuned"))
    assert tiny.relative_change(truth, run("sign_marginalized")) <= 1e-5
    for baseline in ("signed", "permutation", "none"):
        assert tiny.relative_change(truth, run(baseline)) > 1e-2, baseline


def test_slices_of_two_models_come_out_in_one_frame(tmp_path, family):
    """A frankenmerge: the lower layer of one model under the upper layer of a twin."""
    content = {
        "merge_method": "signed_align_passthrough",
        "dtype": "float32",
        "slices": [
            {"sources": [{"model": str(family / "tuned"), "layer_range": [0, 1]}]},
            {"sources": [{"model": str(family / "twin"), "layer_range": [1, 2]}]},
        ],
    }
    (tmp_path / "r.yml").write_text(yaml.safe_dump(content))
    merge(tmp_path / "r.yml", tmp_path / "out", QUIET)
    truth = tiny.logits(tiny.load(family / "tuned"))
    assert tiny.relative_change(truth, tiny.logits(tiny.load(tmp_path / "out"))) <= 1e-5


def test_mergekit_alone_refuses_what_it_cannot_place(tmp_path, family):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge

    content = {
        "merge_method": "signed_align_passthrough",
        "models": [{"model": str(family / "twin")}],
    }
    with pytest.raises(SignedAlignError, match="reference"):
        run_merge(MergeConfiguration.model_validate(content), str(tmp_path / "out"), QUIET)


def test_mergekit_itself_runs_the_methods(tmp_path, family):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge

    file = recipe(tmp_path / "r.yml", "signed_align", pair(family))
    content = yaml.safe_load(file.read_text())
    run_merge(MergeConfiguration.model_validate(content), str(tmp_path / "out"), QUIET)
    expected, _ = merged_logits(tmp_path, "expected", "signed_align", pair(family))
    assert torch.equal(expected, tiny.logits(tiny.load(tmp_path / "out")))


def test_a_gauge_is_computed_once_whatever_thread_asks(family, monkeypatch):
    from mergekit.common import ModelReference

    calls = []
    original = GAUGES.__class__.gauge.__globals__["recover_by_weights"]
    monkeypatch.setattr(
        "signed_align.merge_methods.align.recover_by_weights",
        lambda *models, **options: calls.append(models) or original(*models, **options),
    )
    GAUGES.forget()
    twin, base = (ModelReference.parse(str(family / name)) for name in ("twin", "base"))

    def ask():
        ends = GAUGES.checkpoint(twin), GAUGES.checkpoint(base)
        GAUGES.gauge(*ends, None, "sign_marginalized", "residual")

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def foreign_gauge(family, tmp_path):
    Gauge({"residual": SignedPermutation.random(tiny.WIDTH)}).save(tmp_path / "foreign.safetensors")
    return pair(family, gauge=str(tmp_path / "foreign.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda family, path: recipe(path, "signed_align_no", pair(family)), "signed_align_no"),
        (
            lambda family, path: recipe(path, "signed_align", pair(family, gauge="nowhere")),
            "no gauge file",
        ),
        (
            lambda family, path: recipe(path, "signed_align", foreign_gauge(family, path.parent)),
            "not between",
        ),
        (
            lambda family, path: recipe(
                path, "signed_align", pair(family), parameters={"objective": "best"}
            ),
            "sign_marginalized",
        ),
        (
            lambda family, path: recipe(path, "signed_align_slerp", pair(family)),
            "base",
        ),
        (lambda family, path: path.write_text("merge_method: [") and path, "not valid"),
        (lambda family, path: path.write_text("merge_method: linear") and path, "not valid"),
        (lambda family, path: path, "cannot be read"),
    ],
    ids=[
        "method",
        "no gauge",
        "foreign gauge",
        "objective",
        "no base",
        "yaml",
        "no models",
        "file",
    ],
)
def test_a_bad_recipe_is_one_sentence_and_leaves_nothing(tmp_path, family, change, message):
    file = change(family, tmp_path / "r.yml")
    with pytest.raises(SignedAlignError, match=message) as caught:
        merge(file, tmp_path / "out", QUIET)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_weights_that_mergekit_would_drop_are_noticed(tmp_path):
    """mergekit's llama file lists no biases: the merge would load with random ones."""
    source = tiny.save(tiny.build("llama"), tmp_path / "source")
    models = {source: {"weight": 1}}
    with pytest.raises(SignedAlignError, match="left out 14 weights"):
        merge(recipe(tmp_path / "r.yml", "signed_align", models), tmp_path / "out", QUIET)
    sources = [{"model": str(source), "layer_range": [0, 2], "parameters": {"weight": 1}}]
    content = {"merge_method": "signed_align", "slices": [{"sources": sources}]}
    (tmp_path / "s.yml").write_text(yaml.safe_dump(content))
    with pytest.raises(SignedAlignError, match="left out 7 weights"):
        merge(tmp_path / "s.yml", tmp_path / "out", QUIET)
    assert not (tmp_path / "out").exists()


def test_constants_that_mergekit_leaves_out_are_not_missed(tmp_path, family):
    shutil.copytree(family / "base", tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    save_file({**load_file(file), **buffer}, file, metadata={"format": "pt"})
    models = {tmp_path / "old": {"weight": 1}, family / "twin": {"weight": 1}}
    merge(recipe(tmp_path / "r.yml", "signed_align", models), tmp_path / "out", QUIET)


def test_vocabularies_are_not_mixed_before_they_are_aligned(tmp_path, family):
    """mergekit fills a token that one model lacks from another model, before it merges."""
    for name in ("base", "twin"):
        shutil.copytree(family / name, tmp_path / name)
    add_tokenizer(tmp_path / "base")
    add_tokenizer(tmp_path / "twin", CHARACTERS[:60])
    models = {tmp_path / "base": {"weight": 1}, tmp_path / "twin": {"weight": 1}}
    file = recipe(tmp_path / "r.yml", "signed_align", models, tokenizer_source="union")
    with pytest.raises(SignedAlignError, match=r"mix their coordinates|row by row"):
        merge(file, tmp_path / "out", QUIET)
    add_tokenizer(tmp_path / "twin")
    merge(file, tmp_path / "out", QUIET)


def test_relative_paths_are_local_not_hub_ids(tmp_path, family, monkeypatch):
    """mergekit alone would ask the Hub whether there is a model family/base, for its model card."""
    (tmp_path / "family").symlink_to(family)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.repo_exists", lambda *_, **__: pytest.fail("asked"))
    models = {"family/base": {"weight": 1}, "family/twin": {"weight": 1}}
    report = merge(recipe(tmp_path / "r.yml", "signed_align", models), "out", QUIET)
    assert report["reference"] == str(family / "base")
    assert "family/base" in (tmp_path / "out" / "mergekit_config.yml").read_text()


def test_models_of_two_architectures_are_refused(tmp_path, family):
    other = tiny.save(
        tiny.build("qwen2", hidden_size=32, tie_word_embeddings=False), tmp_path / "other"
    )
    models = {family / "base": {"weight": 1}, other: {"weight": 1}}
    file = recipe(tmp_path / "r.yml", "signed_align", models)
    with pytest.raises(SignedAlignError, match="size mismatch"):
        merge(file, tmp_path / "out", MergeOptions(quiet=True, allow_crimes=True))
    assert not (tmp_path / "out").exists()


def test_unrelated_models_are_not_merged_unless_asked_for(tmp_path, family):
    stranger = tiny.save(tiny.build("qwen2", seed=9, tie_word_embeddings=False), tmp_path / "other")
    models = {family / "base": {"weight": 1}, stranger: {"weight": 1}}
    file = recipe(tmp_path / "unrelated.yml", "signed_align", models)
    with pytest.raises(UnreliableGaugeError, match="no reliable gauge"):
        merge(file, tmp_path / "out", QUIET)
    assert not (tmp_path / "out").exists()
    file = recipe(
        tmp_path / "accepted.yml", "signed_align", models, parameters={"accept_weak": True}
    )
    merge(file, tmp_path / "out", QUIET)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("own", "whole", "match"),
    [
        ({"weight": 1, "gague": "g"}, {}, "'gague'.*'gauge' may be meant"),
        ({"weight": 1}, {"objektive": "signed"}, "'objektive'.*'objective' may be meant"),
        ({"weight": 1, "accept_weak": True}, {}, "'accept_weak' for one model.*whole recipe"),
        ({"weight": 1}, {"zzz": 1}, "'zzz'.*take it out"),
    ],
)
def test_parameters_that_would_be_ignored_are_refused(tmp_path, family, own, whole, match):
    models = {family / "base": {"weight": 1}, family / "tuned": own}
    file = recipe(tmp_path / "r.yml", "signed_align", models, parameters=whole)
    with pytest.raises(SignedAlignError, match=match):
        merge(file, tmp_path / "out", QUIET)


def test_a_gauge_that_a_recipe_reads_is_not_its_output(tmp_path, family):
    (tmp_path / "g").mkdir()
    shutil.copy(family / "gauge.safetensors", tmp_path / "g" / "gauge.safetensors")
    own = {"weight": 1, "gauge": str(tmp_path / "g" / "gauge.safetensors")}
    models = {family / "tuned": {"weight": 1}, family / "twin": own}
    file = recipe(tmp_path / "r.yml", "signed_align", models)
    with pytest.raises(SignedAlignError, match="overlaps the input"):
        merge(file, tmp_path / "g", QUIET, force=True)
    assert (tmp_path / "g" / "gauge.safetensors").is_file()
