"""The section of a model card that says how weights came into the coordinates they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from signed_align.provenance import RECORD_NAME, Record

CARD_NAME = "README.md"
HEADING = "## Coordinates (signed-align)"
_SECTION = re.compile(rf"\n*^{re.escape(HEADING)}$.*?(?=^#{{1,2}} |\Z)", re.MULTILINE | re.DOTALL)


def add_section(directory: Path, record: Record, *, base: tuple[str, str] | None = None) -> None:
    """Say in a directory's model card how it was made, if it has one; an earlier section goes.

    Parameters
    ----------
    directory : Path
        Where the card lies.
    record : Record
        What there is to say.
    base : tuple of str, optional
        The base model that the card's metadata names, and the one that it shall name.
    """
    card = directory / CARD_NAME
    if not card.is_file():
        return
    try:
        text = card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # a card in another encoding is left as it is; the record says the same
    if base is not None:
        text = _with_base(text, *base)
    text = _SECTION.sub("", text).rstrip()
    card.write_text(f"{text}\n\n{HEADING}\n\n{section(record)}\n", encoding="utf-8")


def section(record: Record) -> str:
    """What the record's last step did, in plain words, with what was not checked."""
    step = record.steps[-1]
    sentences = [
        _WORDS[step["action"]](step),
        _gauge_words(step),
        _weak_words(step),
        _verification_words(step.get("verification")),
        "Nothing was trained on the new coordinates; evaluate it before you rely on it. "
        f"`{RECORD_NAME}` has the fingerprints, versions and commands"
        + (f" of all {len(record.steps)} steps." if len(record.steps) > 1 else "."),
    ]
    return "\n".join(sentence for sentence in sentences if sentence)


def _with_base(text: str, old: str, new: str) -> str:
    """The card with another ``base_model`` in its metadata, and nothing else changed."""
    head = re.match(r"\A---\n.*?^---$", text, re.MULTILINE | re.DOTALL)
    if head is None:
        return text
    line = rf"^(base_model:\s*)(['\"]?){re.escape(old)}\2\s*$"
    metadata = re.sub(line, lambda found: f"{found[1]}{new}", head[0], flags=re.MULTILINE)
    return metadata + text[head.end() :]


def _name(model: Mapping[str, Any] | None) -> str:
    return f"`{model['name']}`" if model else "a model that is not recorded"


def _ported(step: Mapping[str, Any]) -> str:
    return (
        f"This {step['kind']} was made on {_name(step['source'])} and moved to the coordinates of "
        f"{_name(step['target'])} by `signed-align port`."
    )


def _merged(step: Mapping[str, Any]) -> str:
    models = ", ".join(_name(model) for model in step["models"])
    return (
        f"Merged by `{step['merge_method']}` from {models}, all moved to the coordinates of "
        f"{_name(step['target'])} first."
    )


_WORDS = {"port": _ported, "merge": _merged}


def _gauge_words(step: Mapping[str, Any]) -> str:
    gauges = [step["gauge"]] if step.get("gauge") else list(step.get("gauges", ()))
    words = []
    for gauge in gauges:
        verdict = gauge.get("verdict")
        sure = (
            f", verdict `{verdict['finding']}` with {verdict['sure_fraction']:.1%} of the residual "
            "coordinates sure"
            if verdict
            else ""
        )
        words.append(f"gauge `{gauge['hash'][:12]}` from {gauge.get('method', 'elsewhere')}{sure}")
    return f"Through {'; '.join(words)}." if words else ""


def _weak_words(step: Mapping[str, Any]) -> str:
    weak = step.get("weak_energy")
    if weak is None:
        return ""
    return f"{weak:.1%} of its energy lies on coordinates that the gauge is not sure of."


def _verification_words(found: Mapping[str, Any] | None) -> str:
    if not found or "skipped" in found:
        return "It was not verified by running it."
    numbers = ", ".join(
        f"{name} {value:.3g}" for name, value in found.items() if isinstance(value, float)
    )
    return f"Verified ({found['claim']}: {found['of']}): {numbers}."
