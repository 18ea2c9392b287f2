"""Steering vectors: their last axis holds the coordinates of the place where they are added.

Also here is how much the vectors of a file steer a model, which tells whether they have arrived.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signed_align.activations import load_model, load_tokenizer
from signed_align.adapters.artifact import Artifact, Journey, Part
from signed_align.adapters.formats import (
    FORMATS,
    SEPARATOR,
    GgufFile,
    NumpyFile,
    SafetensorsFile,
    TensorFile,
    TorchFile,
    open_tensors,
)
from signed_align.adapters.lists.names import Role, role
from signed_align.adapters.parity import Parity, parity, speaks_against_signs, words_of
from signed_align.chart import RESIDUAL, Chart
from signed_align.checkpoint import Checkpoint, is_weight_file
from signed_align.errors import ArtifactError, ChartError
from signed_align.hooks import block_count, find_hook
from signed_align.labels import Axes
from signed_align.steering import log_odds, steered

CONTROL_VECTOR = "controlvector"
"""What a GGUF file of control vectors says its architecture is."""

DIRECTION = re.compile(r"direction\.(\d+)")
LAYER_KEY = re.compile(r"(?:layers?[._]?)?(\d+)")
PARTS = frozenset(
    {"head", "heads", "neuron", "neurons", "expert", "experts", "proj", "mlp", "attn", "attention"}
)
"""Words for parts of the model whose own coordinates, or whose number, would move too."""

BLOCK_OUTPUT = "blocks.{}.hook_resid_post"
"""Where a vector of a layer is added, unless it says otherwise."""

LAYER_TYPES: Mapping[str, tuple[str, ...]] = {
    "decoder_block": ("",),
    "self_attn": (".self_attn", ".attn", ".attention", ".self_attention"),
    "mlp": (".mlp", ".feed_forward"),
    "input_layernorm": (".input_layernorm", ".ln_1"),
    "post_attention_layernorm": (".post_attention_layernorm", ".ln_2"),
}
"""Of every ``layer_type`` of the package steering-vectors: modules of a block, by their path."""

LLAMA_CPP_NAMES: Mapping[str, str] = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3text": "gemma3",
}
"""Model types that llama.cpp calls otherwise, without underscores."""

MODEL_KEYS = ("model", "model_name", "model_id")
"""Where the metadata of a safetensors file may name the model."""

FOREIGN: Mapping[str, re.Pattern[str]] = {
    "weights of a model or an adapter": re.compile(
        r"(.*\.)?(weight|bias|inv_freq|lora_\w+|module\..*)"
    ),
    "weights of a sparse autoencoder": re.compile(r"(.*[./])?(W|b)_(enc|dec|skip|gate|mag)"),
    "moments of an optimizer": re.compile(r"(.*[./])?(exp_avg(_sq)?|momentum_buffer)"),
}
"""What is no steering vector, by the names of tensors."""


class SteeringFamily:
    """Control vectors as llama.cpp and repeng write them, and tensors of vectors in any file."""

    kind = "steering vectors"

    def recognises(self, path: Path) -> bool:
        """Whether it is a file of tensors none of which says that it is something else.

        A file that cannot be read is recognised, so that reading it says what is wrong.
        """
        if path.suffix not in FORMATS or not path.is_file():
            return False
        try:
            file = open_tensors(path)
        except ArtifactError:
            return is_weight_file(path) or path.suffix == ".npy"
        if isinstance(file, GgufFile):
            return file.field("general.architecture") == CONTROL_VECTOR
        content = file.content if isinstance(file, TorchFile) else None
        if isinstance(content, dict) and {"state", "param_groups"} <= set(content):
            return False
        vectors = any(_is_vector(file, name) for name in file.shapes)
        return vectors and _foreign(file.shapes) is None

    def inspect(self, path: Path) -> dict[str, Any]:
        """Shapes by name, and what the file says of its model."""
        file = _open(path)
        details: dict[str, Any] = {"format": path.suffix.removeprefix(".")}
        if isinstance(file, GgufFile):
            details["model_hint"] = file.field(f"{CONTROL_VECTOR}.model_hint")
        if isinstance(file, SafetensorsFile):
            details["model"] = _named_model(file)[1]
        return {**details, "tensors": {name: list(shape) for name, shape in file.shapes.items()}}

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot move."""
        file = _open(path)
        foreign = _foreign(file.shapes)
        if foreign is not None:
            raise ArtifactError(f"{path} holds {foreign}, not steering vectors.")
        if not any(_is_vector(file, name) for name in file.shapes):
            raise ArtifactError(f"{path} holds no tensor of vectors.")
        made_on = None
        if isinstance(file, GgufFile):
            labels = _control_vector_labels(file, journey)
            notes: list[str] = []
        else:
            labels, notes = _labels(file, journey)
        if isinstance(file, SafetensorsFile):
            key, made_on = _named_model(file)
            if key is not None and journey.target is not None:
                file.renamed = {key: journey.target}
        return Artifact(
            kind=self.kind,
            path=path,
            made_on=made_on,
            parts=[Part(file, partial(_look_up, labels))],
            notes=notes,
        )


def _open(path: Path) -> TensorFile:
    """The file; raises ArtifactError if it is damaged, code, or of another kind of GGUF."""
    try:
        file = open_tensors(path)
    except ArtifactError as error:
        if "SteeringVector" in str(error.__cause__):
            raise ArtifactError(
                f"{path} holds a pickled SteeringVector, which is only read by running code; save "
                "its tensors: torch.save({'layer_activations': dict(v.layer_activations), "
                "'layer_type': v.layer_type}, path)."
            ) from error
        raise
    if isinstance(file, GgufFile):
        architecture = file.field("general.architecture")
        if architecture != CONTROL_VECTOR:
            raise ArtifactError(
                f"{path} is a GGUF file of the architecture {architecture!r}, not of control "
                "vectors; move the safetensors it was made of, and convert that."
            )
    return file


def _is_even(file: TensorFile, name: str, flips: int) -> bool:
    """Whether a tensor keeps its signs, by what its keys, or its file, call it.

    Raises ArtifactError if some of its signs would flip and it is not clear that they should.
    """
    given = [key for key in name.split(SEPARATOR) if not LAYER_KEY.fullmatch(key)]
    if given in (["tensor"], ["array"], []):
        given = [file.path.stem]
    names = [key for key in given if "hook_" not in key and key.count(".") < 2]
    if any(parity(key) is Parity.EVEN for key in names):
        return True
    doubtful = next((key for key in names if speaks_against_signs(key)), None)
    values = file.tensor(name)
    if flips and doubtful is not None:
        raise ArtifactError(
            f"{flips} signs would flip in {name!r} of {file.path}, and it is not clear that what "
            f"is called {doubtful!r} follows them; name it for what it is (direction, std, mask, "
            "…), or take it out."
        )
    ones = values == 1
    if flips and bool(ones.any()) and bool(((values == 0) | ones).all()):
        raise ArtifactError(
            f"{name!r} of {file.path} holds nothing but 0 and 1, as a mask does, whose signs stay; "
            "store a mask as booleans."
        )
    return False


def _is_linear(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether these are the tensors of one linear layer: a probe on activations."""
    if not 1 <= len(shapes) <= 2:
        return False
    weight = next((name for name in shapes if re.fullmatch(r"([A-Za-z_]\w*\.)?weight", name)), None)
    if weight is None or len(shapes[weight]) != 2:
        return False
    bias = f"{weight.removesuffix('weight')}bias"
    return set(shapes) == {weight} or shapes.get(bias) == shapes[weight][:1]


def _is_vector(file: TensorFile, name: str) -> bool:
    return bool(file.shapes[name]) and file.tensor(name).is_floating_point()


def _foreign(names: Mapping[str, tuple[int, ...]]) -> str | None:
    """What else tensors of these names are, if that is known."""
    if _is_linear(names):
        return None
    for name in names:
        for what, pattern in FOREIGN.items():
            if pattern.fullmatch(name):
                return what
    return None


def _named_model(file: SafetensorsFile) -> tuple[str | None, str | None]:
    """Under which key the metadata name the model, and how."""
    return next(
        ((key, file.metadata[key]) for key in MODEL_KEYS if file.metadata.get(key)), (None, None)
    )


def _look_up(labels: Mapping[str, Axes], name: str, _: tuple[int, ...]) -> Axes:
    return labels[name]


# ---- which hook a tensor belongs to --------------------------------------------------------------


def _control_vector_labels(file: GgufFile, journey: Journey) -> dict[str, Axes]:
    """The labels of a file of control vectors, all of which are added to the residual stream."""
    hint = file.field(f"{CONTROL_VECTOR}.model_hint")
    wanted = journey.chart.model_type
    if hint is not None and not _same_type(str(hint), wanted):
        raise ArtifactError(
            f"{file.path} was made for a model of the type {hint!r}, and the gauge leads from one "
            f"of the type {wanted!r}."
        )
    labels: dict[str, Axes] = {}
    for name, shape in file.shapes.items():
        layer = DIRECTION.fullmatch(name)
        if layer is None or shape != (journey.chart.width,):
            raise ArtifactError(
                f"the tensor {name!r} of {file.path} has the shape {shape}; a control vector for "
                f"this model is called direction.N and has the shape ({journey.chart.width},)."
            )
        labels[name] = (journey.place(BLOCK_OUTPUT.format(layer[1]), shape[0])[1],)
    return labels


def _same_type(hint: str, model_type: str) -> bool:
    plain, wanted = (text.lower().replace("_", "").replace("-", "") for text in (hint, model_type))
    return plain in (wanted, LLAMA_CPP_NAMES.get(wanted))


def _labels(file: TensorFile, journey: Journey) -> tuple[dict[str, Axes], list[str]]:
    """The labels of tensors of vectors, and what has to be said of them."""
    labels: dict[str, Axes] = {}
    notes: list[str] = []
    unnamed: list[str] = []
    for name, shape in file.shapes.items():
        if not shape:
            labels[name] = ()
            continue
        if name.endswith("bias") and _is_linear(file.shapes):
            labels[name] = (None,)
            continue
        if not file.tensor(name).is_floating_point():
            raise ArtifactError(
                f"the tensor {name!r} of {file.path} holds {file.tensor(name).dtype}, which could "
                "be indices of coordinates; take it out of the file."
            )
        hook = _hook_of(file, name, journey.chart)
        if hook is not None and journey.hook not in (None, hook) and not _is_key(name, hook):
            raise ArtifactError(f"{file.path} says {hook!r}, and --hook {journey.hook!r}.")
        if hook is not None:
            label = journey.place(hook, shape[-1])[1]
        else:
            if journey.hook is None:
                _require_whole_stream(file, name)
            label, said = journey.coordinates(
                shape[-1], f"the tensor {name!r} of {file.path}, of shape {shape},"
            )
            notes += said
            unnamed.append(name)
        if shape[-1] in shape[:-1]:
            raise ArtifactError(
                f"the tensor {name!r} of {file.path} has the shape {shape}, so it is not certain "
                "which axis is that of the coordinates; save its rows as a dictionary of vectors."
            )
        is_even = _is_even(file, name, journey.element(label, shape[-1]).flips)
        along = label.unsigned if is_even else label
        labels[name] = (*(None for _ in shape[1:]), along)
    if journey.hook is not None:
        _require_one_place(file, journey, labels, unnamed)
    if isinstance(file, TorchFile):
        sizes = {shape[-1] for shape in file.shapes.values() if shape}
        _require_no_plain_numbers(file.content, sizes, file.path)
    return labels, list(dict.fromkeys(notes))


def _hook_of(file: TensorFile, name: str, chart: Chart) -> str | None:
    """The hook that the keys in front of a tensor name, or None if they name none.

    Raises ArtifactError for a key that looks like a hook and is none that is known.
    """
    keys = name.split(SEPARATOR)
    for key in reversed(keys):
        if "." not in key and "hook_" not in key:
            continue
        try:
            find_hook(chart, key)
        except ChartError as error:
            numbered = any(part.isdigit() for part in key.split(".")[1:-1])
            if "hook_" in key or numbered:
                raise ArtifactError(f"the tensor {name!r} of {file.path}: {error}") from error
            continue
        return key
    content = file.content if isinstance(file, TorchFile) else None
    if isinstance(content, dict) and "layer_type" in content and keys[-1].isdigit():
        return _module_of_type(chart, str(content["layer_type"]), keys[-1])
    return _stated_hook(file, chart)


def _stated_hook(file: TensorFile, chart: Chart) -> str | None:
    """The hook that the file names beside its tensors; raises ArtifactError if it names several."""
    stated = {text for key, text in _texts(file) if _is_hook(chart, key, text)}
    if len(stated) > 1:
        raise ArtifactError(
            f"{file.path} names the hooks {' and '.join(sorted(stated))}; save a dictionary from "
            "hooks to vectors."
        )
    return next(iter(stated), None)


def _is_hook(chart: Chart, key: str, text: str) -> bool:
    """Whether a text under a key names a hook.

    Raises ArtifactError for one that looks like it, or that the key says is one, and is none.
    """
    looks = "hook_" in text or re.fullmatch(r"[\w.]+\.\d+(\.\w+)*", text)
    if not looks and role(key) is not Role.HOOK:
        return False
    try:
        find_hook(chart, text)
    except ChartError as error:
        raise ArtifactError(f"the file says {text!r}: {error}") from error
    return True


def _is_key(name: str, hook: str) -> bool:
    return hook in name.split(SEPARATOR)


def _texts(file: TensorFile) -> Iterator[tuple[str, str]]:
    """The texts in a file, wherever they stand, each with its key."""
    if isinstance(file, SafetensorsFile):
        yield from file.metadata.items()
    if isinstance(file, NumpyFile):
        yield from file.texts
    if isinstance(file, TorchFile):
        yield from _texts_in(file.content)


def _texts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts_in(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts_in(item, key)


def _require_whole_stream(file: TensorFile, name: str) -> None:
    """Refuse keys that name a part of the model, where no hook is named."""
    for key in name.split(SEPARATOR):
        words = set(words_of(key))
        if (PARTS & words and "out" not in words) or re.fullmatch(r"l\d+h\d+", key.lower()):
            raise ArtifactError(
                f"the tensor {name!r} of {file.path} belongs to {key!r}, so it is not certain that "
                "its coordinates are those of the residual stream, or that its other axes stay; "
                "name the place with --hook, or by a hook's name as its key."
            )


def _module_of_type(chart: Chart, layer_type: str, layer: str) -> str:
    """The module that the package steering-vectors calls ``layer_type``, by path."""
    for suffix in LAYER_TYPES.get(layer_type, ()):
        path = f"{chart.blocks}.{layer}{suffix}"
        try:
            find_hook(chart, path)
        except ChartError:
            continue
        return path
    raise ArtifactError(
        f"the file's layer_type is {layer_type!r}, for which a {chart.model_type} model has no "
        f"module; known are {', '.join(LAYER_TYPES)}."
    )


def _require_one_place(
    file: TensorFile, journey: Journey, labels: Mapping[str, Axes], unnamed: Sequence[str]
) -> None:
    """Refuse vectors of several layers at a hook of a single layer's own coordinates."""
    several = sum(math.prod(file.shapes[name][:-1]) for name in unnamed) > 1
    own = any(labels[name][-1] not in (RESIDUAL, RESIDUAL.unsigned) for name in unnamed)
    if several and own:
        raise ArtifactError(
            f"{file.path} holds several vectors, and every layer has coordinates of its own at "
            f"places such as {journey.hook!r}; save a dictionary from hook names to vectors."
        )


def _require_no_plain_numbers(value: Any, sizes: set[int], path: Path, key: str = "") -> None:
    """Refuse numbers outside of tensors that could be along the coordinates: they would stay."""
    if isinstance(value, dict):
        numbers = [v for v in value.values() if isinstance(v, (int, float))]
        listed = len(numbers) == len(value) and len(value) in sizes
        for name, item in value.items():
            _require_no_plain_numbers(item, sizes, path, str(name))
    elif isinstance(value, (list, tuple)):
        whole = bool(value) and all(type(item) is int for item in value)
        numbers = [item for item in value if isinstance(item, (int, float))]
        listed = len(numbers) == len(value) and len(value) in sizes
        listed |= whole and role(key) in (Role.INDEX, Role.VALUE)
        for item in value:
            _require_no_plain_numbers(item, sizes, path, key)
    else:
        return
    if listed:
        raise ArtifactError(
            f"{path} holds plain numbers under {key!r}, which could be coordinates or values of "
            "them and would not move; save them as a tensor, or take them out."
        )


# ---- how much they steer ------------------------------------------------------------------------


def read_vectors(
    path: str | Path, model: Any, chart: Chart, *, hook: str | None = None
) -> dict[str, Tensor]:
    """The vectors of a file by the hook at which each is added.

    A direction N of a control vector, a key N, and row N of a matrix with a row for every block
    belong to the output of block N; a key that is a hook's name belongs there.

    Parameters
    ----------
    path : str or Path
        A file that :class:`SteeringFamily` recognises.
    model : PreTrainedModel
        The model that is to be steered.
    chart : Chart
        Its chart.
    hook : str, optional
        Where the file's only vector is added, if the file does not say so.

    Raises
    ------
    ArtifactError
        If it is not known where a vector is added.
    """
    file = _open(Path(path))
    found: dict[str, Tensor] = {}
    for name in file.shapes:
        if not _is_vector(file, name):
            continue
        for place, vector in _placed(file, name, model, chart, hook):
            if place in found:
                raise ArtifactError(f"{path} holds two vectors for {place!r}.")
            found[place] = vector
    if not found:
        raise ArtifactError(f"{path} holds no vector.")
    return found


def _placed(
    file: TensorFile, name: str, model: Any, chart: Chart, hook: str | None
) -> Iterator[tuple[str, Tensor]]:
    """The vectors in one tensor, each with its hook."""
    tensor, last = file.tensor(name), name.split(SEPARATOR)[-1]
    direction = DIRECTION.fullmatch(name) if isinstance(file, GgufFile) else None
    named = None if direction else _hook_of(file, name, chart) or hook
    rows = tensor.reshape(-1, tensor.shape[-1])
    layer = direction or LAYER_KEY.fullmatch(last)
    if named is None and layer is not None:
        named = BLOCK_OUTPUT.format(layer[1])
    if named is not None and len(rows) == 1:
        yield named, rows[0]
        return
    blocks = block_count(model, chart)
    if named is not None or tensor.ndim != 2 or len(rows) != blocks:
        raise ArtifactError(
            f"the tensor {name!r} of {file.path} has the shape {tuple(tensor.shape)}, so it is not "
            f"known where it is added; expected one vector and a hook (--hook), or a row for each "
            f"of the {blocks} blocks."
        )
    for number, row in enumerate(rows):
        yield BLOCK_OUTPUT.format(number), row


def steering_effect(
    model: str | Path,
    vectors: str | Path,
    prompts: Sequence[str],
    positive: Sequence[str],
    negative: Sequence[str],
    *,
    hook: str | None = None,
    strength: float = 1.0,
    device: str = "cpu",
) -> dict[str, Any]:
    """By how much a file of vectors shifts a model from some continuations to others.

    The log odds of a prompt are ``log Σ p(positive | prompt) − log Σ p(negative | prompt)``, in
    nats, where the probability of a continuation is that of all its tokens.

    Parameters
    ----------
    model : str or Path
        A local directory or a Hub id.
    vectors : str or Path
        A file that :func:`read_vectors` reads.
    prompts : sequence of str
        What is continued.
    positive, negative : sequence of str
        The continuations, each with the space in front of it that it needs.
    hook : str, optional
        Where the file's only vector is added, if the file does not say so.
    strength : float
        What the vectors are multiplied by.
    device : str
        Where to run.

    Returns
    -------
    dict
        ``unsteered`` and ``steered`` (mean log odds), ``effect`` (their difference), ``prompts``
        (the same of each), ``hooks``, ``strength``.

    Raises
    ------
    SignedAlignError
        If the model or the file does not load, or if there is nothing to compare.
    """
    for what, texts in (("prompt", prompts), ("positive", positive), ("negative", negative)):
        if isinstance(texts, str) or not texts:
            raise ArtifactError(f"give a list with at least one {what} text.")
    checkpoint = Checkpoint.open(model)
    network = load_model(checkpoint, head=True, dtype=torch.float32, device=device)
    tokenizer = load_tokenizer(checkpoint)
    try:
        added = read_vectors(vectors, network, checkpoint.chart, hook=hook)
        before = log_odds(network, tokenizer, prompts, positive, negative)
        with steered(network, checkpoint.chart, added, strength):
            after = log_odds(network, tokenizer, prompts, positive, negative)
    except ChartError as error:
        raise ArtifactError(f"{vectors} cannot steer {checkpoint.name}: {error}") from error
    rows = [
        {"prompt": prompt, "unsteered": old, "steered": new, "effect": new - old}
        for prompt, old, new in zip(prompts, before.tolist(), after.tolist(), strict=True)
    ]
    return {
        "unsteered": float(before.mean()),
        "steered": float(after.mean()),
        "effect": float((after - before).mean()),
        "prompts": rows,
        "hooks": list(added),
        "strength": strength,
    }
