"""What becomes of each PEFT type, for people: the tables that decide, read out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from signed_align.adapters.peft_methods import METHODS, REFUSALS, SHARED_REASON, Entry, Method
from signed_align.errors import ArtifactError
from signed_align.labels import Axis


@dataclass(frozen=True)
class Row:
    """One PEFT type: whether it moves, how its tensors are labelled, and what stands in the way.

    ``verdict`` is ``moves``, ``moves if`` or ``refused``.
    """

    peft_type: str
    verdict: str
    tensors: tuple[str, ...]
    conditions: tuple[str, ...]
    way_out: str
    remark: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def table(types: Iterable[str] | None = None) -> list[Row]:
    """A row for every type of the installed peft, or for those given.

    One that is in neither table has the verdict ``unknown``: it is refused. Raises ArtifactError
    for a name that is no type.
    """
    from peft import PeftType

    known = sorted(kind.value for kind in PeftType)
    unknown = sorted(set(types or ()) - set(known))
    if unknown:
        raise ArtifactError(f"{unknown[0]!r} is no PEFT type; known are {', '.join(known)}.")
    return [row_of(name) for name in known if not types or name in types]


def row_of(peft_type: str) -> Row:
    """What becomes of one type."""
    if peft_type in REFUSALS:
        refusal = REFUSALS[peft_type]
        return Row(peft_type, "refused", (), (refusal.reason,), refusal.way_out, "")
    if peft_type not in METHODS:
        return Row(peft_type, "unknown", (), (), "", "")
    method = METHODS[peft_type]
    conditions = tuple(dict.fromkeys(_conditions(method)))
    # what is meant for embeddings is conditional elsewhere only
    usual = any(
        rule.needs
        for name, rules in method.tensors.items()
        for rule in rules
        if name not in method.embedding
    )
    return Row(
        peft_type,
        "moves if" if usual or method.shared else "moves",
        tuple(_tensors(method)),
        conditions + tuple(_options(method)),
        method.way_out,
        method.remark,
    )


def _conditions(method: Method) -> Iterator[str]:
    """What a gauge must leave alone for some form of the method."""
    verbs = {"move": "leaves its {} where they are", "flip": "flips no signs of its {}"}
    for rules in method.tensors.values():
        for rule in rules:
            sides: dict[tuple[str, str], list[str]] = {}
            for need in rule.needs:
                sides.setdefault((need.verb, need.reason), []).append(f"{need.side.of}puts")
            for (verb, reason), named in sides.items():
                yield f"needs a gauge that {verbs[verb].format(' and '.join(named))}: {reason}"
    if method.shared:
        yield f"needs modules that all change alike: {SHARED_REASON}"


def _options(method: Method) -> Iterator[str]:
    for option, (_, reason) in method.options.items():
        yield f"not with every value of `{option}`: {reason}"


def _tensors(method: Method) -> Iterator[str]:
    for name, rules in method.tensors.items():
        free = [rule for rule in rules if not rule.needs] or rules
        forms = dict.fromkeys(_axes(rule.axes) for rule in free)
        yield f"`{name}` {' or '.join(forms)}"
    for name, rule in method.shared.items():
        yield f"`{name}` {_axes(rule.axes)}"
    for one in method.entries:
        yield f"`{one.indices}`, `{one.values}` entries of (out, in)"


def _axes(entries: tuple[Entry, ...]) -> str:
    return f"({', '.join(_word(entry) for entry in entries)})"


def _word(entry: Entry) -> str:
    if entry is None:
        return "·"
    if isinstance(entry, Axis):
        return entry.space if entry.signed else rf"\|{entry.space}\|"
    return str(entry)


def markdown(rows: list[Row]) -> str:
    """The table as a page of documentation."""
    import peft

    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    return "\n".join(
        [
            "# PEFT adapters",
            "",
            f"`signed-align support --peft --markdown` wrote this page with peft "
            f"{peft.__version__}, from the tables that decide. Of its {len(rows)} types "
            f"{counts['moves']} move, {counts['moves if']} move on a condition and "
            f"{counts['refused']} are refused.",
            "",
            *INTRODUCTION,
            "",
            "| type | verdict | how its tensors move | conditions and ways out |",
            "|---|---|---|---|",
            *(
                f"| {row.peft_type} | {row.verdict.removesuffix(' if')}"
                f"{' on a condition' if row.verdict == 'moves if' else ''} | "
                f"{'<br>'.join(row.tensors)} | {'<br>'.join(_remarks(row))} |"
                for row in rows
            ),
            "",
        ]
    )


def _remarks(row: Row) -> Iterator[str]:
    if row.remark:
        yield row.remark[0].upper() + row.remark[1:] + "."
    for condition in row.conditions:
        yield condition[0].upper() + condition[1:] + "."
    if row.way_out and row.conditions:
        yield f"Way out: {row.way_out}."


VERDICTS = ("moves", "moves if", "refused")
INTRODUCTION = (
    "`in` and `out` are the coordinates that go into the adapted module and come out of it, "
    "whatever space they are of; `·` is an axis that stays, and bars mark an axis that is permuted "
    "and keeps its signs. `small` and `large` are whichever of the two sides has fewer and more "
    "coordinates, `column` is the last axis of the module's own weight, `parameter` stands for all "
    "axes of the parameter that is copied, and `cache` for the keys and values of all layers.",
    "",
    "Beside an adapter's own tensors peft saves weights of the base: biases, whole modules, "
    "embeddings. They move as the base does. Files may be `adapter_model.safetensors` or "
    "`adapter_model.bin`, which is read without executing anything.",
    "",
    "A condition is checked against the gauge, module by module. A gauge of the residual stream "
    "alone, for example, leaves the outputs of `q_proj` where they are, so an adapter that rotates "
    "them (RoAd) moves through it.",
)
