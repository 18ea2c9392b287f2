"""Optimizer state: every entry moves as the parameter it belongs to, or as that one's square."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from signed_align.adapters.artifact import Artifact, Journey, Part
from signed_align.adapters.formats import SEPARATOR, Labelling, TorchFile
from signed_align.chart import Chart, star
from signed_align.errors import ArtifactError, ChartError
from signed_align.labels import Axes, even, reduced

SUFFIXES = {".pt", ".pth", ".bin"}
FILE_NAMES = ("optimizer.pt", "optimizer.bin")
"""What Trainer and accelerate call the file."""

Shape = tuple[int, ...]
Groups = Sequence[Sequence[str]]
"""The names of the parameters in each group of an optimizer."""


@dataclass(frozen=True)
class Entry:
    """What one entry of a parameter's state is.

    Parameters
    ----------
    squared : bool
        It is made of squares or magnitudes, which no sign flips: a second moment. Otherwise it is
        linear in the gradient or the weight and moves as the parameter does: a first moment.
    summed : int, optional
        The axis, counted from the last, that it is summed over.
    keeps : bool
        Whether that axis stays, as one of size 1.
    """

    squared: bool = False
    summed: int | None = None
    keeps: bool = True

    def of(self, axes: Axes, shape: Shape) -> tuple[Axes, Shape]:
        """Its labels and its shape, given those of the parameter."""
        if self.squared:
            axes = even(axes)
        if self.summed is None:
            return axes, shape
        if len(shape) < 2:
            return (), (-1,)  # only matrices are factored, so nothing fits
        position = len(shape) + self.summed
        left = (1,) if self.keeps else ()
        shape = (*shape[:position], *left, *shape[position + 1 :])
        return reduced(axes, position, keep=self.keeps), shape


FIRST, SECOND = Entry(), Entry(squared=True)
ENTRIES: Mapping[str, Entry] = {
    "exp_avg": FIRST,  # Adam and its kin, Lion
    "momentum_buffer": FIRST,  # SGD, RMSprop, Muon
    "grad_avg": FIRST,  # centred RMSprop
    "prev": FIRST,  # Rprop: the last gradient
    "ax": FIRST,  # ASGD: the averaged weight
    "z": FIRST,  # schedule-free: the weight without averaging
    "kahan_comp": FIRST,  # stable_adamw: what rounding took from the weight
    "exp_avg_sq": SECOND,
    "max_exp_avg_sq": SECOND,  # amsgrad
    "exp_inf": SECOND,  # Adamax
    "square_avg": SECOND,  # RMSprop, Adadelta
    "acc_delta": SECOND,  # Adadelta
    "sum": SECOND,  # Adagrad
    "step_size": SECOND,  # Rprop
    "variance": SECOND,  # torch's Adafactor, of vectors
    "row_var": Entry(squared=True, summed=-1),  # torch's Adafactor, of matrices
    "col_var": Entry(squared=True, summed=-2),
    "exp_avg_sq_row": Entry(squared=True, summed=-1, keeps=False),  # transformers' Adafactor
    "exp_avg_sq_col": Entry(squared=True, summed=-2, keeps=False),
}
"""Of the entries that are as large as their parameter, or factors of what is."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu", "RMS", "eps_sq", "mean_square"})
"""One number a parameter: counts, schedules, norms. No change of coordinates is felt."""

LBFGS = "LBFGS keeps its history as one vector of all parameters; continue with a fresh optimizer"
BITSANDBYTES = (
    "bitsandbytes names it alike for optimizers that keep momenta there and for those that keep "
    "squares, and its 8-bit state is quantised in blocks of the flattened tensor, which a "
    "permutation crosses; train with an optimizer of torch.optim instead"
)
PROJECTED = (
    "GaLore and APOLLO keep moments of projected gradients, and the projection is drawn for the "
    "old coordinates; continue with a fresh optimizer"
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("d", "old_dirs", "old_stps", "prev_flat_grad", "func_evals", "H_diag"), LBFGS),
    **dict.fromkeys(("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"), BITSANDBYTES),
    **dict.fromkeys(("max1", "max2", "new_max1", "new_max2"), BITSANDBYTES),
    "__bnb_optimizer_quant_state__": BITSANDBYTES,
    **dict.fromkeys(("projector", "scaled_grad", "seed"), PROJECTED),
}
"""Entries that are known and cannot be moved."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.")
"""What compilation and sharding put into the names of parameters, wherever they wrap."""

NAME_THEM = (
    "save the state with the parameters' names: make the optimizer of model.named_parameters() "
    "instead of model.parameters()"
)


class OptimizerFamily:
    """The state dict of an optimizer of ``torch.optim`` or one that keeps its entries likewise."""

    kind = "optimizer state"

    def recognises(self, path: Path) -> bool:
        """Whether it is a file of ``torch.save`` with ``state`` and ``param_groups``."""
        if not path.is_file() or path.suffix not in SUFFIXES:
            return False
        if path.name in FILE_NAMES:
            return True
        try:
            content = TorchFile(path).content
        except ArtifactError:
            return False
        return isinstance(content, dict) and {"state", "param_groups"} <= set(content)

    def inspect(self, path: Path) -> dict[str, Any]:
        """How many parameters in which groups, the entries of their state, whether they are named.

        Raises ArtifactError if it is no optimizer state.
        """
        state = State.read(path)
        return {
            "groups": [len(group) for group in state.groups],
            "with_state": len(state.entries),
            "entries": sorted({name for entries in state.entries.values() for name in entries}),
            "named": state.names is not None,
        }

    def read(self, path: Path, journey: Journey) -> Artifact:
        """Read and label it; raises ArtifactError, with the reason, if it cannot move."""
        part = optimizer_part(path, journey.skeleton, parameter_labels(journey.chart))
        return Artifact(kind=self.kind, path=path, made_on=None, parts=[part])


@dataclass(frozen=True)
class State:
    """An optimizer's state dict, every entry of it known.

    Parameters
    ----------
    file : TorchFile
        The file it was read from.
    entries : mapping of int to mapping of str
        The state of each parameter that has some, by the parameter's number.
    groups : sequence of sequence of int
        The numbers of the parameters in each group.
    names : sequence of sequence of str or None
        The parameters' names in each group, where the optimizer was given them.
    decays : sequence of float
        Each group's weight decay.
    """

    file: TorchFile
    entries: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Sequence[int]]
    names: Groups | None
    decays: Sequence[float]

    @classmethod
    def read(cls, path: Path) -> State:
        """Read and check a file; raises ArtifactError for anything in it that is not understood."""
        file = TorchFile(path)
        content = file.content
        if not isinstance(content, dict) or set(content) != {"state", "param_groups"}:
            found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content)
            raise ArtifactError(
                f"{path} is not an optimizer's state dict: expected 'state' and 'param_groups', "
                f"found {found}."
            )
        state, groups = content["state"], content["param_groups"]
        if not isinstance(state, dict) or not isinstance(groups, list):
            raise ArtifactError(f"{path} is not an optimizer's state dict: it has other types.")
        for group in groups:
            _require_plain(group, path)
        numbers = [list(group["params"]) for group in groups]
        flat = [number for group in numbers for number in group]
        if any(isinstance(number, str) for number in [*flat, *state]):
            raise ArtifactError(
                f"the state in {path} is keyed by parameter names, as FSDP writes it; save it as "
                "optimizer.state_dict() gives it."
            )
        plain = all(type(number) is int for number in [*flat, *state])
        if not plain or flat != list(range(len(flat))) or not set(state) <= set(flat):
            raise ArtifactError(
                f"the parameters in {path} are not numbered in the order of its groups, as "
                "torch.optim numbers them."
            )
        for number, entries in state.items():
            _require_known(entries, number, path)
        return cls(
            file=file,
            entries=state,
            groups=numbers,
            names=_given_names(groups, path),
            decays=[float(group.get("weight_decay") or 0.0) for group in groups],
        )

    def fits(self, number: int, shape: Shape) -> bool:
        """Whether every entry of a parameter's state has the shape that it has for ``shape``."""
        blank: Axes = (None,) * len(shape)
        return all(
            ENTRIES[name].of(blank, shape)[1] == tuple(value.shape)
            for name, value in self.tensors(number)
        )

    def tensors(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """The entries of a parameter that are as large as it is, or factors of what is."""
        for name, value in self.entries.get(number, {}).items():
            if name in ENTRIES and isinstance(value, Tensor):
                yield name, value


def parameter_labels(chart: Chart) -> Labelling:
    """How a chart labels the parameters of the model as it is in memory.

    The function raises ArtifactError for a parameter that it does not know.
    """

    def label(name: str, shape: Shape) -> Axes:
        if any(star(bare) in chart.stored for bare in chart.bare(name)):
            raise ArtifactError(
                f"checkpoints store the parameter {name!r} in another layout than the model has, "
                "so it is not known how to move its optimizer state."
            )
        try:
            return chart.axes(name, shape)
        except ChartError as error:
            raise ArtifactError(f"the optimizer state cannot be moved: {error}") from error

    return label


def optimizer_part(path: Path, model: Any, label: Labelling) -> Part:
    """An optimizer's state dict, labelled.

    Parameters
    ----------
    path : Path
        The file.
    model : torch.nn.Module
        The model in training, without its weights: it says how its parameters are called, what
        their order and shapes are, and which of them are trained.
    label : callable
        From a parameter's name and shape to its axis labels.

    Raises
    ------
    ArtifactError
        If an entry is not understood, or if it is not certain which parameter it belongs to.
    """
    state = State.read(path)
    names = parameter_names(state, model)
    shapes = _shapes(model)
    table: dict[str, Axes] = {
        name: (None,) * len(shape) for name, shape in state.file.shapes.items()
    }
    for number, name in names.items():
        axes = label(name, shapes[name])
        for entry, _ in state.tensors(number):
            key = SEPARATOR.join(("state", str(number), entry))
            table[key] = ENTRIES[entry].of(axes, shapes[name])[0]
    return Part(state.file, lambda name, _: table[name])


# ---- which parameter is which ----------------------------------------------------------------


def parameter_names(state: State, model: Any) -> dict[int, str]:
    """The name of every parameter that has tensors in its state.

    Names that the state keeps are used. Otherwise the parameters are in one of the orders in which
    optimizers are made (:data:`CONVENTIONS`), without those that are frozen. The shapes of the
    state must then leave one possibility only.

    Raises
    ------
    ArtifactError
        If there is none, or more than one.
    """
    shapes = _shapes(model)
    wanted = [number for group in state.groups for number in group if any(state.tensors(number))]
    if state.names is not None:
        return _checked_names(state, shapes, wanted)
    possible: dict[int, dict[str, None]] = {number: {} for number in wanted}
    found = False
    for convention in CONVENTIONS:
        for choice in _choices(state, convention(model, state.decays), shapes):
            found = True
            for number in wanted:
                possible[number][choice[number]] = None
    if not found:
        raise ArtifactError(
            f"the optimizer state's {_counted(state.groups)} do not have the number and shapes of "
            f"{type(model).__name__}'s parameters in any usual order; was it made on another "
            f"model? If not, {NAME_THEM}."
        )
    for number, names in possible.items():
        if len(names) > 1:
            one, other, *_ = names
            raise ArtifactError(
                f"parameter {number} of the optimizer state could be {one!r} or {other!r} (some "
                f"parameters are frozen, or the order is not the model's); {NAME_THEM}."
            )
    return {number: next(iter(names)) for number, names in possible.items()}


def _checked_names(state: State, shapes: Mapping[str, Shape], wanted: list[int]) -> dict[int, str]:
    assert state.names is not None
    numbers = [number for group in state.groups for number in group]
    given = [_unwrapped(name) for group in state.names for name in group]
    names = dict(zip(numbers, given, strict=True))
    if len(set(given)) != len(given):
        raise ArtifactError("the optimizer state gives two parameters one name.")
    for number in wanted:
        name = names[number]
        if name not in shapes:
            raise ArtifactError(
                f"the optimizer state names a parameter {name!r}, which the model does not have; "
                "was it made on another model?"
            )
        if not state.fits(number, shapes[name]):
            raise ArtifactError(
                f"the optimizer state of {name!r} does not have the shape that the parameter, "
                f"{shapes[name]}, gives it; was it made on another model?"
            )
    return {number: names[number] for number in wanted}


def _choices(
    state: State, groups: Groups | None, shapes: Mapping[str, Shape]
) -> list[dict[int, str]]:
    """The first and the last way to choose the state's parameters, in order, out of ``groups``.

    Every other way lies between the two; they are one where there is only one.
    """
    if groups is None or len(groups) != len(state.groups):
        return []

    def first(numbers: Sequence[int], names: Sequence[str]) -> dict[int, str] | None:
        rest = iter(names)
        chosen = {}
        for number in numbers:
            name = next((name for name in rest if state.fits(number, shapes[name])), None)
            if name is None:
                return None
            chosen[number] = name
        return chosen

    ends: list[dict[int, str]] = [{}, {}]
    for numbers, names in zip(state.groups, groups, strict=True):
        forwards = first(numbers, names)
        backwards = first(numbers[::-1], names[::-1])
        if forwards is None or backwards is None:
            return []
        ends[0] |= forwards
        ends[1] |= backwards
    return ends


def _one_group(model: Any, _: Sequence[float]) -> Groups:
    """``optimizer(model.parameters())``, or some of them: the matrices for Muon."""
    return [_trained(model)]


def _matrices_and_vectors(model: Any, _: Sequence[float]) -> Groups:
    """Parameters of two and more axes, then the others."""
    shapes = _shapes(model)
    return _split(model, lambda name: len(shapes[name]) > 1)


NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def _by_name(model: Any, decays: Sequence[float]) -> Groups | None:
    """Trainer's groups with and without weight decay, today: by names, and LayerNorm by class."""
    norms = _inside(model, lambda module: isinstance(module, nn.LayerNorm))
    return _decayed(model, decays, lambda n: not NOT_DECAYED.search(n.lower()) and n not in norms)


def _by_registered_norm(model: Any, decays: Sequence[float]) -> Groups | None:
    """Trainer's groups in transformers 4, of models that register their norm."""
    norms = _inside(model, lambda module: "norm" in type(module).__name__.lower())
    return _decayed(model, decays, lambda name: "bias" not in name and name not in norms)


def _by_layer_norm(model: Any, decays: Sequence[float]) -> Groups | None:
    """Trainer's groups in transformers 4, of other models."""
    norms = _inside(model, lambda module: isinstance(module, nn.LayerNorm))
    return _decayed(model, decays, lambda name: "bias" not in name and name not in norms)


CONVENTIONS: Sequence[Callable[[Any, Sequence[float]], Groups | None]] = (
    _one_group,
    _matrices_and_vectors,
    _by_name,
    _by_registered_norm,
    _by_layer_norm,
)
"""From a model and the groups' weight decays to the groups of parameters of a usual optimizer."""


def _decayed(model: Any, decays: Sequence[float], decay: Callable[[str], bool]) -> Groups | None:
    if len(decays) != 2 or decays[1]:
        return None
    return _split(model, decay)


def _split(model: Any, condition: Callable[[str], bool]) -> Groups:
    names = _trained(model)
    return [[n for n in names if condition(n)], [n for n in names if not condition(n)]]


def _trained(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _inside(model: Any, condition: Callable[[Any], bool]) -> set[str]:
    """The names of the parameters in modules that meet a condition."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if path and condition(module)
        for name, _ in module.named_parameters()
    }


def _shapes(model: Any) -> dict[str, Shape]:
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")  # data-parallel training


def _counted(groups: Sequence[Sequence[int]]) -> str:
    counts = " + ".join(str(len(group)) for group in groups)
    return f"{counts} parameters"


# ---- what is in the file ---------------------------------------------------------------------


def _require_plain(group: Any, path: Path) -> None:
    """Raise unless a group holds numbers of parameters, and settings."""
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        raise ArtifactError(f"a group of {path} does not list its parameters.")
    decay = group.get("weight_decay")
    if decay is not None and not isinstance(decay, (int, float, Tensor)):
        raise ArtifactError(f"a group of {path} has the weight decay {decay!r}, not a number.")
    for name, value in group.items():
        if isinstance(value, dict) or (isinstance(value, Tensor) and value.numel() != 1):
            raise ArtifactError(
                f"a group of {path} keeps {name!r}, which is more than a setting, so it is not "
                "known how to move it."
            )


def _given_names(groups: Sequence[Mapping[str, Any]], path: Path) -> Groups | None:
    names = [group.get("param_names") for group in groups]
    if all(given is None for given in names):
        return None
    for group, given in zip(groups, names, strict=True):
        fits = isinstance(given, list) and len(given) == len(group["params"])
        if not fits or not all(isinstance(name, str) for name in given or ()):
            raise ArtifactError(f"a group of {path} does not have one name for each parameter.")
    return [given for given in names if given is not None]


def _require_known(entries: Any, number: int, path: Path) -> None:
    """Raise unless every entry of a parameter's state is known, and is what it should be."""
    if not isinstance(entries, dict):
        raise ArtifactError(f"{path} keeps no entries for parameter {number}.")
    for name, value in entries.items():
        where = f"the entry {name!r} of parameter {number} in {path}"
        if name in REFUSED:
            raise ArtifactError(f"{where} cannot be moved: {REFUSED[name]}.")
        if name not in ENTRIES and name not in SCALARS:
            raise ArtifactError(
                f"{where} is not understood; known are {', '.join([*ENTRIES, *sorted(SCALARS)])}."
            )
        if name in SCALARS:
            if isinstance(value, Tensor) and value.numel() == 1:
                continue
            if not isinstance(value, (int, float)):
                raise ArtifactError(f"{where} is not a single number.")
        elif isinstance(value, Tensor):
            _require_plain_moment(value, ENTRIES[name], where)
        elif value is not None:
            raise ArtifactError(f"{where} is a {type(value).__name__}, not a tensor.")


def _require_plain_moment(value: Tensor, entry: Entry, where: str) -> None:
    if not value.is_floating_point():
        raise ArtifactError(
            f"{where} is quantised ({value.dtype}) in blocks of the flattened tensor, which a "
            "permutation crosses; train with an optimizer that keeps it in floating point."
        )
    if entry.squared and bool((value.float() < 0).any()):
        raise ArtifactError(
            f"{where} holds negative numbers, so it is not the sum of squares that this name "
            "stands for elsewhere."
        )
