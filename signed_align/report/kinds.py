"""The kinds of files that are ours: how each is recognised, in words, and what is shown of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from signed_align.audit import draw_audit
from signed_align.barrier import draw_paths
from signed_align.report import shapes
from signed_align.report.figures import draw_accuracies, draw_margins
from signed_align.report.found import Found, Grid, Kind, Plot
from signed_align.trajectory import draw_trajectory


def kind_of_data(data: Mapping[str, Any]) -> Kind | None:
    """The kind of a JSON object, if it is one of ours."""
    return next((kind for kind in KINDS if kind.recognises(data)), None)


# ---- plots ---------------------------------------------------------------------------------------


def _accuracies(of: Callable[[Any], Any]) -> Callable[[Found, Path, str], None]:
    return lambda found, file, title: draw_accuracies(of(found.shape), file, title)


def _paths(of: Callable[[Mapping[str, Any]], Any]) -> Callable[[Found, Path, str], None]:
    return lambda found, file, title: draw_paths(of(found.data), file, title)


def _has_margins(found: Found) -> bool:
    return found.gauge is not None and bool(found.gauge.margins)


def _margins(found: Found, file: Path, title: str) -> None:
    assert found.gauge is not None
    draw_margins(found.gauge, file, title)


MARGINS = Plot(
    "margins",
    "How many coordinates have which margin: the |correlation| with their partner minus that with "
    "the best other candidate. Near 1 is certain, near 0 is a guess.",
    _margins,
    _has_margins,
)
BARRIER_CAPTION = "Loss on the straight path between two models, and the chord between its ends."
LAYERS_CAPTION = "What each objective recovers from which hidden states, or from weights."
LOSSES = "barrier_nats losses chord"

# ---- kinds ---------------------------------------------------------------------------------------

ENDS = "source.name source.fingerprint target.name target.fingerprint"
SCORES = "permutation_accuracy sign_accuracy"
ORIGIN = "machine python date command"
SPACES = Grid("Every space", "spaces")
BY_KIND = Grid("Spaces by kind", "kinds")

VERDICT = "verdict.finding verdict.sure_fraction verdict.moved_fraction verdict.needed_margin"

NO_GAUGE = Kind(
    "no gauge",
    "No reliable gauge between two models",
    "error verdict",
    facts=f"error {VERDICT} verdict.control",
    shape=shapes.Failure,
)
FAILED = Kind("error", "A command that failed", "error", shape=shapes.Failure)

GAUGE_FILE = Kind(
    "gauge file", "Gauge file", "", facts=f"{ENDS} provenance", grids=(BY_KIND,), plots=(MARGINS,)
)

COMMANDS = (
    Kind(
        "transport",
        "Gauge transported along checkpoints",
        "gauge steps lost baselines holonomy accuracy",
        facts=f"{VERDICT} gauge {ENDS} {SCORES} lost lost_below holonomy.returned_fraction "
        "provenance.from",
        grids=(
            Grid("Steps", "steps"),
            Grid("Baselines", "baselines"),
            Grid("Accuracy", "accuracy"),
            BY_KIND,
        ),
        shape=shapes.Trajectory,
        plots=(
            Plot(
                "trajectory",
                "The share of coordinates that are not lost along the path; and, where the truth "
                "is known, the share of signs that are right, with the baselines'.",
                lambda found, file, title: draw_trajectory(found.data, file, title),
            ),
            MARGINS,
        ),
    ),
    Kind(
        "gauge",
        "Gauge recovered between two models",
        "gauge kinds spaces source target provenance",
        facts=f"{VERDICT} gauge {ENDS} {SCORES} provenance",
        grids=(BY_KIND, SPACES),
        shape=shapes.GaugeOutput,
        plots=(MARGINS,),
    ),
    Kind(
        "audit",
        "Audit of a claim about coordinates",
        "claim model hook chance control mean twins",
        facts="claim model.name hook k size spaces recovered_from chance control",
        grids=(Grid("Mean of twins", "mean"), Grid("Twins", "twins")),
        shape=shapes.Audit,
        plots=(
            Plot(
                "audit",
                "How much of the claim is found again on twins: as stated, by chance, and after "
                "transport. A point is a twin.",
                lambda found, file, title: draw_audit(found.data, file, title),
            ),
        ),
    ),
    Kind(
        "barrier",
        "Loss on the straight path between two models",
        "barrier_nats paths",
        facts="a b gauge barrier_nats",
        grids=(Grid("Paths", "paths", LOSSES),),
        shape=shapes.Barrier,
        plots=(Plot("barrier", BARRIER_CAPTION, _paths(lambda data: data["paths"])),),
    ),
    Kind(
        "evaluate",
        "Accuracy on a task",
        "task accuracy examples metrics",
        facts="task accuracy examples metrics",
    ),
    Kind(
        "evaluate --sae",
        "Reconstruction error of an SAE",
        "nmse tokens hook_name",
        facts="nmse tokens hook_name",
    ),
    Kind(
        "steer",
        "Effect of steering vectors",
        "unsteered steered effect prompts hooks",
        facts="unsteered steered effect strength hooks",
        grids=(Grid("Prompts", "prompts"),),
    ),
    Kind(
        "port",
        "Artifact that was moved",
        "kind out tensors made_on source_verified notes labels left_out",
        facts="kind out tensors made_on source_verified notes left_out",
        grids=(
            Grid("Artifacts", "artifacts", "name kind tensors made_on source_verified notes"),
            Grid("Labels", "labels"),
        ),
    ),
    Kind(
        "merge",
        "Merge of models",
        "out merge_method reference gauges",
        facts="merge_method reference out",
        grids=(
            Grid(
                "Gauges",
                "gauges",
                "source.name target.name provenance.method spaces.residual.margin "
                "spaces.residual.weak_fraction",
            ),
        ),
    ),
    Kind(
        "scramble",
        "Twin in random coordinates",
        "out gauge spaces source target provenance",
        facts=f"out gauge {ENDS} provenance",
        grids=(SPACES,),
    ),
    Kind(
        "apply",
        "Model that was moved",
        "out tensors bytes left_out fingerprint",
        facts="out tensors bytes left_out fingerprint",
    ),
    Kind(
        "inspect model",
        "A model and its spaces",
        "kind model_type norm native_group spaces",
        {"kind": "model"},
        facts="model_type norm native_group proof tied_embeddings tensors fingerprint",
        grids=(Grid("Spaces", "space_groups"),),
    ),
    Kind(
        "inspect gauge",
        "A gauge",
        "kind kinds spaces source target provenance",
        {"kind": "gauge"},
        facts=f"{ENDS} provenance",
        grids=(BY_KIND, SPACES),
    ),
    Kind("inspect", "An artifact", "kind warnings"),
    Kind(
        "diagnose",
        "What relates two models",
        "verdict coordinates confidence stage spaces evidence",
        facts="verdict coordinates confidence stage source target next advice",
        grids=(
            Grid("Spaces by kind", "spaces"),
            Grid("Evidence", "evidence", "stage found"),
        ),
    ),
    Kind(
        "support",
        "Model types, proved or refused",
        "models warnings",
        facts="",
        grids=(Grid("Model types", "models"),),
    ),
    Kind(
        "support --peft",
        "PEFT types that move or do not",
        "peft warnings",
        facts="",
        grids=(Grid("PEFT types", "peft"),),
    ),
    Kind(
        "demo",
        "The demonstration",
        "model recovery lora sae merge",
        facts=f"model lora sae merge.barrier_nats merge.sample seconds {ORIGIN}",
        grids=(
            Grid("Recovery", "recovery.evidence", depth=2),
            Grid("Paths", "merge.paths", LOSSES),
        ),
        shape=shapes.Demo,
        plots=(
            Plot("recovery", LAYERS_CAPTION, _accuracies(shapes.Demo.accuracies)),
            Plot("barrier", BARRIER_CAPTION, _paths(lambda data: data["merge"]["paths"])),
        ),
    ),
)

BENCHMARKS = (
    Kind(
        "benchmark: recovery",
        "Benchmark: recovery under noise",
        "grid ceiling machine date command",
        shape=shapes.Recovery,
        plots=(
            Plot(
                "tokens",
                "What each objective recovers from how many tokens: of all hidden states together, "
                "or else the mean over them, from the least to the greatest.",
                _accuracies(shapes.Recovery.by_tokens),
            ),
            Plot("layers", LAYERS_CAPTION, _accuracies(shapes.Recovery.by_layer)),
            Plot(
                "ceiling",
                "What each objective recovers of gauges with a given share of + signs.",
                _accuracies(shapes.Recovery.ceilings),
            ),
        ),
    ),
    Kind(
        "benchmark: trajectories",
        "Benchmark: transport along training runs",
        "curves machine date command",
        shape=shapes.Curves,
        plots=(
            Plot(
                "steps",
                "Signs that are right after so many steps of training: the mean over seeds, and "
                "from the lowest seed to the highest.",
                _accuracies(shapes.Curves.by_steps),
            ),
            Plot(
                "interval",
                "The same against the steps between checkpoints, for the longest runs.",
                _accuracies(shapes.Curves.by_interval),
            ),
        ),
    ),
    Kind("benchmark", "Benchmark", "machine python date command"),
)

KINDS = (NO_GAUGE, FAILED, *COMMANDS, *BENCHMARKS)
"""In the order in which they are asked: what has more keys comes before what has fewer."""
