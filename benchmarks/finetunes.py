"""Fine-tunes of SmolLM2 that several benchmarks measure on: trained once, kept in a directory."""

from dataclasses import replace
from pathlib import Path

from training import Training, trained

from signed_align.demo.assets import movie_reviews, smollm2, tweets

LIGHT = Training(
    seed=1, steps=40, batch=4, context=64, learning_rate=2e-5, save_dtype="bfloat16", threads=2
)
"""A fine-tune as people make them, if a short one."""

HOT = replace(
    LIGHT,
    steps=60,
    learning_rate=1e-3,
    warmup=0.0,
    clip=None,
    schedule="constant",
    save_every=6,
)
"""Far hotter than a fine-tune should be, and saved often: what parallel transport is for."""

QUICK_STEPS = 4


def directory(work: Path, quick: bool) -> Path:
    """Where the fine-tunes are kept."""
    return work / ("finetunes-quick" if quick else "finetunes")


def hot(*, quick: bool = False) -> Training:
    """How the hot runs are trained."""
    return replace(HOT, steps=QUICK_STEPS, save_every=QUICK_STEPS // 2) if quick else HOT


def base() -> Path:
    """The model that all start from."""
    return smollm2()


def light(work: Path, *, quick: bool = False) -> Path:
    """SmolLM2 fine-tuned on movie reviews, lightly."""
    training = replace(LIGHT, steps=QUICK_STEPS) if quick else LIGHT
    return _tuned(work / "light", training, [row.text for row in movie_reviews()])


def hot_runs(work: Path, *, quick: bool = False) -> tuple[Path, Path]:
    """Two hot runs, on movie reviews and on tweets, each a directory of checkpoints."""
    training = hot(quick=quick)
    reviews = _tuned(work / "hot-reviews", training, [row.text for row in movie_reviews()])
    other = replace(training, seed=training.seed + 1)
    return reviews, _tuned(work / "hot-tweets", other, [row.text for row in tweets()])


def hot_ends(work: Path, *, quick: bool = False) -> tuple[Path, Path]:
    """The last checkpoints of the two hot runs."""
    reviews, other = hot_runs(work, quick=quick)
    last = f"checkpoint-{hot(quick=quick).steps}"
    return reviews / last, other / last


def _tuned(directory: Path, training: Training, texts: list[str]) -> Path:
    directory.parent.mkdir(parents=True, exist_ok=True)
    trained(directory, training, texts, base())
    return directory
