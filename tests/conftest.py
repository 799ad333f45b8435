"""Shared settings of the tests: where compiled code and data live, and what the markers need."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Inductor's cache stays in the checkout: a second run is warm, nothing of the user's is touched.
# A test that needs a cold one points the variable at its tmp_path in a process of its own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
# No test may reach for a network; a model comes from a package, a configuration or a folder.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose instruction set or device is not there, and say so."""
    import torch

    from qinductor.capability import Capability, Isa

    for mark in item.iter_markers("isa"):
        (name,) = mark.args
        if Isa.parse(name) not in Capability.detect().isas:
            pytest.skip(f"this CPU lacks {name}")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _restore_log_levels() -> Iterator[None]:
    """Put log levels back: a command run in this process quiets libraries for its whole life."""
    names = ("", "torch", "torchao", "transformers", "huggingface_hub")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the text data sets; the test is skipped where it is absent."""
    folder = Path(os.environ.get("QINDUCTOR_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"no data at {folder} (set QINDUCTOR_DATA to a folder with stsb/, banking77/, xquad/)"
        )
    return folder
