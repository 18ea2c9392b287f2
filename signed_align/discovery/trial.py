"""The trial: what all steps of a discovery share, and the one question that they ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from signed_align.chart import (
    Chart,
    Layout,
    Site,
    Template,
    Templates,
    numbers_in,
    star,
    without_prefixes,
)
from signed_align.dimensions import Dimensions
from signed_align.discovery.bench import TOLERANCE, Bench
from signed_align.errors import SignedAlignError
from signed_align.gauge import Gauge
from signed_align.groups import Within
from signed_align.labels import Axes, moves, transport


@dataclass
class Draft:
    """What is known so far of a model's chart.

    ``axes`` are by concrete tensor name, ``sites`` by pattern; ``native_group`` is that of the
    residual stream.
    """

    axes: dict[str, Templates] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    native_group: Within = Within.SIGNED_PERMUTATION


class Trial:
    """A miniature, what its config counts, and the draft of its chart.

    Parameters
    ----------
    bench : Bench
        The miniature, and what it reads.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.config = bench.model.config
        self.dimensions = Dimensions.of(text_config(self.config))
        self.modules: dict[str, Any] = dict(bench.model.named_modules())
        base = getattr(bench.model, "base_model_prefix", "")
        wrappers = ("base_model.model.", "model.", "language_model.", f"{base}.")
        self.prefixes = tuple(dict.fromkeys(wrapper for wrapper in wrappers if wrapper != "."))
        self.draft = Draft()

    # ---- names and tensors -------------------------------------------------------------------

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The miniature's tensors by name."""
        return self.bench.state

    @property
    def width(self) -> int:
        """The number of residual coordinates."""
        return self.dimensions.width

    def bare(self, name: str) -> str:
        """A name without what wrappers put in front of it."""
        return without_prefixes(name, self.prefixes)

    def pattern(self, name: str) -> str:
        """A bare name with ``*`` for numbers."""
        return star(self.bare(name))

    def first_modules(self) -> list[str]:
        """The paths of the first module of each pattern."""
        first: dict[str, str] = {}
        for path in self.modules:
            first.setdefault(star(path), path)
        return list(first.values())

    def inside(self, path: str) -> dict[str, Tensor]:
        """The tensors of a module and of those below it, by name."""
        return {name: tensor for name, tensor in self.state.items() if name.startswith(f"{path}.")}

    def tensor(self, path: str, modules: Iterable[str]) -> str | None:
        """The name of the weight of the first of ``modules`` that the module at ``path`` has."""
        names = (f"{path}.{module}.weight" for module in modules)
        return next((name for name in names if name in self.state), None)

    # ---- labels ------------------------------------------------------------------------------

    def every(self, axes: Mapping[str, Templates]) -> dict[str, Templates]:
        """The same labels on all layers, by pattern of name."""
        by_pattern = {star(name): labels for name, labels in axes.items()}
        return {
            name: by_pattern[star(name)]
            for name, tensor in self.state.items()
            if star(name) in by_pattern and tensor.ndim == len(by_pattern[star(name)])
        }

    def with_label(self, name: str, position: int, label: Template) -> Templates:
        """The labels that a tensor has already, with one more."""
        axes = list(self.draft.axes[name])
        axes[position] = label
        return tuple(axes)

    def on_free_axis(self, name: str, label: Template) -> Templates | None:
        """The labels of a tensor with ``label`` on its one free axis; None if it has not one."""
        free = [position for position, axis in enumerate(self.draft.axes[name]) if axis is None]
        return self.with_label(name, free[0], label) if len(free) == 1 else None

    def on_axes_of_size(self, name: str, size: int, label: Template) -> Templates:
        """The labels of a tensor with ``label`` on all free axes of one size."""
        return tuple(
            label if count == size and own is None else own
            for count, own in zip(self.state[name].shape, self.draft.axes[name], strict=True)
        )

    # ---- trying ------------------------------------------------------------------------------

    def holds(
        self,
        axes: Mapping[str, Templates],
        sites: Mapping[str, Site],
        *,
        group: Within | None = None,
        seed: int = 1,
    ) -> bool:
        """Whether the function stays when a random gauge moves the tensors.

        Parameters
        ----------
        axes : mapping of str to tuple
            Labels by tensor name; other tensors are left.
        sites : mapping of str to Site
            By pattern. The gauge acts on all of their spaces, or on the residual stream if there
            are none.
        group : Within, optional
            The native group of the residual stream; the draft's by default.
        seed : int
            Chooses the gauge.

        Returns
        -------
        bool
            False also if the labels fit no tensor, contradict each other, or nothing moves.
        """
        kinds = tuple(dict.fromkeys(kind for site in sites.values() for kind in site.spaces))
        chart = self._unlabelled_chart(sites, group or self.draft.native_group)
        try:
            spaces = chart.spaces_of(self._bound(axes, chart).values())
            elements = chart.random_gauge(spaces, seed=seed, kinds=kinds if sites else None)
            if all(element.is_identity for element in elements.values()):
                return False
            return self.bench.change(self._moved(axes, Gauge(elements), chart)) <= TOLERANCE
        except SignedAlignError:
            return False

    def change(self, axes: Mapping[str, Templates], gauge: Gauge) -> float:
        """By how much a gauge of the residual stream changes the function, as :meth:`Bench.change`.

        Raises SignedAlignError if the labels do not fit the tensors.
        """
        chart = self._unlabelled_chart({}, Within.PERMUTATION)
        return self.bench.change(self._moved(axes, gauge, chart))

    def _unlabelled_chart(self, sites: Mapping[str, Site], group: Within) -> Chart:
        """A chart that binds labels to sizes, and has none itself."""
        return Chart(
            self.config.model_type, "", group, {}, sites, self.prefixes, "", self.dimensions
        )

    def _bound(
        self, axes: Mapping[str, Templates], chart: Chart
    ) -> dict[str, tuple[Axes, Sequence[int]]]:
        """The labels of each tensor, bound to its layer and sizes, beside its shape."""
        found: dict[str, tuple[Axes, Sequence[int]]] = {}
        for name, labels in axes.items():
            shape = tuple(self.state[name].shape)
            numbers = numbers_in(self.bare(name))
            found[name] = chart.bind(name, labels, shape, numbers), shape
        return found

    def _moved(
        self, axes: Mapping[str, Templates], gauge: Gauge, chart: Chart
    ) -> dict[str, Tensor]:
        return {
            name: transport(self.state[name], labels, gauge)
            for name, (labels, _) in self._bound(axes, chart).items()
            if any(moves(label, gauge) for label in labels)
        }

    # ---- accepting ---------------------------------------------------------------------------

    def accept(self, pattern: str, site: Site, axes: Mapping[str, Templates]) -> None:
        """Take a site, and the labels of its tensors, into the draft."""
        self.draft.sites[pattern] = site
        self.draft.axes.update(axes)

    def drop_sites_that_fail(self) -> None:
        """Leave out sites whose labels, found on one layer, do not hold on all of them."""
        for pattern, site in list(self.draft.sites.items()):
            axes = {
                name: labels
                for name, labels in self.draft.axes.items()
                if any(isinstance(axis, Layout) and axis.site == pattern for axis in labels)
            }
            if self.holds(axes, {pattern: site}, seed=7):
                continue
            del self.draft.sites[pattern]
            for name, labels in axes.items():
                self.draft.axes[name] = tuple(
                    None if isinstance(axis, Layout) else axis for axis in labels
                )


def text_config(config: Any) -> Any:
    """The config of the decoder that the residual stream runs through."""
    return config.get_text_config(decoder=True)
