import os

import pytest


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """A tiny world and the guard, once for all inputs; torch runs on one thread."""
    import logging
    import tempfile
    import warnings

    import torch

    from signed_align import progress
    from tests.fuzz.guard import Guard
    from tests.fuzz.targets import Bench

    environment, temporary = dict(os.environ), tempfile.tempdir
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    synchronise, os.fsync = os.fsync, lambda _: None  # power cuts are tried elsewhere
    token = progress.quiet.set(True)
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        yield Bench(tmp_path_factory.mktemp("fuzz"), Guard())
    logging.disable(logging.NOTSET)
    os.fsync = synchronise
    progress.quiet.reset(token)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = temporary
