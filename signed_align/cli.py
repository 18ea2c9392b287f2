"""The command line. Commands import what they need when they run, so `--help` is immediate."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from signed_align import __version__
from signed_align.errors import SignedAlignError, SignedAlignWarning

OBJECTIVES = ["sign_marginalized", "signed", "permutation"]
BAD_INPUT = 2
POSITIVE = click.IntRange(min=1)
SEED = click.IntRange(0, 2**32 - 1)


@dataclass
class Report:
    """What a command has to say: ``data`` for ``--json``, ``lines`` for people."""

    data: dict[str, Any]
    lines: list[str] = field(default_factory=list)


class MergekitCommand(click.Command):
    """A command that takes every option of mergekit-yaml, looked up when it is first used."""

    _extended = False

    def _extend(self) -> None:
        if self._extended:
            return
        self._extended = True
        from mergekit.options import add_merge_options

        carrier = add_merge_options(lambda **_: None)
        taken = {name for parameter in self.params for name in parameter.opts}
        self.params += [
            option
            for option in reversed(carrier.__click_params__)
            if not taken.intersection(option.opts) and option.name != "quiet"
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Our parameters and mergekit's."""
        self._extend()
        return super().get_params(ctx)

    def make_parser(self, ctx: click.Context) -> Any:
        """A parser that knows mergekit's options."""
        self._extend()
        return super().make_parser(ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="signed-align")
def main() -> None:
    """Move adapters, SAEs, vectors, training state and merges to checkpoints in other coordinates.

    RMSNorm transformers define their residual coordinates only up to a permutation and a sign flip
    of each. These commands recover that gauge, say how sure it is, and move things through it.
    """


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Report]], click.Command]:
    """Register a command: ``--json`` and ``--quiet``, errors in one sentence with exit code 2."""

    def decorate(function: Callable[..., Report]) -> click.Command:
        @functools.wraps(function)
        def run(as_json: bool, quiet: bool, **arguments: Any) -> None:
            _run(function, arguments, as_json=as_json, quiet=quiet)

        run = click.option("--quiet/--no-quiet", help="No progress, no warnings.")(run)
        run = click.option(
            "--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else."
        )(run)
        return main.command(name, **attributes)(run)

    return decorate


def _run(
    function: Callable[..., Report], arguments: dict[str, Any], *, as_json: bool, quiet: bool
) -> None:
    from signed_align import progress

    progress.quiet.set(quiet)
    said: list[str] = []

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, SignedAlignWarning):
            said.append(str(message))
            if not quiet:
                click.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("always", SignedAlignWarning)
        try:
            # Libraries that print must not disturb the JSON.
            with contextlib.redirect_stdout(sys.stderr):
                _quiet_libraries()
                report = function(**arguments)
        except SignedAlignError as error:
            if as_json:
                click.echo(json.dumps({"error": str(error)}))
            click.echo(f"error: {error}", err=True)
            sys.exit(BAD_INPUT)
    if as_json:
        click.echo(json.dumps({**report.data, "warnings": said}, indent=2, allow_nan=False))
    else:
        click.echo("\n".join(report.lines))


def _quiet_libraries() -> None:
    import logging
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


existing_output = click.option("--force", is_flag=True, help="Replace the output if it exists.")
output_directory = click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Directory to make."
)
any_source_option = click.option(
    "--any-source",
    is_flag=True,
    help="Accept a model other than the gauge's source, such as a fine-tune of it.",
)
inverse_option = click.option("--inverse", is_flag=True, help="Go from target to source.")
text_option = click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="UTF-8 text, a sentence a line; by default English prose that ships with Python.",
)
spaces_option = click.option(
    "--spaces",
    default="residual",
    show_default=True,
    help="Kinds of spaces, such as residual,mlp,heads; or all.",
)
plot_option = click.option(
    "--plot", type=click.Path(path_type=Path), help="Image file (png, svg, pdf)."
)
device_option = click.option("--device", default="cpu", show_default=True, help="Torch device.")


@command("demo")
@click.option("--model", help="Checkpoint or Hub id; by default SmolLM2-135M from the index.")
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


@command("scramble")
@click.argument("model")
@output_directory
@click.option("--seed", default=0, type=SEED, show_default=True, help="Chooses the group element.")
@click.option(
    "--group",
    type=click.Choice(["signed", "permutation"]),
    default="signed",
    show_default=True,
    help="Signed permutations, or permutations alone.",
)
@spaces_option
@click.option("--save-gauge", type=click.Path(path_type=Path), help="Save the true gauge here.")
@existing_output
def scramble_command(
    model: str,
    out: Path,
    seed: int,
    group: str,
    spaces: str,
    save_gauge: Path | None,
    force: bool,
) -> Report:
    """Write a twin of MODEL: the same function in randomly changed coordinates."""
    from signed_align.checkpoint import scramble
    from signed_align.files import require_free
    from signed_align.gauge import by_kind

    if save_gauge is not None:
        require_free(save_gauge, directory=False, force=force, inputs=[out])
    gauge = scramble(
        model, out, seed=seed, signed=group == "signed", spaces=_words(spaces), force=force
    )
    if save_gauge is not None:
        gauge.save(save_gauge, force=force)
    summary = gauge.summary()
    return Report(
        {"out": str(out), "gauge": str(save_gauge) if save_gauge else None, **summary},
        [
            f"Wrote a twin of {model} to {out}.",
            *(
                f"  {kind:10} {entry['coordinates']} coordinates, "
                f"{entry['positive_sign_fraction']:.3f} of the signs +1"
                for kind, entry in by_kind(gauge).items()
            ),
            *([f"The true gauge is in {save_gauge}."] if save_gauge else []),
        ],
    )


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
@click.option("--objective", type=click.Choice(OBJECTIVES), default=OBJECTIVES[0])
@spaces_option
@click.option("--layers", help="Hidden states to use, such as 1,15,-2; by default all.")
@click.option(
    "--tokens", type=POSITIVE, help="Calibration tokens at most; by default 8 a coordinate."
)
@click.option("--truth", type=click.Path(path_type=Path), help="True gauge, to score against.")
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
    device: str,
    force: bool,
) -> Report:
    """Recover the gauge that leads from SOURCE's to TARGET's coordinates."""
    from signed_align.checkpoint import Checkpoint
    from signed_align.files import require_free
    from signed_align.gauge import Gauge, by_kind
    from signed_align.recovery import recover

    require_free(out, directory=False, force=force, inputs=_directories(source, target))
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
        layers=_numbers(layers) if layers is not None else None,
        spaces=_words(spaces),
        max_tokens=tokens,
        device=device,
    )
    gauge.save(out, force=force)
    summary = gauge.summary()
    residual = summary["spaces"]["residual"]
    kinds = by_kind(gauge, true_gauge)
    data = {"gauge": str(out), "margin": residual["margin"], "kinds": kinds, **summary}
    lines = [
        f"Recovered a gauge of {residual['size']} residual coordinates from "
        f"{summary['provenance']['method']} ({objective}); it is in {out}.",
    ]
    for kind, entry in kinds.items():
        count = f" in {entry['spaces']} spaces" if entry["spaces"] > 1 else ""
        lines += [
            f"  {kind}: {entry['coordinates']} coordinates{count}",
            f"    + signs         {entry['positive_sign_fraction']:.3f}",
            f"    unmoved         {entry['fixed_point_fraction']:.3f}",
            f"    margin          {_quantiles(entry['margin'])}",
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
    default=0.05,
    show_default=True,
    help="A coordinate is lost when its margin falls below this.",
)
@click.option("--truth", help="True gauge, to score against; or the word identity.")
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
    plot: Path | None,
    device: str,
    force: bool,
) -> Report:
    """Recover the gauge from the first of CHECKPOINTS to the last, neighbour by neighbour.

    Gauges between neighbours are composed; a coordinate whose margin collapses on the way is
    listed as lost. Matching the ends directly is reported beside it, and with --runs also matching
    via the base, and which coordinates come back to themselves on the way round.
    """
    from signed_align.files import require_free
    from signed_align.gauge import Gauge, by_kind
    from signed_align.trajectory import Truth, path_of_runs, plot_trajectory, transport_along

    if bool(runs) == bool(checkpoints):
        raise SignedAlignError("give either checkpoints, in their order, or --runs.")
    if bool(runs) != (base is not None):
        raise SignedAlignError("--runs and --base go together: two runs, and where they started.")
    path, position = list(checkpoints), None
    if runs and base is not None:
        path, position = path_of_runs(*runs, base)
    read = _directories(*path)
    require_free(out, directory=False, force=force, inputs=read)
    _require_plot(plot, force, [*read, out])
    known: Truth | None = None
    if truth is not None:
        known = "identity" if truth == "identity" else Gauge.load(truth)
    trajectory = transport_along(
        path,
        base=position,
        method=method,
        text=text,
        truth=known,
        lost_below=lost_below,
        max_tokens=tokens,
        device=device,
    )
    gauge = trajectory.gauge
    gauge.save(out, force=force)
    _draw(plot, force, lambda file: plot_trajectory(trajectory, file))
    kinds = by_kind(gauge)
    kinds["residual"] |= trajectory.accuracy.get("transport", {})
    return Report(
        {
            "gauge": str(out),
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
            *_transported(trajectory.to_dict(), trajectory.size),
            *_plotted(plot),
        ],
    )


def _transported(data: dict[str, Any], size: int) -> list[str]:
    """A trajectory in lines: a table of its steps, what was lost, and what to compare it with."""
    names = ["/".join(Path(step["target"]).parts[-2:]) for step in data["steps"]]
    width = max(len(name) for name in ["step to", *names])
    scored = "sign_accuracy" in data["steps"][0]
    heading = "margin min  median   weak  moved  lost" + ("  right" if scored else "")
    lines = [f"  {'step to':{width}}  {heading}"]
    for name, step in zip(names, data["steps"], strict=True):
        margin, right = step["margin"], f"  {step['sign_accuracy']:5.3f}" if scored else ""
        lines.append(
            f"  {name:{width}}  {margin['min']:10.3f}  {margin['median']:6.3f}  "
            f"{step['weak_fraction']:5.3f}  {step['moved_fraction']:5.3f}  {step['lost']:4}{right}"
        )
    lines.append(
        f"  lost (margin < {data['lost_below']:g} on the way): {len(data['lost'])} of {size}"
        f"{_listed(data['lost'])}"
    )
    for name, gauge in data["baselines"].items():
        label = f"baseline {name.replace('_', ' ')}"
        lines.append(f"  {label:18}  margin {_quantiles(gauge['margin'])}")
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


@command("apply")
@click.argument("gauge", type=click.Path(path_type=Path))
@click.argument("model")
@output_directory
@inverse_option
@any_source_option
@existing_output
def apply_command(
    gauge: Path, model: str, out: Path, inverse: bool, any_source: bool, force: bool
) -> Report:
    """Move the checkpoint MODEL through GAUGE."""
    from signed_align.checkpoint import apply
    from signed_align.gauge import Gauge

    result = apply(
        Gauge.load(gauge), model, out, inverse=inverse, any_source=any_source, force=force
    )
    return Report(
        result,
        [f"Moved {result['tensors']} tensors of {model} to {out}.", *_left_out(result)],
    )


@command("port")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--gauge", required=True, type=click.Path(path_type=Path), help="Gauge file to move through."
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="File or directory to make, whichever ARTIFACT is.",
)
@click.option(
    "--hook",
    help="Where in the model the artifact belongs, if it does not say so itself: "
    "blocks.3.mlp.hook_post, model.layers.3, …",
)
@click.option("--explain", is_flag=True, help="Show how each tensor was labelled.")
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Accept files whose loading runs code in them (joblib); only for files you trust.",
)
@inverse_option
@any_source_option
@existing_output
def port_command(
    artifact: Path,
    gauge: Path,
    out: Path,
    hook: str | None,
    explain: bool,
    allow_pickle: bool,
    inverse: bool,
    any_source: bool,
    force: bool,
) -> Report:
    """Move ARTIFACT to the gauge's target.

    An artifact is a PEFT adapter, an SAELens dictionary, a control or steering vector, a
    scikit-learn probe, the state of an optimizer, a Trainer checkpoint, a list of neurons, or a
    directory of several of these.
    """
    from signed_align.adapters import port
    from signed_align.files import require_free
    from signed_align.gauge import Gauge

    require_free(out, directory=artifact.is_dir(), force=force, inputs=[gauge, artifact])
    result = port(
        artifact,
        Gauge.load(gauge),
        out,
        hook=hook,
        inverse=inverse,
        any_source=any_source,
        allow_pickle=allow_pickle,
        force=force,
    )
    return Report(
        result,
        [
            f"Recognised: {result['kind']}; moved "
            f"{_counted(result['tensors'], 'tensor')} to {out}.",
            *(line for one in result.get("artifacts", [result]) for line in _made_on(one, result)),
            *(f"  {note}" for note in result["notes"]),
            *_left_out(result),
            *(_explained(result["labels"]) if explain else []),
        ],
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _made_on(one: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Which model an artifact was made on; with its name, where it is one of several."""
    checked = "checked by fingerprint" if one["source_verified"] else "not proved"
    what = "" if one is whole else f"{one['name']} ({one['kind']}) "
    return [f"  {what}made on {one['made_on'] or 'a model it does not name'} ({checked})"]


def _explained(labels: list[dict[str, Any]]) -> list[str]:
    """How each tensor was labelled, in lines."""
    width = max((len(row["tensor"]) for row in labels), default=0)
    return [
        "  how each tensor was labelled (|x|: permuted, keeps its sign; ·: stays)",
        *(
            f"    {row['file']}  {row['tensor']:{width}}  {tuple(row['shape'])}  {row['axes']}"
            f"{'' if row['moved'] else '  as it was'}"
            for row in labels
        ),
    ]


@command("merge", cls=MergekitCommand)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@existing_output
def merge_command(recipe: Path, out: Path, force: bool, **options: Any) -> Report:
    """Run a mergekit RECIPE; takes every option of mergekit-yaml."""
    from mergekit.options import MergeOptions
    from pydantic import ValidationError

    from signed_align import progress
    from signed_align.merge_methods import merge

    try:
        silent = progress.quiet.get() or not sys.stderr.isatty()
        merge_options = MergeOptions(**options, quiet=silent)
    except (ValidationError, ValueError) as error:
        raise SignedAlignError(f"mergekit refuses the options: {error}") from error
    merge_options.apply_global_options()
    result = merge(recipe, out, merge_options, force=force)
    lines = [f"Merged with {result['merge_method']} into {out}."]
    if result["reference"]:
        lines.append(f"  coordinates of {result['reference']}")
    for gauge in result["gauges"]:
        residual = gauge["spaces"].get("residual", {})
        margin = f", margin {_quantiles(residual['margin'])}" if "margin" in residual else ""
        lines.append(f"  aligned from {gauge['source']['name']}{margin}")
    return Report(result, lines)


@command("barrier")
@click.argument("a")
@click.argument("b")
@click.option("--gauge", type=click.Path(path_type=Path), help="Gauge from A to B, to align by.")
@text_option
@click.option("--points", default=11, show_default=True, help="Points on the path, ends included.")
@click.option(
    "--tokens",
    default=4096,
    type=POSITIVE,
    show_default=True,
    help="Tokens of text to use at most.",
)
@plot_option
@device_option
@existing_output
def barrier_command(
    a: str,
    b: str,
    gauge: Path | None,
    text: Path | None,
    points: int,
    tokens: int,
    plot: Path | None,
    device: str,
    force: bool,
) -> Report:
    """Measure the loss on the straight path from A to B, before and after alignment."""
    from signed_align.barrier import measure_barrier, plot_paths
    from signed_align.gauge import Gauge

    _require_plot(plot, force, _directories(a, b))
    paths = measure_barrier(
        a,
        b,
        gauge=Gauge.load(gauge) if gauge is not None else None,
        text=text,
        points=points,
        max_tokens=tokens,
        device=device,
    )
    _draw(plot, force, lambda file: plot_paths(paths, file))
    final = paths["aligned"] if "aligned" in paths else paths["straight"]
    return Report(
        {
            "barrier_nats": final.barrier,
            "paths": {name: path.to_dict() for name, path in paths.items()},
            "plot": str(plot) if plot else None,
        },
        [
            f"{name:9} peak above chord {path.barrier:.4f} nats per token"
            f"  (ends {path.losses[0]:.4f}, {path.losses[-1]:.4f})"
            for name, path in paths.items()
        ]
        + _plotted(plot),
    )


@command("evaluate")
@click.argument("model")
@click.option("--task", help="lm-eval task: measures accuracy.")
@click.option("--adapter", type=click.Path(path_type=Path), help="PEFT adapter to put on MODEL.")
@click.option("--tasks-dir", type=click.Path(path_type=Path), help="Directory of task YAML files.")
@click.option("--limit", type=POSITIVE, help="Use only the first examples of the task.")
@click.option(
    "--batch-size", default=32, type=POSITIVE, show_default=True, help="Examples at a time."
)
@click.option("--sae", type=click.Path(path_type=Path), help="SAELens SAE: measures its NMSE.")
@text_option
@device_option
def evaluate_command(
    model: str,
    task: str | None,
    adapter: Path | None,
    tasks_dir: Path | None,
    limit: int | None,
    batch_size: int,
    sae: Path | None,
    text: Path | None,
    device: str,
) -> Report:
    """Measure a task's accuracy, with or without an adapter, or an SAE's reconstruction error."""
    from signed_align.adapters.sae import evaluate_sae
    from signed_align.evaluation import evaluate

    if (task is None) == (sae is None):
        raise SignedAlignError("give either --task or --sae.")
    if sae is not None:
        measured = evaluate_sae(model, sae, text=text, device=device)
        return Report(
            measured,
            [
                f"NMSE {measured['nmse']:.4f} at {measured['hook_name']}, "
                f"on {measured['tokens']} tokens"
            ],
        )
    assert task is not None
    result = evaluate(
        model,
        task,
        adapter=adapter,
        tasks_dir=tasks_dir,
        limit=limit,
        batch_size=batch_size,
        device=device,
    )
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
    return Report(result, [f"{task} on {result['examples']} examples: {metrics}"])


@command("steer")
@click.argument("model")
@click.argument("vectors", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text, a prompt a line.",
)
@click.option("--positive", required=True, help="Continuations, such as great,wonderful.")
@click.option("--negative", required=True, help="Continuations, such as terrible,awful.")
@click.option("--hook", help="Where the vector is added, if the file does not say so.")
@click.option("--strength", default=1.0, show_default=True, help="Multiplies the vectors.")
@device_option
def steer_command(
    model: str,
    vectors: Path,
    prompts: Path,
    positive: str,
    negative: str,
    hook: str | None,
    strength: float,
    device: str,
) -> Report:
    """Measure how far the steering VECTORS shift MODEL from negative to positive continuations."""
    from signed_align.activations import sentences_of
    from signed_align.adapters.steering import steering_effect

    measured = steering_effect(
        model,
        vectors,
        sentences_of(prompts),
        [f" {word}" for word in _words(positive)],
        [f" {word}" for word in _words(negative)],
        hook=hook,
        strength=strength,
        device=device,
    )
    return Report(
        measured,
        [
            f"Log odds of positive over negative, mean of {len(measured['prompts'])} prompts:",
            f"  without vectors {measured['unsteered']:.4f}",
            f"  with vectors    {measured['steered']:.4f}",
            f"  effect          {measured['effect']:+.4f} nats at {', '.join(measured['hooks'])}",
        ],
    )


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

    _require_plot(plot, force, [*_directories(model), claim])
    result = audit_claim(
        model,
        load_claim(claim),
        twins=twins,
        seed=seed,
        recovered_from=recovered_from,
        text=text,
    )
    _draw(plot, force, lambda file: plot_audit(result, file))
    return Report(
        {**result.to_dict(), "plot": str(plot) if plot else None},
        [*audit_lines(result), *_plotted(plot)],
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


@command("inspect")
@click.argument("thing")
def inspect_command(thing: str) -> Report:
    """Show what a model, a gauge, or anything that `port` moves is."""
    from signed_align.inspection import inspect

    return Report(*inspect(thing))


def _require_plot(plot: Path | None, force: bool, inputs: list[Path]) -> None:
    """Raise, before the work, unless a plot may be drawn there."""
    from signed_align.barrier import require_plottable
    from signed_align.files import require_free

    if plot is not None:
        require_plottable(plot)
        require_free(plot, directory=False, force=force, inputs=inputs)


def _draw(plot: Path | None, force: bool, draw: Callable[[Path], None]) -> None:
    """Draw the plot, if one is asked for."""
    from signed_align.files import atomic_path

    if plot is not None:
        with atomic_path(plot, directory=False, force=force) as temporary:
            draw(temporary)


def _plotted(plot: Path | None) -> list[str]:
    return [f"The plot is in {plot}."] if plot else []


def _directories(*models: str) -> list[Path]:
    return [Path(model) for model in models if Path(model).is_dir()]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SignedAlignError(f"--layers takes numbers such as 1,15,-2; got {text!r}.") from error


def _quantiles(margin: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in margin.items())


def _left_out(result: dict[str, Any]) -> list[str]:
    if not result["left_out"]:
        return []
    return [f"  left out, being weights in the old coordinates: {', '.join(result['left_out'])}"]


if __name__ == "__main__":
    main()
