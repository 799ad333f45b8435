"""Run the code that Inductor made for a GPU on CPU tensors, its kernels in Triton's interpreter.

Everything is as generated but for what a device is needed for: memory, streams, launches, and the
functions of NVIDIA's libdevice, which are linked as machine code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

BLOCKS = {"XBLOCK": 64, "YBLOCK": 16, "R0_BLOCK": 64}
"""Sizes that autotuning would choose."""


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def call(*operands: Any) -> Any:
        first = operands[0]
        arrays = [operand.handle.data for operand in operands]
        result = function(*arrays).astype(arrays[0].dtype)
        return tl.core.tensor(TensorHandle(result, first.dtype.scalar), first.type)

    return call


def _libdevice() -> Any:
    import numpy as np

    functions = {
        "nearbyint": np.rint,
        "mul_rn": np.multiply,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "tanh": np.tanh,
    }
    return types.SimpleNamespace(**{n: _elementwise(f) for n, f in functions.items()})


class _Kernel:
    def __init__(self, function: Any, meta: dict[str, Any]) -> None:
        self.function = function
        self.meta = meta

    def run(self, *args: Any, stream: int) -> None:
        names = list(self.meta["triton_meta"]["signature"])
        blocks = {name: size for name, size in BLOCKS.items() if name in names}
        plain = [name for name in names if name not in blocks]
        given, rest = dict(zip(plain, args, strict=False)), args[len(plain) :]
        assert set(given) == set(plain)
        if rest:  # a template's grid comes with the call
            grid = tuple(int(size) for size in rest)
        else:
            sizes = [("xnumel", "XBLOCK"), ("ynumel", "YBLOCK")]
            # A size that is 1 is written into the kernel, and so is its block.
            grid = tuple(
                -(-int(given[size]) // blocks[block])
                for size, block in sizes
                if size in given and block in blocks
            ) or (1,)
        if 0 not in grid:
            self.function[grid](**given, **blocks)


class _Heuristics:
    def __getattr__(self, kind: str) -> Any:
        return lambda **meta: lambda function: _Kernel(function, meta)


class _Compile:
    """In the place of AsyncCompile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = itertools.count()

    def triton(self, name: str, source: str, device_str: str) -> _Kernel:
        head = "from torch._inductor.runtime import triton_helpers, triton_heuristics\n"
        device = "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math\n"
        assert head in source and device in source
        source = source.replace("triton_helpers.set_driver_to_gpu()\n", "")
        source = source.replace(head, head + "from run_generated import heuristics\n")
        source = source.replace(device, device + "from run_generated import libdevice\n")
        source = source.replace("@triton_heuristics.", "@heuristics.")
        path = self.folder / f"kernel{next(self.count)}.py"
        path.write_text(source, encoding="utf-8")
        return getattr(_load(path), name)

    def wait(self, scope: dict[str, Any]) -> None:
        pass


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def __getattr__(name: str) -> Any:
    if name == "heuristics":
        return _Heuristics()
    if name == "libdevice":
        return _libdevice()
    raise AttributeError(name)


def _rounded_to_bfloat16(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter cuts a float32 off; a GPU rounds it to the nearest bfloat16."""
    import numpy as np
    import triton.language as tl

    def call(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, rounding)

    return call


def run_generated(code: str, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call a wrapper's ``call`` with CPU tensors."""
    stream = "from torch._C import _cuda_getCurrentRawStream as get_raw_stream"
    maker = "async_compile = AsyncCompile()"
    memory = "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda"
    for part in (stream, maker, memory):
        assert part in code, part
    code = code.replace(stream, "get_raw_stream = lambda device: 0")
    code = code.replace(memory, "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cpu")
    code = code.replace(maker, "async_compile = ASYNC_COMPILE")
    from triton.runtime import interpreter

    rounded = _rounded_to_bfloat16(interpreter._convert_float)
    with (
        mock.patch.object(interpreter, "_convert_float", rounded),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "set_device", lambda index: None),
    ):
        scope = {"__name__": "generated", "ASYNC_COMPILE": _Compile(Path(folder))}
        exec(compile(code, "<generated>", "exec"), scope)
        return tuple(scope["call"](list(args)))
