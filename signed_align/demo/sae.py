"""A small top-k SAE on one residual hook, trained with SAELens on newspaper sentences."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FEATURES = 2048
ACTIVE = 64
STEPS = 120
BATCH = 512
LEARNING_RATE = 2e-3


def train_sae(activations: Tensor, hook: str, model_name: str, out: Path, seed: int) -> Any:
    """Train and save an SAE on activations of shape (n, d); returns it as SAELens loads it."""
    from sae_lens import SAE, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.saes.sae import SAEMetadata
    from sae_lens.training.sae_trainer import SAETrainer

    logging.getLogger("sae_lens").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    sae = TopKTrainingSAE(
        TopKTrainingSAEConfig(
            d_in=activations.shape[1],
            d_sae=FEATURES,
            k=ACTIVE,
            metadata=SAEMetadata(model_name=model_name, hook_name=hook, prepend_bos=False),
        )
    )
    mean = activations.mean(0)
    scale = activations.shape[1] ** 0.5 / float((activations - mean).norm(dim=1).mean())
    sae.b_dec.data.copy_(mean * scale)
    trainer = SAETrainer(
        SAETrainerConfig(
            total_training_samples=STEPS * BATCH,
            train_batch_size_samples=BATCH,
            lr=LEARNING_RATE,
            lr_end=LEARNING_RATE / 10,
            lr_warm_up_steps=STEPS // 20,
            lr_decay_steps=STEPS // 3,
            device="cpu",
            logger=LoggingConfig(log_to_wandb=False),
        ),
        sae,
        _shuffled(activations, seed),
    )
    trainer.activation_scaler.scaling_factor = scale  # folded into the weights when training ends
    trainer.fit().save_inference_model(out)
    return SAE.load_from_disk(out)


def _shuffled(activations: Tensor, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(activations), generator=generator)
        for rows in order.split(BATCH):
            if len(rows) == BATCH:
                yield activations[rows]
