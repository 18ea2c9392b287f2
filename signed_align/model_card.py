"""The section of a model card that says how weights came into the coordinates they are in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from signed_align.gauge import BASELINES
from signed_align.provenance import RECORD_NAME, Record

CARD_NAME = "README.md"
HEADING = "## Coordinates (signed-align)"
END = "<!-- end of what signed-align says -->"
_SECTION = re.compile(
    rf"\s*^{re.escape(HEADING)}$(?:(?!^#).)*?^{re.escape(END)}$\s*", re.MULTILINE | re.DOTALL
)
_METADATA = re.compile(r"\A\ufeff?---\n.*?^---$", re.MULTILINE | re.DOTALL)


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
        raw = card.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return  # a card in another encoding is left as it is; the record says the same
    ending = "\r\n" if "\r\n" in raw else "\n"
    text = without_section(raw.replace("\r\n", "\n"))
    if base is not None:
        text = _with_base(text, *base)
    text = f"{text.rstrip()}\n\n{HEADING}\n\n{section(record)}\n\n{END}\n"
    card.write_bytes(text.replace("\n", ending).encode("utf-8"))


def renew_section(directory: Path, record: Record) -> None:
    """As :func:`add_section`, for a card that has a section, which would be out of date."""
    card = directory / CARD_NAME
    if card.is_file() and HEADING.encode() in card.read_bytes():
        add_section(directory, record)


def without_section(text: str) -> str:
    """A card without what this package says in it."""
    return _SECTION.sub("\n\n", text)


def without_metadata(text: str) -> str:
    """A card without the metadata on its top."""
    return _METADATA.sub("", text)


def section(record: Record) -> str:
    """What the record's last step did, in plain words, with what was not checked."""
    step = record.steps[-1]
    sentences = [
        _WORDS[step["action"]](step),
        _gauge_words(step),
        f"It is doubtful that it belonged there: {step['doubt']}." if step.get("doubt") else "",
        _weak_words(step),
        _verification_words(step.get("verification")),
        "Nothing was trained on the new coordinates; evaluate it before you rely on it. "
        f"`{RECORD_NAME}` has the fingerprints, versions and commands"
        + (f" of all {len(record.steps)} steps." if len(record.steps) > 1 else "."),
    ]
    return "\n".join(sentence for sentence in sentences if sentence)


def _with_base(text: str, old: str, new: str) -> str:
    """The card with another base model in its metadata, wherever that names it as a whole."""
    head = _METADATA.match(text)
    if head is None:
        return text
    old = old.rstrip("/")
    tagged = re.sub(
        rf"(base_model:adapter:){re.escape(old)}/?(?=\s|['\"]|$)", rf"\g<1>{new}", head[0]
    )
    whole = rf"(?<=[\s\[,'\"]){re.escape(old)}/?(?=$|[\s\],'\"])"
    quoted = new if re.fullmatch(r"[\w./-]+", new) else json.dumps(new)

    def renamed(found: re.Match[str]) -> str:
        before, after = tagged[found.start() - 1], tagged[found.end() : found.end() + 1]
        return new if before == after and before in "'\"" else quoted

    return re.sub(whole, renamed, tagged, flags=re.MULTILINE) + text[head.end() :]


def _name(model: Mapping[str, Any] | None) -> str:
    return f"`{model['name']}`" if model else "a model that is not recorded"


def _ported(step: Mapping[str, Any]) -> str:
    home = f", made on `{step['made_on']}`," if step.get("any_source") else ""
    return (
        f"This {step['kind']}{home} was moved from the coordinates of {_name(step['source'])} to "
        f"those of {_name(step['target'])} by `signed-align port`."
    )


def _merged(step: Mapping[str, Any]) -> str:
    models = ", ".join(_name(model) for model in step["models"])
    moved = (
        f"all moved to the coordinates of {_name(step['reference'])} first"
        if step["gauges"]
        else "as they are: nothing was aligned"
    )
    return f"Merged by `{step['merge_method']}` from {models}, {moved}."


def _applied(step: Mapping[str, Any]) -> str:
    return (
        f"This checkpoint was moved from the coordinates of {_name(step['source'])} to those of "
        f"{_name(step['target'])} by `signed-align apply`."
    )


_WORDS = {"port": _ported, "merge": _merged, "apply": _applied}


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
        objective = gauge.get("objective")
        known = objective in BASELINES
        warned = f", the baseline `{objective}`, whose signs are all +" if known else ""
        how = gauge.get("method", "elsewhere")
        words.append(f"gauge `{gauge['hash'][:12]}` from {how}{warned}{sure}")
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
