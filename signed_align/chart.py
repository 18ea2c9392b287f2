"""Charts: which axis of which weight indexes which space, and which group acts on each space.

A chart is data, discovered from a model's class (:mod:`signed_align.discovery`) and proved by
running it (:mod:`signed_align.proof`). It speaks of patterns, not of layer numbers, and of
factors, not of sizes: bound to a config it labels the tensors of a model of any size. Nothing
here moves a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from signed_align.dimensions import Dimensions
from signed_align.errors import ChartError, GaugeError
from signed_align.gauge import Gauge
from signed_align.groups import Group, Within
from signed_align.labels import Axes, Axis, Fused, Label, Section
from signed_align.signed_permutation import SignedPermutation

if TYPE_CHECKING:
    from signed_align.proof import Proof

RESIDUAL = Axis("residual")
VOCABULARY = Axis("vocabulary", signed=False)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "residual": ("residual",),
    "mlp": ("mlp",),
    "experts": ("experts", "mlp"),
    "heads": ("heads", "values", "keys", "nopes"),
    "ssm": ("ssm",),
}
"""The kinds of spaces that go together when a user names one: heads move with what is in them."""


OLD_BUFFERS = re.compile(
    r".*\.(rotary_emb\.(original_)?inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)"
)
"""Constants that older releases of transformers saved: rotary frequencies, causal masks."""


@dataclass(frozen=True)
class Part:
    """One run of a fused axis: the factors it runs over, and what is even in it.

    ``even`` names the kinds of space whose signs this part does not feel: the gate of a gated MLP.
    """

    factors: tuple[str, ...]
    even: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layout:
    """An axis inside a site (an attention module, an MLP), before sizes and layer are known.

    ``site`` is a key of :attr:`Chart.sites`; ``outer``, ``span`` and ``only`` are as in
    :class:`~signed_align.labels.Fused`, in factor names.
    """

    site: str
    parts: tuple[Part, ...]
    outer: tuple[str, ...] = ()
    span: int = 1
    only: bool = False

    @property
    def unsigned(self) -> Layout:
        """The same axis for an even quantity."""
        everything = frozenset({"*"})
        return replace(self, parts=tuple(Part(part.factors, everything) for part in self.parts))


@dataclass(frozen=True)
class Tiled:
    """An axis that holds the coordinates of one space several times over, copy after copy.

    Hyper-connections keep several residual streams side by side; some blocks read the stream
    together with the embedding it began as.
    """

    axis: Axis

    @property
    def unsigned(self) -> Tiled:
        """The same axis for an even quantity."""
        return Tiled(self.axis.unsigned)


Template: TypeAlias = Axis | Layout | Tiled
Templates: TypeAlias = tuple[Template | None, ...]


@dataclass(frozen=True)
class Form:
    """The shape of one space of a site, and how it moves: factors, and what is free inside.

    The first of two factors counts blocks that move as wholes (if the site's do). ``pairing`` says
    which coordinates make up a rotary plane: ``half`` (c with c + D/2) or ``interleaved``.
    """

    factors: tuple[str, ...]
    within: Within
    pairing: str = ""


@dataclass(frozen=True)
class Site:
    """A module with spaces of its own: the forms of its spaces by kind; whether blocks move."""

    spaces: Mapping[str, Form]
    blocks_move: bool = False


@dataclass(frozen=True)
class ModuleLabel:
    """The labels of one module: of its parameters, and of what goes in and comes out.

    ``input`` and ``output`` are what the two factors of a low-rank update index, however the
    module lays out its weight.
    """

    input: Template | None = None
    output: Template | None = None
    parameters: Mapping[str, Templates] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that checkpoints store otherwise than the model holds it.

    ``stacked`` is the site of the experts that the model holds as one tensor, where this is the
    tensor of a single expert, and empty otherwise.
    """

    axes: Templates
    stacked: str = ""


@dataclass(frozen=True)
class Space:
    """One space of a concrete model."""

    name: str
    kind: str
    group: Group


@dataclass(frozen=True)
class Chart:
    """The labels of every weight of one model, its spaces, and the group that acts on each.

    Parameters
    ----------
    model_type : str
        The transformers model type.
    norm : str
        The normalisation in front of the readers: ``RMSNorm``, ``LayerNorm`` or both.
    native_group : Within
        What the residual stream admits.
    modules : mapping of str to ModuleLabel
        By path pattern: ``*`` is a number.
    stored : mapping of str to StoredTensor
        By pattern: checkpoint keys that are no parameter of the model class.
    sites : mapping of str to Site
        By path pattern.
    prefixes : tuple of str
        What may stand in front of a path and is left out of patterns.
    blocks : str
        The path of the list of decoder blocks.
    dimensions : Dimensions
        What the config counts.
    unproved : frozenset of str
        Patterns of labelled weights that the proof did not exercise: they are refused.
    buffers : frozenset of str
        Patterns of constants that the class computes and a checkpoint may hold.
    settings : mapping
        The config the chart is bound to.

    Examples
    --------
    >>> chart = Chart.for_model("llama", hidden_size=576)
    >>> chart.axes("model.layers.3.mlp.down_proj.weight", (576, 1536))
    (Axis(space='residual', signed=True), Axis(space='mlp:layers.3.mlp', signed=True))
    """

    model_type: str
    norm: str
    native_group: Within
    modules: Mapping[str, ModuleLabel]
    sites: Mapping[str, Site]
    prefixes: tuple[str, ...]
    blocks: str
    dimensions: Dimensions
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    unproved: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def for_model(cls, model_type: str, hidden_size: int | None = None, **settings: Any) -> Chart:
        """The chart of a transformers ``model_type`` with default settings but for those given.

        Raises ChartError, with the reason, if it cannot be discovered or proved.
        """
        from signed_align.proof import chart_of_type

        return chart_of_type(model_type, hidden_size, settings)

    @classmethod
    def of(cls, config: Any) -> Chart:
        """The proved chart of a transformers config; raises ChartError, with the reason, if none.

        No weights are needed: a miniature of the model is built and run, once per config class
        and transformers version.
        """
        from signed_align.proof import proved_chart

        return proved_chart(config)

    def verify(self, seed: int = 11) -> Proof:
        """Prove the chart again: move a random miniature of its class by a random gauge.

        Parameters
        ----------
        seed : int
            Chooses the element of the native group in every space.

        Returns
        -------
        Proof
            Its ``holds`` says whether the function stayed, and whether the native group is as
            small as the chart says. Raises SignedAlignError if the labels do not even fit.
        """
        from signed_align.proof import verify_again

        return verify_again(self, seed)

    def residual_alone(self) -> Chart:
        """The chart without the spaces of sites, for when a model's config is not known."""

        def plain(axis: Template | None) -> Template | None:
            return None if isinstance(axis, Layout) else axis

        return replace(
            self,
            sites={},
            modules={
                pattern: ModuleLabel(
                    plain(label.input),
                    plain(label.output),
                    {name: tuple(map(plain, axes)) for name, axes in label.parameters.items()},
                )
                for pattern, label in self.modules.items()
            },
            stored={
                pattern: StoredTensor(tuple(map(plain, tensor.axes)))
                for pattern, tensor in self.stored.items()
            },
        )

    @property
    def width(self) -> int:
        """The number of residual coordinates."""
        return self.dimensions.width

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of spaces the chart covers, residual first."""
        found = dict.fromkeys(kind for site in self.sites.values() for kind in site.spaces)
        return (RESIDUAL.space, *found)

    # ---- names -------------------------------------------------------------------------------

    @cached_property
    def _module_patterns(self) -> list[tuple[re.Pattern[str], ModuleLabel]]:
        return [(_as_regex(pattern), label) for pattern, label in self.modules.items()]

    @cached_property
    def _stored_patterns(self) -> list[tuple[re.Pattern[str], StoredTensor]]:
        return [(_as_regex(pattern), tensor) for pattern, tensor in self.stored.items()]

    def bare(self, name: str) -> list[str]:
        """The paths that ``name`` may stand for: itself, and without each prefix in front of it."""
        paths = [name]
        for path in paths:
            for prefix in self.prefixes:
                shorter = path.removeprefix(prefix)
                if shorter != path and shorter not in paths:
                    paths.append(shorter)
        return paths

    def pattern(self, name: str) -> str:
        """The pattern of a name: without prefixes, with ``*`` for numbers."""
        return star(without_prefixes(name, self.prefixes))

    def _find_module(self, path: str) -> tuple[ModuleLabel, tuple[str, ...]] | None:
        for candidate in self.bare(path):
            for pattern, label in self._module_patterns:
                match = pattern.fullmatch(candidate)
                if match:
                    return label, match.groups()
        return None

    def _find_stored_module(self, path: str) -> tuple[ModuleLabel, tuple[str, ...]] | None:
        """A module that checkpoints have and the class does not: a single expert's projection."""
        found = self._find_stored(f"{path}.weight")
        if found is None or len(found[0].axes) != 2:
            return None
        rows, columns = found[0].axes
        label = ModuleLabel(columns, rows, {"weight": (rows, columns)})
        return label, found[1]

    def _find_parameter(self, name: str) -> tuple[Templates, tuple[str, ...]] | None:
        for candidate in self.bare(name):
            path, _, parameter = candidate.rpartition(".")
            for pattern, label in self._module_patterns:
                match = pattern.fullmatch(path)
                if match and parameter in label.parameters:
                    return label.parameters[parameter], match.groups()
        return None

    def _find_stored(self, name: str) -> tuple[StoredTensor, tuple[str, ...]] | None:
        for candidate in self.bare(name):
            for pattern, tensor in self._stored_patterns:
                match = pattern.fullmatch(candidate)
                if match:
                    return tensor, match.groups()
        return None

    def module(self, path: str) -> tuple[ModuleLabel, tuple[str, ...]]:
        """The label of the module at ``path``, and the numbers in the path.

        Raises ChartError if the module is not understood.
        """
        found = self._find_module(path) or self._find_stored_module(path)
        if found is None:
            raise ChartError(
                f"{path!r} is not a module that the chart of {self.model_type} models knows, "
                "so it is not known how to move it."
            )
        return found

    def axes(self, name: str, shape: Iterable[int]) -> Axes:
        """The labels of the weight ``name``, one per axis.

        Parameters
        ----------
        name : str
            A checkpoint's key or a state-dict key, with or without prefixes.
        shape : iterable of int
            The tensor's shape.

        Raises
        ------
        ChartError
            If the weight is not understood, or a labelled axis does not have its space's size.
        """
        shape = tuple(shape)
        if self.is_buffer(name):
            return (None,) * len(shape)
        stored = self._find_stored(name)
        found = (stored[0].axes, stored[1]) if stored else self._find_parameter(name)
        if found is not None:
            if any(star(bare) in self.unproved for bare in self.bare(name)):
                raise ChartError(
                    f"the weight {name!r} had no part in the proof of the chart of "
                    f"{self.model_type} models, so it is not known how to move it."
                )
            return self.bind(name, found[0], shape, found[1])
        raise ChartError(
            f"the weight {name!r} is not one that the chart of {self.model_type} models "
            "knows, so it is not known how to move it."
        )

    def is_buffer(self, name: str) -> bool:
        """Whether ``name`` is a constant that a checkpoint may leave out."""
        if self._find_parameter(name) is not None:
            return False
        return self.pattern(name) in self.buffers or bool(OLD_BUFFERS.fullmatch(name))

    def origin(self, name: str, gauge: Gauge) -> str:
        """The key whose tensor becomes the one called ``name``: another expert's, if they move."""
        found = self._find_stored(name)
        if found is None or not found[0].stacked:
            return name
        tensor, numbers = found
        element = gauge.elements.get(_space("experts", tensor.stacked, numbers))
        if element is None:
            return name
        expert = numbers[-1]
        before, _, after = name.rpartition(f".{expert}.")
        return f"{before}.{int(element.perm[int(expert)])}.{after}"

    def token_matrices(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` with one residual vector per token: embedding and unembedding."""
        return [
            name
            for name in names
            if (self._find_parameter(name) or (None,))[0] == (VOCABULARY, RESIDUAL)
        ]

    def partners(self, names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
        """Of ``names`` those that ``others`` have too, and as what: prefixes may differ."""
        theirs = {without_prefixes(name, self.prefixes): name for name in others}
        bare = {name: without_prefixes(name, self.prefixes) for name in names}
        return {name: theirs[path] for name, path in bare.items() if path in theirs}

    def blocks_before(self, hook: str) -> int | None:
        """How many blocks have written to the residual stream at a Hugging Face ``hook``.

        A hook is a module path whose output is meant; None if it is not the residual stream.
        """
        pattern = re.compile(rf"{re.escape(self.blocks)}\.(\d+)")
        for path in self.bare(hook):
            block = pattern.fullmatch(path)
            if block and self.blocks:
                return int(block[1]) + 1
        return None

    # ---- sizes -------------------------------------------------------------------------------

    def bind(
        self, name: str, axes: Templates, shape: Sequence[int], numbers: Sequence[str] = ()
    ) -> Axes:
        """The labels of one tensor, given the numbers in its path.

        Raises ChartError if they do not fit its ``shape``.
        """
        shape = tuple(shape)
        if len(axes) != len(shape):
            raise self._misfit(name, shape, axes)
        bound: list[Label | None] = []
        for position, axis in enumerate(axes):
            if isinstance(axis, Tiled):
                copies, rest = divmod(shape[position], self.width)
                if rest:
                    raise self._misfit(name, shape, axes)
                section = Section((self.width,), ((axis.axis, (0,)),))
                bound.append(Fused((), (section,) * copies))
                continue
            if not isinstance(axis, Layout):
                is_residual = axis in (RESIDUAL, RESIDUAL.unsigned)
                if is_residual and shape[position] != self.width:
                    raise self._misfit(name, shape, axes)
                bound.append(axis)
                continue
            if axis.site not in self.sites:
                raise ChartError(f"{name!r} lies in a part of the model that had no proof.")
            covered = [place for place, other in enumerate(axes) if other == axis][: axis.span]
            factors = self._factors(axis, [shape[place] for place in covered])
            if factors is None:
                raise self._misfit(name, shape, axes)
            bound.append(self._fused(axis, factors, numbers))
        return tuple(bound)

    def _factors(self, layout: Layout, sizes: Sequence[int]) -> dict[str, int] | None:
        parts = [(*layout.outer, *part.factors) for part in layout.parts]
        known = {layout.outer[0]: sizes[0]} if layout.outer and len(sizes) > 1 else {}
        return self.dimensions.solve(parts, math.prod(sizes), known, part=layout.only)

    def _fused(self, layout: Layout, sizes: Mapping[str, int], numbers: Sequence[str]) -> Label:
        site = self.sites[layout.site]
        sections = []
        for part in layout.parts:
            names = (*layout.outer, *part.factors)
            axes = tuple(
                (
                    Axis(
                        _space(kind, layout.site, numbers),
                        signed=not ({kind, "*"} & part.even) and _has_signs(form),
                    ),
                    tuple(names.index(factor) for factor in form.factors),
                )
                for kind, form in site.spaces.items()
                if set(form.factors) <= set(names)
            )
            sections.append(Section(tuple(sizes[factor] for factor in part.factors), axes))
        outer = tuple(sizes[factor] for factor in layout.outer)
        only = int(numbers[-1]) if layout.only else None
        fused = Fused(outer, tuple(sections), layout.span, only)
        return _plain(fused)

    def _misfit(self, name: str, shape: tuple[int, ...], axes: Templates) -> ChartError:
        wanted = ", ".join(
            str(self.width) if isinstance(axis, Axis) and axis.space == RESIDUAL.space
            else "any" if axis is None or isinstance(axis, Axis)
            else f"{axis.site.rpartition('.')[2]} units"
            if isinstance(axis, Layout)
            else f"copies of {self.width}"
            for axis in axes
        )  # fmt: skip
        return ChartError(
            f"the tensor {name!r} has shape {tuple(shape)}; a {self.model_type} model with "
            f"{self.width} residual coordinates has ({wanted}) there."
        )

    def group(self, space: str, size: int) -> Group:
        """The native group of a space, such as ``residual`` or ``mlp:layers.3.mlp``.

        Raises ChartError if the model has no such space, or not of this size.
        """
        if space == RESIDUAL.space:
            return Group(self.width, self.native_group)
        kind, _, path = space.partition(":")
        site = self._site(path)
        if site is None or kind not in site.spaces:
            raise ChartError(
                f"the chart of {self.model_type} models does not cover the space {space!r} (it "
                f"covers {', '.join(self.kinds)})."
            )
        form = site.spaces[kind]
        sizes = self.dimensions.solve([form.factors], size, {})
        if sizes is None:
            raise ChartError(
                f"the space {space!r} of this {self.model_type} model does not have "
                f"{size} coordinates."
            )
        return self._group(form, site, sizes)

    @cached_property
    def _site_patterns(self) -> list[tuple[re.Pattern[str], Site]]:
        return [(_as_regex(pattern), site) for pattern, site in self.sites.items()]

    def sites_among(
        self, paths: Iterable[str], kinds: Iterable[str]
    ) -> list[tuple[str, tuple[str, ...]]]:
        """The sites with spaces of all ``kinds`` that module paths lead to, in the model's order.

        Each is given by its pattern, a key of :attr:`sites`, and the numbers in its path.
        """
        wanted = set(kinds)
        found = {}
        for name in paths:
            for path in self.bare(name):
                for pattern, site in self.sites.items():
                    match = _as_regex(pattern).fullmatch(path)
                    if match and wanted <= set(site.spaces):
                        found[pattern, match.groups()] = [int(number) for number in match.groups()]
        return sorted(found, key=lambda place: (found[place], place[0]))

    def _site(self, path: str) -> Site | None:
        """The site at a path, as the names of spaces have it."""
        return next((site for regex, site in self._site_patterns if regex.fullmatch(path)), None)

    def _group(self, form: Form, site: Site, sizes: Mapping[str, int]) -> Group:
        counts = [sizes[factor] for factor in form.factors]
        blocks = counts[0] if len(counts) > 1 else 1
        groups = sizes.get("expert_group", 1) if form.factors == ("expert",) else 1
        block_size = math.prod(counts) // blocks
        return Group(
            math.prod(counts),
            form.within,
            blocks=blocks * groups,
            blocks_move=(site.blocks_move and len(counts) > 1) or groups > 1,
            planes=self.dimensions.planes(block_size, form.pairing) if form.pairing else (),
        )

    def spaces(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Space]:
        """The spaces of a model whose tensors have these names and shapes, residual first."""
        return self.spaces_of((self.axes(name, shape), shape) for name, shape in shapes.items())

    def spaces_of(self, tensors: Iterable[tuple[Axes, Sequence[int]]]) -> dict[str, Space]:
        """The spaces that labelled tensors of given shapes index, residual first."""
        residual = RESIDUAL.space
        found = {residual: Space(residual, residual, self.group(residual, self.width))}
        for axes, shape in tensors:
            for label, size in zip(axes, shape, strict=True):
                for space, count in _sizes(label, size):
                    if space not in found and space != VOCABULARY.space:
                        kind = space.partition(":")[0]
                        found[space] = Space(space, kind, self.group(space, count))
        return found

    # ---- gauges ------------------------------------------------------------------------------

    def require_native(self, gauge: Gauge) -> None:
        """Raise GaugeError unless ``gauge`` acts on this model's spaces by its native group."""
        moved: dict[str, torch.Tensor] = {}
        for space, element in gauge.elements.items():
            try:
                group = self.group(space, element.size)
            except ChartError as error:
                raise GaugeError(f"the gauge does not fit: {error}") from error
            reason = group.violation(element)
            if reason and space == RESIDUAL.space and element.size != group.size:
                raise GaugeError(
                    f"the gauge has {element.size} residual coordinates, the model {group.size}."
                )
            if reason and space == RESIDUAL.space:
                raise GaugeError(
                    f"the gauge {reason}, but {self.model_type} models use LayerNorm, which "
                    "subtracts the mean over coordinates: only permutations and one global sign "
                    "leave their function unchanged."
                    if self.native_group is Within.PERMUTATION_AND_GLOBAL_SIGN
                    else f"the gauge {reason}, but only permutations leave the function of "
                    f"{self.model_type} models unchanged."
                )
            if reason:
                raise GaugeError(f"the gauge {reason} (space {space!r}).")
            self._require_agreement(space, element, group, moved)
        self._require_whole_sites(gauge, moved)

    def _require_whole_sites(self, gauge: Gauge, moved: Mapping[str, torch.Tensor]) -> None:
        """Raise if heads or experts move in some spaces of a site and not in its others."""
        for path, blocks in moved.items():
            if torch.equal(blocks, torch.arange(len(blocks))):
                continue
            site = self._site(path)
            for kind, form in site.spaces.items() if site else ():
                blocked = kind == "experts" or len(form.factors) > 1
                if blocked and f"{kind}:{path}" not in gauge.elements:
                    raise GaugeError(
                        f"the gauge moves the heads or experts of {path}, but has no element "
                        f"for its {kind}, which must move with them."
                    )

    def _require_agreement(
        self, space: str, element: SignedPermutation, group: Group, moved: dict[str, torch.Tensor]
    ) -> None:
        """Raise if two spaces of one site move its heads or experts differently."""
        kind, _, path = space.partition(":")
        blocks = element.perm if kind == "experts" else group.block_perm(element)
        if kind == "residual" or blocks is None or (kind != "experts" and group.blocks == 1):
            return
        if path in moved and not torch.equal(moved[path], blocks):
            raise GaugeError(f"the gauge moves the heads or experts of {path} in two ways.")
        moved[path] = blocks

    def random_gauge(
        self,
        spaces: Mapping[str, Space],
        *,
        seed: int = 0,
        signed: bool = True,
        kinds: Sequence[str] | None = None,
    ) -> dict[str, SignedPermutation]:
        """A random element of the native group in every space of ``kinds``.

        Parameters
        ----------
        spaces : mapping of str to Space
            As :meth:`spaces` gives them.
        seed : int
            Chooses the elements.
        signed : bool
            False draws permutations only.
        kinds : sequence of str, optional
            Kinds of spaces to draw in; residual alone by default.
        """
        generator = torch.Generator().manual_seed(seed)
        wanted = (RESIDUAL.space,) if kinds is None else kinds
        elements: dict[str, SignedPermutation] = {}
        blocks: dict[str, torch.Tensor] = {}
        # experts first: the units inside them move with them
        for space in sorted(spaces.values(), key=lambda space: space.kind != "experts"):
            path = space.name.partition(":")[2]
            if space.kind not in wanted:
                if f"experts:{path}" in elements:
                    still = replace(space.group, within=Within.NOTHING)
                    elements[space.name] = still.random(generator, block_perm=blocks[path])
                continue
            if space.kind == "residual":
                elements[space.name] = space.group.random(generator, signed=signed)
                continue
            if path not in blocks and space.group.blocks > 1 and space.kind != "experts":
                whole = all(
                    other.kind in wanted
                    for other in spaces.values()
                    if other.name.partition(":")[2] == path
                )
                blocks[path] = (
                    space.group.random_blocks(generator)
                    if whole
                    else torch.arange(space.group.blocks)
                )
            own = None if space.kind == "experts" else blocks.get(path)
            elements[space.name] = space.group.random(generator, signed=signed, block_perm=own)
            if space.kind == "experts":
                blocks[path] = elements[space.name].perm
        return elements


def numbers_in(name: str) -> list[str]:
    """The numbers between the dots of a name."""
    return re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.")


def _sizes(label: Label | None, size: int) -> Iterator[tuple[str, int]]:
    """The spaces of one axis of ``size`` entries, each with its number of coordinates."""
    if isinstance(label, Axis):
        yield label.space, size
    elif isinstance(label, Fused):
        for section in label.sections:
            factors = (*label.outer, *section.shape)
            for axis, which in section.axes:
                yield axis.space, math.prod(factors[k] for k in which)


def without_prefixes(name: str, prefixes: Iterable[str]) -> str:
    """``name`` without any of the prefixes in front of it, as often as they are there."""
    for prefix in prefixes:
        if name.startswith(prefix):
            return without_prefixes(name.removeprefix(prefix), prefixes)
    return name


def star(path: str) -> str:
    """A path with ``*`` for every number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f".{path}")[1:]


def _has_signs(form: Form) -> bool:
    return form.within not in (Within.PERMUTATION, Within.NOTHING)


def _space(kind: str, site: str, numbers: Sequence[str]) -> str:
    given = iter(numbers)
    return f"{kind}:" + re.sub(r"\*", lambda _: next(given), site)


def _plain(fused: Fused) -> Label:
    """A single axis of a single space as what it is."""
    if fused.outer or fused.span > 1 or len(fused.sections) != 1:
        return fused
    (section,) = fused.sections
    if len(section.axes) == 1 and section.axes[0][1] == tuple(range(len(section.shape))):
        return section.axes[0][0]
    return fused


def _as_regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"([0-9]{1,9})"))
