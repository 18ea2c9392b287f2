"""Commands on gauges, and on what they say of coordinates: gauge, transport, audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from signed_align.cli.framework import (
    POSITIVE,
    SEED,
    Report,
    accept_weak_option,
    command,
    device_option,
    directories,
    draw,
    existing_output,
    given,
    numbers,
    plot_option,
    plotted,
    quantiles,
    require_plot,
    spaces_option,
    text_option,
    verification_lines,
    verify_option,
    words,
)
from signed_align.errors import SignedAlignError

OBJECTIVES = ["sign_marginalized", "signed", "permutation"]


@command("gauge")
@click.argument("source")
@click.argument("target")
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Gauge file to write."
)
@click.option(
    "--from",
    "method",
    type=click.Choice(["activations", "weights", "both"]),
    help="By default activations if --text is given, weights otherwise.",
)
@text_option
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default=OBJECTIVES[0],
    show_default=True,
    help="What is matched by; signed and permutation are baselines, with every sign +.",
)
@spaces_option
@click.option("--layers", help="Hidden states to use, such as 1,15,-2; by default all.")
@click.option(
    "--tokens", type=POSITIVE, help="Calibration tokens at most; by default 8 a coordinate."
)
@click.option("--truth", type=click.Path(path_type=Path), help="True gauge, to score against.")
@click.option(
    "--shuffle-pairs",
    is_flag=True,
    help="A negative control: pair the samples of SOURCE and TARGET at random.",
)
@click.option("--seed", default=0, type=SEED, show_default=True, help="Chooses text and pairs.")
@accept_weak_option
@verify_option
@device_option
@existing_output
def gauge_command(
    source: str,
    target: str,
    out: Path,
    method: Any,
    text: Path | None,
    objective: str,
    spaces: str,
    layers: str | None,
    tokens: int | None,
    truth: Path | None,
    shuffle_pairs: bool,
    seed: int,
    accept_weak: bool,
    verify: bool | None,
    device: str,
    force: bool,
) -> Report:
    """Recover the gauge that leads from SOURCE's to TARGET's coordinates.

    Where the evidence speaks for no gauge, as between unrelated models, nothing is written and the
    exit code is 3.
    """
    from signed_align.activations import sentences_of
    from signed_align.checkpoint import Checkpoint
    from signed_align.files import require_free
    from signed_align.gauge import BASELINES, Gauge, by_kind
    from signed_align.recovery import recover
    from signed_align.reliability import Finding, Verdict, warn_of_verdict
    from signed_align.verification import verified, verify_gauge

    read = [*directories(source, target), *given(text, truth)]
    require_free(out, directory=False, force=force, inputs=read)
    true_gauge = Gauge.load(truth) if truth is not None else None
    if true_gauge is not None:
        if "residual" not in true_gauge.elements:
            raise SignedAlignError(f"the gauge in {truth} does not move the residual stream.")
        true_gauge.require_source(Checkpoint.open(source).identity)
        true_gauge.require_target(Checkpoint.open(target).identity)
    gauge = recover(
        source,
        target,
        method=method,
        text=text,
        objective=objective,
        layers=numbers(layers) if layers is not None else None,
        spaces=words(spaces),
        max_tokens=tokens,
        device=device,
        seed=seed,
        shuffle_pairs=shuffle_pairs,
        accept_weak=accept_weak,
    )
    unless = "a baseline, whose signs are known to be wrong" if objective in BASELINES else None
    if shuffle_pairs or accept_weak:
        unless = "it need not be reliable"
    ends = [Checkpoint.open(source), Checkpoint.open(target)]
    verification = verified(
        verify,
        ends,
        lambda: verify_gauge(gauge, ends[0], ends[1], sentences_of(text), device=device),
        unless=unless,
    )
    gauge = replace(gauge, provenance={**gauge.provenance, "verification": verification})
    gauge.save(out, force=force)
    summary = gauge.summary()
    verdict = Verdict.of(gauge)
    assert verdict is not None
    if verdict.finding is not Finding.SAME_COORDINATES:  # a line of the report says that one
        warn_of_verdict(gauge)
    residual = summary["spaces"]["residual"]
    kinds = by_kind(gauge, true_gauge)
    data = {
        "gauge": str(out),
        "verdict": verdict.to_dict(),
        "margin": residual["margin"],
        "kinds": kinds,
        "verification": verification,
        **summary,
    }
    lines = [
        f"Recovered a gauge of {residual['size']} residual coordinates from "
        f"{summary['provenance']['method']} ({objective}); it is in {out}.",
        f"  {verdict}",
        *verification_lines(verification),
    ]
    for kind, entry in kinds.items():
        count = f" in {entry['spaces']} spaces" if entry["spaces"] > 1 else ""
        lines += [
            f"  {kind}: {entry['coordinates']} coordinates{count}",
            f"    + signs         {entry['positive_sign_fraction']:.3f}",
            f"    unmoved         {entry['fixed_point_fraction']:.3f}",
            f"    margin          {quantiles(entry['margin'])}",
            f"    weak (< 0.05)   {entry['weak_fraction']:.3f}",
        ]
        if "permutation_accuracy" in entry:
            lines += [
                f"    permutation accuracy {entry['permutation_accuracy']:.3f}",
                f"    sign accuracy        {entry['sign_accuracy']:.3f}",
            ]
    if true_gauge is not None:
        data |= gauge.element("residual").agreement(true_gauge.element("residual"))
    return Report(data, lines)


@command("transport")
@click.argument("checkpoints", nargs=-1)
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Gauge file to write."
)
@click.option(
    "--runs",
    nargs=2,
    metavar="RUN_A RUN_B",
    help="Two Trainer output directories, instead of CHECKPOINTS: from A's last checkpoint back "
    "to --base and on to B's last.",
)
@click.option("--base", help="The checkpoint that both runs were trained from.")
@click.option(
    "--from",
    "method",
    type=click.Choice(["activations", "weights"]),
    default="activations",
    show_default=True,
    help="What neighbours are matched by.",
)
@text_option
@click.option(
    "--tokens", type=POSITIVE, help="Calibration tokens at most; by default 8 a coordinate."
)
@click.option(
    "--lost-below",
    type=float,
    default=0.0,
    show_default=True,
    help="A coordinate is lost when its margin falls below this; below 0, another was better.",
)
@click.option("--truth", help="True gauge, to score against; or the word identity.")
@accept_weak_option
@plot_option
@device_option
@existing_output
def transport_command(
    checkpoints: tuple[str, ...],
    out: Path,
    runs: tuple[str, str] | None,
    base: str | None,
    method: Any,
    text: Path | None,
    tokens: int | None,
    lost_below: float,
    truth: str | None,
    accept_weak: bool,
    plot: Path | None,
    device: str,
    force: bool,
) -> Report:
    """Recover the gauge from the first of CHECKPOINTS to the last, neighbour by neighbour.

    Gauges between neighbours are composed; a coordinate whose margin collapses on the way is
    listed as lost. Where the evidence of a step speaks for no gauge, nothing is written and the
    exit code is 3. Matching the ends directly is reported beside it, and with --runs also matching
    via the base, and which coordinates come back to themselves on the way round.
    """
    from signed_align.files import require_free
    from signed_align.gauge import Gauge, by_kind
    from signed_align.reliability import Verdict
    from signed_align.trajectory import Truth, path_of_runs, plot_trajectory, transport_along

    if bool(runs) == bool(checkpoints):
        raise SignedAlignError("give either checkpoints, in their order, or --runs.")
    if bool(runs) != (base is not None):
        raise SignedAlignError("--runs and --base go together: two runs, and where they started.")
    path, position = list(checkpoints), None
    if runs and base is not None:
        path, position = path_of_runs(*runs, base)
    true_file = None if truth is None or truth == "identity" else Path(truth)
    read = [*directories(*path), *given(text, true_file)]
    require_free(out, directory=False, force=force, inputs=read)
    require_plot(plot, force, [*read, out])
    known: Truth | None = "identity" if truth == "identity" else None
    if true_file is not None:
        known = Gauge.load(true_file)
    trajectory = transport_along(
        path,
        base=position,
        method=method,
        text=text,
        truth=known,
        lost_below=lost_below,
        max_tokens=tokens,
        device=device,
        accept_weak=accept_weak,
    )
    gauge = trajectory.gauge
    gauge.save(out, force=force)
    verdict = Verdict.of(gauge)
    assert verdict is not None
    draw(plot, force, lambda file: plot_trajectory(trajectory, file))
    kinds = by_kind(gauge)
    kinds["residual"] |= trajectory.accuracy.get("transport", {})
    return Report(
        {
            "gauge": str(out),
            "verdict": verdict.to_dict(),
            "margin": kinds["residual"]["margin"],
            "kinds": kinds,
            **gauge.summary(),
            **trajectory.to_dict(),
            **trajectory.accuracy.get("transport", {}),
            "plot": str(plot) if plot else None,
        },
        [
            f"Transported a gauge of {trajectory.size} residual coordinates along {len(path)} "
            f"checkpoints, from {method}; it is in {out}.",
            f"  {verdict}; sure counts the weakest step",
            *_transported(trajectory.to_dict(), trajectory.size),
            *plotted(plot),
        ],
    )


def _transported(data: dict[str, Any], size: int) -> list[str]:
    """A trajectory in lines: a table of its steps, what was lost, and what to compare it with."""
    names = ["/".join(Path(step["target"]).parts[-2:]) for step in data["steps"]]
    width = max(len(name) for name in ["step to", *names])
    scored = "sign_accuracy" in data["steps"][0]
    heading = "margin min  median   weak  moved  lost so far" + ("  right" if scored else "")
    lines = [f"  {'step to':{width}}  {heading}"]
    for name, step in zip(names, data["steps"], strict=True):
        margin, right = step["margin"], f"  {step['sign_accuracy']:5.3f}" if scored else ""
        lines.append(
            f"  {name:{width}}  {margin['min']:10.3f}  {margin['median']:6.3f}  "
            f"{step['weak_fraction']:5.3f}  {step['moved_fraction']:5.3f}  {step['lost']:11}{right}"
        )
    lines.append(
        f"  lost (margin < {data['lost_below']:g} on the way): {len(data['lost'])} of {size}"
        f"{_listed(data['lost'])}"
    )
    for name, gauge in data["baselines"].items():
        label = f"baseline {name.replace('_', ' ')}"
        lines.append(f"  {label:18}  margin {quantiles(gauge['margin'])}")
    for name, scores in data["accuracy"].items():
        lines.append(
            f"  {name.replace('_', ' '):18}  permutation accuracy "
            f"{scores['permutation_accuracy']:.3f}, sign accuracy {scores['sign_accuracy']:.3f}"
        )
    if data["holonomy"] is not None:
        away = data["holonomy"]["not_returned"]
        lines.append(
            f"  holonomy: {data['holonomy']['returned_fraction']:.3f} of the base's coordinates "
            f"come back to themselves; {len(away)} do not{_listed(away)}"
        )
    return lines


def _listed(coordinates: list[int], most: int = 12) -> str:
    """Coordinates after a count: all, or the first of them."""
    if not coordinates:
        return ""
    more = f", … ({len(coordinates) - most} more with --json)" if len(coordinates) > most else ""
    return f": {', '.join(map(str, coordinates[:most]))}{more}"


@command("audit")
@click.argument("model")
@click.option(
    "--claim",
    required=True,
    type=click.Path(path_type=Path),
    help="JSON file: which claim, at which hook, about how many coordinates, on which texts.",
)
@click.option("--twins", default=20, type=POSITIVE, show_default=True, help="Twins to write.")
@click.option("--seed", default=0, type=SEED, show_default=True, help="Seed of the first twin.")
@click.option(
    "--recovered-from",
    type=click.Choice(["weights", "activations"]),
    default="weights",
    show_default=True,
    help="What the gauge to each twin is recovered from.",
)
@text_option
@plot_option
@existing_output
def audit_command(
    model: str,
    claim: Path,
    twins: int,
    seed: int,
    recovered_from: Any,
    text: Path | None,
    plot: Path | None,
    force: bool,
) -> Report:
    """Recompute a claim about coordinates on scrambled twins of MODEL, each the same function.

    Says how often the claim survives as stated, what chance would give, and how often it survives
    after transport through the true and through the recovered gauge. --text is what gauges are
    recovered on with --recovered-from activations.
    """
    from signed_align.audit import audit_claim, audit_lines, plot_audit
    from signed_align.claims import load_claim

    require_plot(plot, force, [*directories(model), *given(claim, text)])
    result = audit_claim(
        model,
        load_claim(claim),
        twins=twins,
        seed=seed,
        recovered_from=recovered_from,
        text=text,
    )
    draw(plot, force, lambda file: plot_audit(result, file))
    return Report(
        {**result.to_dict(), "plot": str(plot) if plot else None},
        [*audit_lines(result), *plotted(plot)],
    )
