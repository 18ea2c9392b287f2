import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers.utils import logging

torch.set_num_threads(2)
logging.disable_progress_bar()


@pytest.fixture
def one_thread():
    """Threads that wait for each other take most of the time of a tiny model in training."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def twin(tmp_path_factory):
    """A tiny llama, its scrambled twin, and the true gauge between them."""
    from signed_align import scramble
    from tests import tiny

    root = tmp_path_factory.mktemp("twin")
    source = tiny.save(tiny.build("llama"), root / "source")
    gauge = scramble(source, root / "target", seed=3)
    gauge.save(root / "gauge.safetensors")
    return source, root / "target", gauge


@pytest.fixture(scope="session")
def full_twin(tmp_path_factory):
    """A tiny llama, a twin of it changed in all spaces, and the true gauge between them."""
    from signed_align import scramble
    from tests import tiny

    root = tmp_path_factory.mktemp("full-twin")
    source = tiny.save(tiny.build("llama"), root / "source")
    gauge = scramble(source, root / "target", seed=5, spaces=["all"])
    gauge.save(root / "gauge.safetensors")
    return source, root / "target", gauge
