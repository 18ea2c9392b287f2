"""Downstream accuracy through lm-eval, for a model with or without an adapter."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from signed_align.checkpoint import Checkpoint
from signed_align.errors import ArtifactError, SignedAlignError, one_line
from signed_align.progress import libraries_silent

BATCH_SIZE = 32


def evaluate(
    model: str | Path,
    task: str,
    *,
    adapter: str | Path | None = None,
    tasks_dir: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run one lm-eval task on a checkpoint.

    Parameters
    ----------
    model : str or Path
        A local directory or a Hub id.
    task : str
        The name of an lm-eval task.
    adapter : str or Path, optional
        A PEFT adapter to put on the model.
    tasks_dir : str or Path, optional
        A directory with further task YAML files. A task whose data are local JSONL files needs no
        network.
    limit : int, optional
        Use only the first examples.
    batch_size, device
        How to run the model.

    Returns
    -------
    dict
        ``accuracy`` (None if the task has no such metric), ``task``, ``examples``, ``metrics``.

    Raises
    ------
    SignedAlignError
        If lm-eval is not installed, or the task is not known or does not load.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise SignedAlignError(
            "evaluation needs lm-eval: pip install 'signed-align[eval]'."
        ) from error
    checkpoint = Checkpoint.open(model)
    if adapter is not None and not (Path(adapter) / "adapter_config.json").is_file():
        raise ArtifactError(f"there is no PEFT adapter at {adapter}.")
    if tasks_dir is not None and not Path(tasks_dir).is_dir():
        raise ArtifactError(f"there is no tasks directory at {tasks_dir}.")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with libraries_silent():
        try:
            tasks = _task_manager(tasks_dir, task).load([task])
            outcome = lm_eval.evaluate(
                lm=HFLM(
                    pretrained=str(checkpoint.path),
                    peft=str(adapter) if adapter is not None else None,
                    dtype="float32",
                    batch_size=batch_size,
                    device=device,
                ),
                task_dict=tasks,
                limit=limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        except SignedAlignError:
            raise
        except Exception as error:  # tasks run code of their own
            raise ArtifactError(f"lm-eval could not run {task!r}: {one_line(error)}") from error
    if task not in outcome["n-samples"]:
        raise ArtifactError(f"{task!r} is a group of tasks; give one of its tasks.")
    metrics = {
        name.removesuffix(",none"): value
        for name, value in outcome["results"][task].items()
        if isinstance(value, int | float) and "stderr" not in name
    }
    return {
        "task": task,
        "accuracy": metrics.get("acc"),
        "examples": outcome["n-samples"][task]["effective"],
        "metrics": metrics,
    }


def _task_manager(tasks_dir: str | Path | None, task: str) -> Any:
    """The tasks of ``tasks_dir``, and lm-eval's own, which take long to index, if need be."""
    from lm_eval.tasks import TaskManager

    include = str(tasks_dir) if tasks_dir is not None else None
    if include is not None:
        manager = TaskManager(include_path=include, include_defaults=False)
        if task in manager.all_tasks:
            return manager
    manager = TaskManager(include_path=include)
    if task not in manager.all_tasks:
        raise ArtifactError(f"lm-eval knows no task {task!r}.")
    return manager
