"""Triton's interpreter, in a process of its own: it has to be chosen before Triton is imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

Interpreter = Callable[..., Any]


def _start() -> None:
    import torch

    torch.set_num_threads(1)
    assert os.environ["TRITON_INTERPRET"] == "1"


def _call(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    from qinductor.templates.triton.gemm_tile import gemm_kernel

    assert isinstance(gemm_kernel, InterpretedFunction), "the kernel would not be interpreted"
    return function(*args, **kwargs)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """``interpreter(function, *args)``: call a module's function where kernels are interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start)
    try:
        pool.submit(os.getpid).result()
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pool.submit(_call, function, args, kwargs).result(timeout=120)

    yield call
    pool.shutdown()
