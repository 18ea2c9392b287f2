"""SAE reconstruction on a model: what is measured, and that it follows the gauge."""

import pytest
import torch

from signed_align import Checkpoint, scramble
from signed_align.activations import batches, hook_activations, load_tokenizer
from signed_align.adapters.sae import evaluate_sae, nmse
from signed_align.errors import ArtifactError
from signed_align.hooks import find_hook
from tests import tiny
from tests.porting import port
from tests.test_recovery import TEXT, add_tokenizer
from tests.test_sae import build


def test_nmse_of_pinned_cases():
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert nmse(x, x) == 0.0
    assert nmse(x, x.mean(0).expand(2, 2)) == 1.0
    assert nmse(x, torch.zeros(2, 2)) == pytest.approx(50 / 10)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    source = add_tokenizer(tiny.save(tiny.build(request.param), root / "source"))
    return source, root / "twin", scramble(source, root / "twin", seed=1)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_activations_are_those_of_the_whole_model(pair, blocks):
    checkpoint = Checkpoint.open(pair[0])
    todo = batches(load_tokenizer(checkpoint), ["abcdefgh", "xyz"], max_tokens=100)
    hook = "blocks.0.hook_resid_pre" if blocks == 0 else f"blocks.{blocks - 1}.hook_resid_post"
    (found,) = hook_activations(checkpoint, [find_hook(checkpoint.chart, hook)], todo)
    model, caught = tiny.load(pair[0]), []
    block = model.base_model.get_submodule(checkpoint.chart.blocks)
    if blocks == 0:
        block[0].register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
    else:
        block[blocks - 1].register_forward_hook(lambda _m, _i, output: caught.append(output))
    with torch.no_grad():
        model(input_ids=todo[0].input_ids, attention_mask=todo[0].attention_mask)
    output = caught[0] if isinstance(caught[0], torch.Tensor) else caught[0][0]
    expected = output[todo[0].attention_mask.bool()]
    assert len(found) == 11
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("hook", ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_post", "hf"])
def test_the_error_follows_the_gauge(pair, tmp_path, hook):
    source, twin, gauge = pair
    blocks = Checkpoint.open(source).chart.blocks
    build("topk", tmp_path / "sae", f"{blocks}.0" if hook == "hf" else hook)
    port(tmp_path / "sae", gauge, tmp_path / "ported", any_source=True)
    home = evaluate_sae(source, tmp_path / "sae", text=TEXT)
    away = evaluate_sae(twin, tmp_path / "ported", text=TEXT)
    assert away["nmse"] == pytest.approx(home["nmse"], rel=1e-4)
    unported = evaluate_sae(twin, tmp_path / "sae", text=TEXT)
    assert unported["nmse"] != pytest.approx(home["nmse"], rel=1e-2)


def test_what_cannot_be_measured_is_refused(pair, tmp_path):
    source, _, _ = pair
    build("standard", tmp_path / "mid", "blocks.0.hook_resid_mid")
    with pytest.raises(ArtifactError, match="at which module"):
        evaluate_sae(source, tmp_path / "mid", text=TEXT)
    build("standard", tmp_path / "deep", "blocks.7.hook_resid_post")
    with pytest.raises(ArtifactError, match="none is number 7"):
        evaluate_sae(source, tmp_path / "deep", text=TEXT)
    with pytest.raises(ArtifactError, match="cannot load"):
        evaluate_sae(source, tmp_path / "none", text=TEXT)
    wide = add_tokenizer(tiny.save(tiny.build("llama", hidden_size=64), tmp_path / "wide"))
    build("standard", tmp_path / "sae")
    with pytest.raises(ArtifactError, match="48 coordinates, the model has 64"):
        evaluate_sae(wide, tmp_path / "sae", text=TEXT)
