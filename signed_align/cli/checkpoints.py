"""Commands on whole checkpoints: scramble, apply, merge, barrier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from signed_align.cli.framework import (
    POSITIVE,
    SEED,
    Report,
    any_source_option,
    command,
    device_option,
    directories,
    draw,
    existing_output,
    given,
    inverse_option,
    left_out,
    output_directory,
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
    from signed_align.files import require_free
    from signed_align.gauge import by_kind
    from signed_align.moving import scramble

    if save_gauge is not None:
        require_free(save_gauge, directory=False, force=force, inputs=[out, *directories(model)])
    gauge = scramble(
        model, out, seed=seed, signed=group == "signed", spaces=words(spaces), force=force
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


@command("apply")
@click.argument("gauge", type=click.Path(path_type=Path))
@click.argument("model")
@output_directory
@inverse_option
@any_source_option
@verify_option
@text_option
@existing_output
def apply_command(
    gauge: Path,
    model: str,
    out: Path,
    inverse: bool,
    any_source: bool,
    verify: bool | None,
    text: Path | None,
    force: bool,
) -> Report:
    """Move the checkpoint MODEL through GAUGE."""
    from signed_align.files import require_free
    from signed_align.gauge import Gauge
    from signed_align.moving import apply

    require_free(out, directory=True, force=force, inputs=[gauge, *given(text)])
    result = apply(
        Gauge.load(gauge),
        model,
        out,
        inverse=inverse,
        any_source=any_source,
        verify=verify,
        text=text,
        force=force,
    )
    return Report(
        result,
        [
            f"Moved {result['tensors']} tensors of {model} to {out}.",
            *verification_lines(result["verification"]),
            *left_out(result),
        ],
    )


@command("merge", cls=MergekitCommand)
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@verify_option
@text_option
@existing_output
def merge_command(
    recipe: Path, out: Path, verify: bool | None, text: Path | None, force: bool, **options: Any
) -> Report:
    """Run a mergekit RECIPE; takes every option of mergekit-yaml."""
    from mergekit.options import MergeOptions
    from pydantic import ValidationError

    from signed_align import progress
    from signed_align.files import require_free
    from signed_align.merge_methods import merge

    require_free(out, directory=True, force=force, inputs=[recipe, *given(text)])
    try:
        silent = progress.quiet.get() or not sys.stderr.isatty()
        merge_options = MergeOptions(**options, quiet=silent)
    except (ValidationError, ValueError) as error:
        raise SignedAlignError(f"mergekit refuses the options: {error}") from error
    merge_options.apply_global_options()
    result = merge(recipe, out, merge_options, verify=verify, text=text, force=force)
    lines = [f"Merged with {result['merge_method']} into {out}."]
    if result["reference"]:
        lines.append(f"  coordinates of {result['reference']}")
    for gauge in result["gauges"]:
        residual = gauge["spaces"].get("residual", {})
        margin = f", margin {quantiles(residual['margin'])}" if "margin" in residual else ""
        lines.append(f"  aligned from {gauge['source']['name']}{margin}")
    lines += verification_lines(result["verification"])
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

    require_plot(plot, force, [*directories(a, b), *given(gauge, text)])
    paths = measure_barrier(
        a,
        b,
        gauge=Gauge.load(gauge) if gauge is not None else None,
        text=text,
        points=points,
        max_tokens=tokens,
        device=device,
    )
    draw(plot, force, lambda file: plot_paths(paths, file))
    final = paths["aligned"] if "aligned" in paths else paths["straight"]
    return Report(
        {
            "a": a,
            "b": b,
            "gauge": str(gauge) if gauge else None,
            "barrier_nats": final.barrier,
            "paths": {name: path.to_dict() for name, path in paths.items()},
            "plot": str(plot) if plot else None,
        },
        [
            f"{name:9} peak above chord {path.barrier:.4f} nats per token"
            f"  (ends {path.losses[0]:.4f}, {path.losses[-1]:.4f})"
            for name, path in paths.items()
        ]
        + plotted(plot),
    )
