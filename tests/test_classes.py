"""Classes other than causal language models: classifiers, and models that see images."""

import pytest
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from signed_align.groups import Within
from signed_align.proof import prove

SEQUENCE = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
TOKEN = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "bloom", "falcon",
]  # fmt: skip
IMAGES = {
    "llava": ("LlavaForConditionalGeneration", "multi_modal_projector.linear_2"),
    "gemma3": ("Gemma3ForConditionalGeneration", "multi_modal_projector"),
    "paligemma": ("PaliGemmaForConditionalGeneration", "multi_modal_projector.linear"),
}


def proved(model_type, class_name):
    config = AutoConfig.for_model(model_type)
    config.architectures = [class_name]
    return prove(config)


@pytest.mark.parametrize("classes", [SEQUENCE, TOKEN], ids=["sequence", "token"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_classifiers_are_proved(model_type, classes):
    chart, proof = proved(model_type, classes[model_type])
    assert proof.holds
    assert {"residual", "mlp", "values"} <= set(proof.spaces)
    assert not proof.unproved
    head = "score" if "score" in chart.modules else "classifier"
    assert chart.modules[head].input is not None


@pytest.mark.parametrize("model_type", IMAGES)
def test_the_text_side_of_models_that_see_is_proved_with_its_projector(model_type):
    class_name, projector = IMAGES[model_type]
    chart, proof = proved(model_type, class_name)
    assert proof.holds
    assert chart.native_group is Within.SIGNED_PERMUTATION
    assert {"residual", "mlp", "heads"} <= set(proof.spaces)
    assert not [name for name in proof.unproved if "projector" in name]
    assert any("residual" in str(axes) for axes in chart.modules[projector].parameters.values())
