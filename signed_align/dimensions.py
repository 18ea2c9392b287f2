"""What a config counts: heads, their coordinates, experts. Sizes of factors are solved from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Names under which transformers configs count one thing; the first that is set counts.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups")
HEAD_SIZE = ("head_dim", "kv_channels", "attention_head_dim", "dim_head", "attention_head_size")
EXPERTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_moe_experts",
)
# Prefixes and infixes of the same names for a model's second kind of attention layer.
VARIANTS = ("swa_{}", "num_global_{}", "global_{}", "sliding_{}", "{}_swa")
# Factors that no config needs to count: they are whatever an axis leaves.
FREE = ("unit", "expert")


@dataclass(frozen=True)
class Dimensions:
    """Sizes of factors, as far as the config says; several candidates where layers differ.

    Parameters
    ----------
    width : int
        Residual coordinates.
    candidates : tuple of mappings
        Each a consistent set of sizes: ``kv`` (key-value heads), ``query`` (query heads for each),
        ``key`` and ``value`` (coordinates), ``nope``, ``rope``, ``expert``, …
    rotary_fraction : float
        The share of a head's coordinates that is rotated.
    """

    width: int
    candidates: tuple[Mapping[str, int], ...]
    rotary_fraction: float = 1.0
    rotary_size: int = 0

    @classmethod
    def of(cls, config: Any) -> Dimensions:
        """Read a transformers config (of the text model, where there are several)."""
        width = int(_first(config, ("hidden_size", "d_model", "n_embd", "dim")) or 0)
        heads = _numbers(config, HEADS)
        groups = _numbers(config, KEY_VALUE_HEADS)
        if _multi_query(config):
            groups = [1]
        sizes = _numbers(config, HEAD_SIZE)
        value_sizes = _numbers(config, ("v_head_dim",))
        experts = _first(config, EXPERTS) or 0
        shared = {
            "expert": int(experts) if isinstance(experts, int) else 0,
            "expert_group": int(_first(config, ("n_group", "num_expert_group")) or 1),
            "nope": int(_first(config, ("qk_nope_head_dim",)) or 0),
            "rope": int(_first(config, ("qk_rope_head_dim",)) or 0),
        }
        candidates = []
        for head in heads or [0]:
            for group in groups or [head]:
                if not head or not group or head % group:
                    continue
                for size in sizes or [width // head]:
                    for value in [*value_sizes, size]:
                        one = {"kv": group, "query": head // group, "key": size, "value": value}
                        if {**shared, **one} not in candidates:
                            candidates.append({**shared, **one})
        fraction, rotated = _rotary(config)
        return cls(width, tuple(candidates or [shared]), fraction, rotated)

    def solve(
        self,
        parts: Sequence[Sequence[str]],
        size: int,
        known: Mapping[str, int],
        *,
        part: bool = False,
    ) -> dict[str, int] | None:
        """Sizes of all factors such that the parts fill an axis of ``size``; None if none fit.

        Parameters
        ----------
        parts : sequence of sequence of str
            The factors of each part; the axis holds one after the other.
        size : int
            The size of the axis.
        known : mapping of str to int
            Sizes that are already known.
        part : bool
            The axis is that of one index of the first factor.
        """
        names = {name for factors in parts for name in factors}
        solutions: list[dict[str, int]] = []
        for candidate in self.candidates:
            sizes = self._fill(parts, size, {**candidate, **known}, part)
            if sizes is None:
                continue
            solution = {name: sizes[name] for name in {*names, "expert_group"} & set(sizes)}
            if solution not in solutions:
                solutions.append(solution)
        return solutions[0] if len(solutions) == 1 else None

    @staticmethod
    def _fill(
        parts: Sequence[Sequence[str]], size: int, given: Mapping[str, int], part: bool
    ) -> dict[str, int] | None:
        """One candidate's sizes, the free factor solved for; None if they do not fill the axis."""
        names = {name for factors in parts for name in factors}
        sizes = {name: count for name, count in given.items() if count}
        if part:
            size *= sizes.get(parts[0][0], 0)
        unknown = [name for name in FREE if name in names and name not in sizes]
        if len(unknown) > 1 or not names - set(unknown) <= set(sizes):
            return None
        if unknown:
            sizes[unknown[0]] = 1
            free = sum(_count(factors, sizes) for factors in parts if unknown[0] in factors)
            fixed = sum(_count(factors, sizes) for factors in parts if unknown[0] not in factors)
            if size <= fixed or (size - fixed) % free:
                return None
            sizes[unknown[0]] = (size - fixed) // free
        return sizes if sum(_count(factors, sizes) for factors in parts) == size else None

    def planes(self, head_size: int, pairing: str) -> tuple[int, ...]:
        """The number of the rotary plane each of ``head_size`` coordinates lies in.

        Coordinates that are not rotated are planes of their own.
        """
        rotated = self.rotary_size or int(head_size * self.rotary_fraction)
        rotated = min(rotated, head_size) // 2 * 2
        half = rotated // 2
        numbers = [
            index // 2 if pairing == "interleaved" else index % half for index in range(rotated)
        ]
        return tuple(numbers + list(range(half, half + head_size - rotated)))


def _count(factors: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[factor] for factor in factors)


def _get(config: Any, name: str) -> Any:
    """An attribute of a config; a list of its values where layers differ; None if it is absent."""
    try:
        return getattr(config, name, None)
    except Exception:  # a config whose layers differ refuses to name one value
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def _first(config: Any, names: Iterable[str]) -> Any:
    for name in names:
        value = _get(config, name)
        value = value[0] if isinstance(value, list) else value
        if value is not None and not isinstance(value, bool):
            return value
    return None


def _numbers(config: Any, names: Iterable[str]) -> list[int]:
    """The number under the first of the names, then those of variants, each once."""
    found: list[int] = []
    for name in names:
        stem = name.removeprefix("num_")
        for spelled in (
            name,
            *(v.format(name) for v in VARIANTS),
            *(v.format(stem) for v in VARIANTS),
        ):
            value = _get(config, spelled)
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [
                number
                for number in values
                if isinstance(number, int) and not isinstance(number, bool) and number > 0
            ]
    return list(dict.fromkeys(found))


def _multi_query(config: Any) -> bool:
    return bool(getattr(config, "multi_query", False)) and not getattr(
        config, "new_decoder_architecture", False
    )


def _rotary(config: Any) -> tuple[float, int]:
    fraction = getattr(config, "partial_rotary_factor", None) or getattr(config, "rotary_pct", None)
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        fraction = parameters.get("partial_rotary_factor", fraction)
    size = getattr(config, "rotary_dim", None)
    return float(fraction or 1.0), int(size or 0)
