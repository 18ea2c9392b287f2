"""The rows of Table 1 that are no weights: vectors, optimizer state, lists of coordinates.

Whole models, LoRA adapters and SAEs prove the other rows in their own files.
"""

import pytest
import torch

from signed_align import Axis, Chart, Gauge, SignedPermutation, transport
from tests import tiny

RESIDUAL = Axis("residual")
TYPES = ["llama", "gemma3_text", "phi3", "gpt2"]


def twins(model_type):
    """A model, the same model moved, and the gauge between them."""
    source, target = tiny.build(model_type), tiny.build(model_type)
    chart = Chart.of(source.config)
    shapes = {name: tensor.shape for name, tensor in source.state_dict().items()}
    gauge = Gauge(chart.random_gauge(chart.spaces(shapes), seed=8))
    target.load_state_dict(
        {
            name: transport(tensor, chart.axes(name, tensor.shape), gauge)
            for name, tensor in source.state_dict().items()
        }
    )
    return source, target, chart, gauge


def steered_logits(model, vector):
    block = model.base_model.get_submodule("h" if model.config.model_type == "gpt2" else "layers")

    def add(_module, _inputs, output):
        return output + vector if isinstance(output, torch.Tensor) else (output[0] + vector,)

    handle = block[0].register_forward_hook(add)
    try:
        return tiny.logits(model)
    finally:
        handle.remove()


@pytest.mark.parametrize("model_type", TYPES)
def test_a_steering_vector_steers_alike(model_type):
    source, target, _, gauge = twins(model_type)
    vector = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    expected = steered_logits(source, vector)
    moved = transport(vector, (RESIDUAL,), gauge)
    assert tiny.relative_change(tiny.logits(source), expected) > 1e-2
    assert tiny.relative_change(expected, steered_logits(target, moved)) <= 1e-5
    assert tiny.relative_change(expected, steered_logits(target, vector)) > 1e-3


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gpt2"])
def test_soft_prompt_tokens_prompt_alike(model_type):
    source, target, _, gauge = twins(model_type)
    prompt = torch.randn(1, 5, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    moved = transport(prompt, (None, None, RESIDUAL), gauge)
    with torch.no_grad():
        expected, found = source(inputs_embeds=prompt).logits, target(inputs_embeds=moved).logits
    assert tiny.relative_change(expected, found) <= 1e-5


def test_a_probe_reads_alike():
    gauge = Gauge({"residual": SignedPermutation.random(tiny.WIDTH, seed=1)})
    states = torch.randn(30, tiny.WIDTH, dtype=torch.float64)
    weight, bias = torch.randn(3, tiny.WIDTH, dtype=torch.float64), torch.randn(3).double()
    expected = states @ weight.T + bias
    moved = (
        transport(states, (None, RESIDUAL), gauge) @ transport(weight, (None, RESIDUAL), gauge).T
    )
    torch.testing.assert_close(moved + bias, expected)


@pytest.mark.parametrize("model_type", TYPES)
def test_adam_moments_follow_their_weights(model_type):
    """Train both twins on the same tokens: their optimizer states correspond by the labels."""
    source, target, chart, gauge = twins(model_type)
    states = []
    for model in (source.double(), target.double()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            ids = tiny.tokens(seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append({name: optimizer.state[p] for name, p in model.named_parameters()})
    even = {name: chart.axes(name, state["exp_avg"].shape) for name, state in states[0].items()}
    for name, axes in even.items():
        mine, theirs = states[0][name], states[1][name]
        unsigned = tuple(axis and axis.unsigned for axis in axes)
        for key, labels in (("exp_avg", axes), ("exp_avg_sq", unsigned)):
            moved = transport(mine[key], labels, gauge)
            assert tiny.relative_change(moved, theirs[key]) <= 1e-5, (name, key)
    # and the trained weights still correspond
    for (name, mine), theirs in zip(source.named_parameters(), target.parameters(), strict=True):
        moved = transport(mine.detach(), even[name], gauge)
        assert tiny.relative_change(moved, theirs.detach()) <= 1e-4, name


def test_neuron_and_attribution_lists():
    """Index i becomes the j with perm[j] = i, and a value takes the sign of j."""
    element = SignedPermutation.random(tiny.WIDTH, seed=4)
    gauge = Gauge({"residual": element})
    for index in (0, 7, 47):
        attribution = torch.zeros(tiny.WIDTH)
        attribution[index] = 2.5
        moved = transport(attribution, (RESIDUAL,), gauge)
        (found,) = moved.nonzero().flatten().tolist()
        assert int(element.perm[found]) == index
        assert float(moved[found]) == 2.5 * int(element.sign[found])
