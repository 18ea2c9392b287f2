"""Commands on artifacts made on a model: port, evaluate, steer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from signed_align.cli.framework import (
    POSITIVE,
    Report,
    accept_weak_option,
    any_source_option,
    command,
    device_option,
    existing_output,
    given,
    inverse_option,
    left_out,
    text_option,
    verification_lines,
    words,
)
from signed_align.errors import SignedAlignError


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
@click.option("--made-on", help="The model ARTIFACT was made on, if it does not name one itself.")
@inverse_option
@any_source_option
@accept_weak_option
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Run both models, and what ARTIFACT does on them. By default the gauge is checked against "
    "both, where they are at hand, without running them.",
)
@text_option
@existing_output
def port_command(
    artifact: Path,
    gauge: Path,
    out: Path,
    hook: str | None,
    explain: bool,
    allow_pickle: bool,
    made_on: str | None,
    inverse: bool,
    any_source: bool,
    accept_weak: bool,
    verify: bool | None,
    text: Path | None,
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

    require_free(
        out, directory=artifact.is_dir(), force=force, inputs=[gauge, artifact, *given(text)]
    )
    result = port(
        artifact,
        Gauge.load(gauge),
        out,
        hook=hook,
        made_on=made_on,
        inverse=inverse,
        any_source=any_source,
        accept_weak=accept_weak,
        allow_pickle=allow_pickle,
        verify=verify,
        text=text,
        force=force,
    )
    return Report(
        result,
        [
            f"Recognised: {result['kind']}; moved "
            f"{_counted(result['tensors'], 'tensor')} to {out}.",
            *(line for one in result.get("artifacts", [result]) for line in _made_on(one, result)),
            *_weak(result),
            *verification_lines(result["verification"]),
            *(f"  {note}" for note in result["notes"]),
            *left_out(result),
            *(_explained(result["labels"]) if explain else []),
        ],
    )


def _warn_if_foreign(artifact: Path | None, model: str) -> None:
    """Warn if an artifact that is about to be used was made in other coordinates."""
    from signed_align.adapters import recognise
    from signed_align.adapters.origin import warn_if_foreign
    from signed_align.checkpoint import Checkpoint

    family = recognise(artifact) if artifact is not None and artifact.exists() else None
    if artifact is not None and family is not None:
        warn_if_foreign(artifact, family.inspect(artifact), Checkpoint.open(model))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _made_on(one: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Which model an artifact was made on; with its name, where it is one of several."""
    checked = "checked by fingerprint" if one["source_verified"] else "not proved"
    what = "" if one is whole else f"{one['name']} ({one['kind']}) "
    return [f"  {what}made on {one['made_on'] or 'a model it does not name'} ({checked})"]


def _weak(result: dict[str, Any]) -> list[str]:
    """How much stands on weak coordinates, in a line, where the gauge says it."""
    if result["weak_energy"] is None:
        return []
    return [
        f"  {result['weak_energy']:.1%} of its energy is on coordinates the gauge is not sure of "
        f"(margin below {result['weak_below']:.3f})"
    ]


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
    _warn_if_foreign(adapter if sae is None else sae, model)
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

    _warn_if_foreign(vectors, model)
    measured = steering_effect(
        model,
        vectors,
        sentences_of(prompts),
        [f" {word}" for word in words(positive)],
        [f" {word}" for word in words(negative)],
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
