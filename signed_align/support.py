"""What is proved of each causal language model type of the installed transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from signed_align.errors import ChartError, one_line
from signed_align.progress import track
from signed_align.proof import prove

# Obstacles that a proof that fails cannot name itself.
OBSTACLES = {
    "gemma4_assistant": "transformers itself refuses the default config of the class",
    "blt": "its byte patches are cut where a second model is unsure, so streams of three widths "
    "are joined, and no labels of them were found",
    "dory": "its layers interpolate between points of the unit sphere and run in loops, and no "
    "labels were found under which that stays the same",
    "inkling2_loop_text": "its loops exchange messages through learnt queries, for which no labels "
    "were found",
    "reformer": "its residual stream is two streams that are added in turn, and its positions are "
    "two tables for two parts of the coordinates",
    "roc_bert": "its embedding joins word, sound and shape vectors and maps them to the stream; "
    "the joined vector is as wide as several streams and mixes its parts",
}


@dataclass(frozen=True)
class Entry:
    """One model type: its norm and native group, the spaces proved, or why there are none.

    ``remarks`` name weights of the class that the proof did not reach, and checkpoint keys that
    are not understood: a checkpoint that has them is refused.
    """

    model_type: str
    norm: str | None
    native_group: str | None
    spaces_proved: tuple[str, ...]
    reason: str | None
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "spaces_proved": list(self.spaces_proved)}


def model_types() -> list[str]:
    """The causal language model types of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def table(types: Iterable[str] | None = None) -> list[Entry]:
    """Prove every model type (or those given) at its class's default settings."""
    wanted = list(types) if types is not None else model_types()
    return [entry(name) for name in track(wanted, "proving charts", unit="type")]


def entry(model_type: str) -> Entry:
    """Discover and prove one model type, or find out why not."""
    from transformers import AutoConfig

    try:
        chart, proof = prove(AutoConfig.for_model(model_type))
    except ChartError as error:
        reason = OBSTACLES.get(model_type, str(error))
    except Exception as error:  # classes fail in ways of their own
        reason = OBSTACLES.get(model_type, one_line(error))
    else:
        remarks = []
        if proof.unproved:
            remarks.append(f"not reached by the proof: {_some(proof.unproved)}")
        if proof.unread:
            remarks.append(f"stored in a form not understood: {_some(proof.unread)}")
        return Entry(
            model_type, chart.norm, chart.native_group.value, proof.spaces, None, tuple(remarks)
        )
    return Entry(model_type, None, None, (), reason)


def markdown(entries: Sequence[Entry]) -> str:
    """The table as a page of documentation."""
    import transformers

    proved = [entry for entry in entries if entry.spaces_proved]
    counts = {
        kind: sum(kind in entry.spaces_proved for entry in proved)
        for kind in ("residual", "mlp", "heads", "experts")
    }
    lines = [
        "# Supported models",
        "",
        f"`signed-align support --markdown` wrote this page with transformers "
        f"{transformers.__version__}. Of its {len(entries)} causal language model types "
        f"{counts['residual']} are proved in the residual stream, {counts['mlp']} in their MLPs, "
        f"{counts['heads']} in their attention heads and {counts['experts']} in their experts.",
        "",
        "A type that is not in the table may work too: a chart is discovered from the model's "
        "class, at the settings of its own config. `signed-align inspect MODEL` shows it.",
        "",
        "`values` are the coordinates of V with the columns of O, `keys` (and `nopes`, where they "
        "are not rotated) those of Q and K, `ssm` the channels of state-space layers.",
        "",
        "| model type | norm | native group | spaces proved |",
        "|---|---|---|---|",
        *(
            f"| {entry.model_type} | {entry.norm} | {_words(entry.native_group)} | "
            f"{', '.join(entry.spaces_proved)} |"
            for entry in proved
        ),
        "",
        "## Refused",
        "",
        "| model type | reason |",
        "|---|---|",
        *(
            f"| {entry.model_type} | {entry.reason} |"
            for entry in entries
            if not entry.spaces_proved
        ),
        "",
        "## Limits of those proved",
        "",
        "A checkpoint that holds one of these weights is refused.",
        "",
        *(f"* {entry.model_type}: {'; '.join(entry.remarks)}" for entry in proved if entry.remarks),
        "",
    ]
    return "\n".join(lines)


def _some(patterns: Sequence[str], most: int = 6) -> str:
    rest = f" and {len(patterns) - most} more" if len(patterns) > most else ""
    return ", ".join(patterns[:most]) + rest


def _words(value: str | None) -> str:
    return (value or "").replace("_", " ")
