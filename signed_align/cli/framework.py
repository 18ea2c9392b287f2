"""What every command shares: the group, reports, options, and the words of its answers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from signed_align import __version__
from signed_align.errors import SignedAlignError, SignedAlignWarning, one_line, printable
from signed_align.json_values import finite

BUG = 1
"""The exit code of an exception that is not one of ours. Ours have their own, from 2 on."""

INTERRUPTED = 130
"""The exit code after an interrupt from the keyboard, as shells have it."""

INTERRUPTION = "interrupted; no partial output was left."

TRACEBACK = "SIGNED_ALIGN_TRACEBACK"
"""The environment variable that shows where a bug is."""

MEASURED = (
    "difference", "explained", "correlation", "disagree", "against", "loss", "above_inputs"
)  # fmt: skip
"""What verifications measure, in the order in which it is said."""

TYPED = "signed_align.typed"
"""Where click's context keeps the command line."""

POSITIVE = click.IntRange(min=1)
SEED = click.IntRange(0, 2**32 - 1)

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
accept_weak_option = click.option(
    "--accept-weak",
    is_flag=True,
    help="Go on where no reliable gauge is found, instead of ending with exit code 3.",
)
verify_option = click.option(
    "--verify/--no-verify",
    default=None,
    help="Run the models on a few tokens, and write nothing (exit code 4) if they do not agree as "
    "they should; by default where that is cheap.",
)
device_option = click.option("--device", default="cpu", show_default=True, help="Torch device.")


@dataclass
class Report:
    """What a command has to say: ``data`` for ``--json``, ``lines`` for people."""

    data: dict[str, Any]
    lines: list[str] = field(default_factory=list)


class Commands(click.Group):
    """A group that keeps what was typed, which outputs record."""

    def make_context(
        self, info_name: str | None, args: list[str], *arguments: Any, **options: Any
    ) -> click.Context:
        """The context, with what was typed."""
        typed = shlex.join(["signed-align", *args])
        context = super().make_context(info_name, args, *arguments, **options)
        context.meta[TYPED] = typed
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an interrupt while libraries are still imported is one, too."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _fail(INTERRUPTION, INTERRUPTED, as_json=False)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="signed-align")
def main() -> None:
    """Move adapters, SAEs, vectors, training state and merges to checkpoints in other coordinates.

    RMSNorm transformers define their residual coordinates only up to a permutation and a sign flip
    of each. These commands recover that gauge, say how sure it is, and move things through it.
    """


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Report]], click.Command]:
    """Register a command: ``--json``, ``--quiet``, errors in a sentence with an exit code."""

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
    from signed_align import progress, provenance

    progress.quiet.set(quiet)
    provenance.command.set(click.get_current_context().meta.get(TYPED))
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
            printed = _json_of({**report.data, "warnings": said}) if as_json else None
        except SignedAlignError as error:
            _fail(str(error), error.exit_code, as_json, **error.details)
        except KeyboardInterrupt:
            _fail(INTERRUPTION, INTERRUPTED, as_json)
        except Exception as error:
            if TRACEBACK in os.environ:
                traceback.print_exc()
            _fail(
                f"this is a bug in signed-align, not your input: {type(error).__name__}: "
                f"{one_line(error)}. Please report it, with what {TRACEBACK}=1 prints.",
                BUG,
                as_json,
            )
    lines = (printable(line) for text in report.lines for line in text.split("\n"))
    click.echo("\n".join(lines) if printed is None else printed)


def _fail(message: str, code: int, as_json: bool, **details: Any) -> NoReturn:
    """One sentence on stderr, with ``--json`` an object on stdout, and the exit code."""
    if as_json:
        click.echo(_json_of({"error": message, "exit_code": code, **details}))
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


def _json_of(data: dict[str, Any]) -> str:
    return json.dumps(finite(data, instead=lambda _: None), indent=2, allow_nan=False)


def _quiet_libraries() -> None:
    import logging

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def require_plot(plot: Path | None, force: bool, inputs: list[Path]) -> None:
    """Raise, before the work, unless a plot may be drawn there."""
    from signed_align.barrier import require_plottable
    from signed_align.files import require_free

    if plot is not None:
        require_plottable(plot)
        require_free(plot, directory=False, force=force, inputs=inputs)


def draw(plot: Path | None, force: bool, drawing: Callable[[Path], None]) -> None:
    """Draw the plot, if one is asked for."""
    from signed_align.files import atomic_path

    if plot is not None:
        with atomic_path(plot, directory=False, force=force) as temporary:
            drawing(temporary)


def plotted(plot: Path | None) -> list[str]:
    """Where the plot is, in lines, if one is asked for."""
    return [f"The plot is in {plot}."] if plot else []


def directories(*models: str) -> list[Path]:
    """Those of the models that are local directories."""
    return [Path(model) for model in models if os.path.isdir(model)]


def given(*files: Path | None) -> list[Path]:
    """Those of the files that were given."""
    return [file for file in files if file is not None]


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """The numbers of a list with commas, as ``--layers`` takes them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SignedAlignError(f"--layers takes numbers such as 1,15,-2; got {text!r}.") from error


def quantiles(margin: dict[str, float]) -> str:
    """The quantiles of a margin, in words."""
    return "  ".join(f"{name} {value:.3f}" for name, value in margin.items())


def verification_lines(found: dict[str, Any]) -> list[str]:
    """What a verification found, in a line, and a line for each effect."""
    if "skipped" in found:
        return [f"  not verified: {found['skipped']}"]
    numbers = [f"{name} {found[name]:.3g}" for name in MEASURED if found.get(name) is not None]
    lines = [f"  verified ({found['claim']}): {found['of']}, {', '.join(numbers)}"]
    for effect in found.get("effects", ()):
        said = (
            f"not run: {effect['skipped']}"
            if "skipped" in effect
            else f"{effect['arrives']:.1%} of its effect arrives"
            if effect["arrives"] is not None
            else "its effect is too small to be told from rounding"
        )
        lines.append(f"    {effect['artifact']} ({effect['kind']}): {said}")
    return lines


def left_out(result: dict[str, Any]) -> list[str]:
    """Which tensors were left out, in lines, if any were."""
    if not result["left_out"]:
        return []
    return [f"  left out, being weights in the old coordinates: {', '.join(result['left_out'])}"]
