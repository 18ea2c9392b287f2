"""Commands that show: what things are and what relates them, what moves, results, the demo."""

from __future__ import annotations

import warnings
from pathlib import Path

import click

from signed_align.cli.framework import (
    POSITIVE,
    SEED,
    Report,
    command,
    device_option,
    directories,
    draw,
    existing_output,
    given,
    plot_option,
    plotted,
    require_plot,
    text_option,
)
from signed_align.errors import SignedAlignError, SignedAlignWarning


@command("inspect")
@click.argument("thing")
def inspect_command(thing: str) -> Report:
    """Show what a model, a gauge, or anything that `port` moves is."""
    from signed_align.inspection import inspect

    return Report(*inspect(thing))


@command("diagnose")
@click.argument("a")
@click.argument("b")
@text_option
@click.option(
    "--tokens", type=POSITIVE, help="Calibration tokens at most; by default 8 a coordinate."
)
@click.option("--seed", default=0, type=SEED, show_default=True, help="Chooses the text.")
@plot_option
@device_option
@existing_output
def diagnose_command(
    a: str,
    b: str,
    text: Path | None,
    tokens: int | None,
    seed: int,
    plot: Path | None,
    device: str,
    force: bool,
) -> Report:
    """Say what relates the checkpoints A and B, how sure that is, and what to run next.

    Configs are compared first, then weights, then activations, and no more than is needed. The
    exit code is 0 whatever the verdict. The plot shows the margins of the gauge, if there is one.
    """
    from signed_align.diagnosis import MEANING, diagnose
    from signed_align.report.figures import draw_margins

    require_plot(plot, force, [*directories(a, b), *given(text)])
    found = diagnose(a, b, text=text, max_tokens=tokens, device=device, seed=seed)
    gauge = found.gauge
    if gauge is not None:
        draw(plot, force, lambda file: draw_margins(gauge, file, f"{a} to {b}"))
    elif plot is not None:
        warnings.warn(
            f"there is no gauge, so {plot} is not drawn.", SignedAlignWarning, stacklevel=2
        )
    lines = [
        f"{found.verdict.value}: {MEANING[found.verdict]}",
        f"  confidence {found.confidence:.3f}, settled by {found.stage}",
    ]
    if found.coordinates not in (found.verdict, None):
        lines.append(f"  the tokens that both have show: {found.coordinates.value}")
    lines += [f"  {entry['stage']:12} {entry['found']}" for entry in found.evidence]
    for kind, entry in found.spaces.items():
        lines.append(
            f"  {kind:12} {entry['relation']}: {entry['coordinates']:,} coordinates, "
            f"{entry['sure']:.1%} sure; of these {entry['moved']:.1%} move, "
            f"{entry['negative']:.1%} with another sign"
        )
    lines.append(found.advice)
    if found.next is not None:
        lines.append(f"Next: {found.next}")
    drawn = plot if gauge is not None else None
    return Report(
        {**found.to_dict(), "plot": str(drawn) if drawn else None}, lines + plotted(drawn)
    )


@command("support")
@click.argument("types", nargs=-1)
@click.option("--peft", is_flag=True, help="Say which PEFT types move, and which do not and why.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a page of documentation.")
def support_command(types: tuple[str, ...], peft: bool, as_markdown: bool) -> Report:
    """Prove the charts of transformers' causal language models, or of the model TYPES given.

    With --peft, say which types of PEFT adapters move.
    """
    from signed_align.support import markdown, model_types, table

    if types and as_markdown:
        raise SignedAlignError("--markdown writes the page of all types; name none.")
    if peft:
        return _peft_support(types, as_markdown)

    unknown = sorted(set(types) - set(model_types()))
    if unknown:
        raise SignedAlignError(
            f"{unknown[0]!r} is not a causal language model type of the installed transformers."
        )
    entries = table(types or None)
    width = max(len(entry.model_type) for entry in entries)
    lines = [
        f"{entry.model_type:{width}}  "
        + (
            f"{entry.native_group}: {', '.join(entry.spaces_proved)}"
            if entry.spaces_proved
            else f"refused: {entry.reason}"
        )
        for entry in entries
    ]
    return Report(
        {"models": [entry.to_dict() for entry in entries]},
        markdown(entries).splitlines() if as_markdown else lines,
    )


def _peft_support(types: tuple[str, ...], as_markdown: bool) -> Report:
    from signed_align.adapters.peft_table import markdown, table

    rows = table([name.upper() for name in types])
    width = max(len(row.peft_type) for row in rows)
    lines = [
        f"{row.peft_type:{width}}  {row.verdict:9} {'; '.join(row.conditions)}".rstrip()
        for row in rows
    ]
    return Report(
        {"peft": [row.to_dict() for row in rows]},
        markdown(rows).splitlines() if as_markdown else lines,
    )


@command("report")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="HTML page to write."
)
@click.option("--title", default="", help="Heading of the page.")
@existing_output
def report_command(directory: Path, out: Path, title: str, force: bool) -> Report:
    """Gather the JSON outputs and gauge files in DIRECTORY in one HTML page with plots.

    The page is self-contained; its plots also lie beside it as PNG files, in a directory that is
    named after it.
    """
    from signed_align.report import report

    result = report(directory, out, title=title, force=force)
    return Report(
        result,
        [
            f"The page {out} shows {len(result['files'])} files, "
            f"with {len(result['plots'])} plots.",
            *(f"  skipped {row['file']}: {row['reason']}" for row in result["skipped"]),
        ],
    )


@command("demo")
@click.option(
    "--model", help="Checkpoint or Hub id; by default SmolLM2-135M from the Python package index."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Directory for artifacts, JSON and plots; replaced if it is an earlier demo's.",
)
@click.option(
    "--seed", default=0, type=SEED, show_default=True, help="Seed of twin, training and sampling."
)
def demo_command(model: str | None, out: Path, seed: int) -> Report:
    """Move a LoRA, an SAE and a merge to a scrambled twin of a real model."""
    from signed_align.demo import run_demo

    results, lines = run_demo(model=model, out=out, seed=seed)
    return Report(results, lines)
