"""CPU kernels: generated C++, compiled once for each dtype, mode and kind of format, kept on disk.

Floating and fixed point formats share a kernel: their numbers are its arguments. Posits and
blocks are compiled each. Where no compiler works, one warning is given and the aten form runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .blocks import blocks_of, checked_dim
from .carrier import Carrier, carrier_of
from .fast_paths import Fast, fast_path
from .format_base import Format
from .formats import FixedPoint, FloatingPoint, Posit
from .grids import grid_of
from .kernel_source import kernel_source
from .random_bits import Draw, lane_width
from .rounding import Grid, Rounding
from .scaled import MX, BlockFloatingPoint

FLAGS = (
    *("-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-std=c++17"),
    # Shifts and sums wrap on NaN's lanes; words are read as other types; a conversion that may
    # raise a flag would keep GCC from vectorising a selection.
    *("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
PARALLEL_FROM = 32768
"""Elements from which a second thread pays for its start (about 5 µs)."""


def cache_dir() -> Path:
    """Where kernels are kept: QINDUCTOR_CACHE_DIR, else beside Inductor's, else ~/.cache."""
    own = os.environ.get("QINDUCTOR_CACHE_DIR")
    if own:
        return Path(own)
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor:
        return Path(inductor) / "qinductor"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qinductor"


@functools.cache
def compiler() -> tuple[str, str] | None:
    """(command, version and machine) of the C++ compiler, or None with one warning."""
    command = shutil.which(os.environ.get("CXX", "g++"))
    try:
        if command is None:
            raise OSError("no g++ (set CXX)")
        version = subprocess.run(
            [command, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        _warn(error)
        return None
    machine = platform.machine() + platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        machine += next((t for t in info.read_text().splitlines() if t.startswith("flags")), "")
    return command, version + machine


@functools.cache
def _warn(error: object) -> None:
    warnings.warn(
        f"qinductor.numerics: no compiled kernels ({error}); quantize() runs as tensor operations, "
        "10 to 100 times slower. Install g++ or set CXX to a C++17 compiler.",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def build(source: str, entry: str = "run") -> Any:
    """The ``entry`` function of a kernel, compiled or found on disk; None if that fails."""
    found = compiler()
    if found is None:
        return None
    command, identity = found
    text = "\0".join((source, *FLAGS, identity))
    path = cache_dir() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                cpp, so = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
                cpp.write_text(source)
                subprocess.run(
                    [command, *FLAGS, "-o", str(so), str(cpp)],
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                os.replace(so, path)
        return getattr(ctypes.CDLL(str(path)), entry)
    except (OSError, subprocess.SubprocessError) as error:
        _warn(getattr(error, "stderr", None) or error)
        return None


@functools.lru_cache(maxsize=4096)
def element_kernel(
    fmt: FloatingPoint | FixedPoint | Posit, dtype: torch.dtype, mode: Rounding, lane: int
) -> tuple[Any, tuple[int, ...]]:
    """(function, the grid's numbers) for an element format."""
    carrier = carrier_of(dtype)
    if isinstance(fmt, Posit):
        return build(kernel_source(fmt, None, carrier, mode, lane)), (0,) * 14
    grid = grid_of(fmt, carrier, mode)
    symmetric = grid.limit[0] == grid.limit[1] and grid.overflow[0] == grid.overflow[1]
    shape = Grid(
        *(0, 0, 0, 0, 0, 0, 0, grid.floor_odd, (0, 0 if symmetric else 1), (0, 0), (0, 0)),
        *(grid.keep_sign, grid.wrap, grid.deep),
    )
    fast = fast_path(grid, carrier.word, mode)
    return _grid_kernel(shape, carrier, mode, lane, fast), _numbers(grid)


@functools.cache
def _grid_kernel(shape: Grid, carrier: Carrier, mode: Rounding, lane: int, fast: Fast) -> Any:
    """The kernel of all grids of a shape: what is not a number of theirs."""
    return build(kernel_source(FixedPoint(8, 0), shape, carrier, mode, lane, fast))


def _numbers(grid: Grid) -> tuple[int, ...]:
    return (*grid[:7], *grid.limit, *grid.overflow, *grid.infinity, grid.keep_sign)


@functools.lru_cache(maxsize=4096)
def block_kernel(
    fmt: MX | BlockFloatingPoint, dtype: torch.dtype, mode: Rounding, lane: int, entry: str
) -> Any:
    """The function for a block format; the partition is its argument."""
    if isinstance(fmt, MX):
        fmt = MX(fmt.element, scale_rule=fmt.scale_rule)
    else:
        fmt = BlockFloatingPoint(fmt.wl)
    return build(kernel_source(fmt, None, carrier_of(dtype), mode, lane), entry)


def quantize_into(x: Tensor, out: Tensor, fmt: Format, mode: Rounding, draw: Draw) -> bool:
    """Run the compiled kernel; False where there is none for these arguments."""
    if x.device.type != "cpu" or x.dtype not in _TYPES:
        return False
    random = mode is Rounding.STOCHASTIC
    lane = lane_width(draw.random_bits) if random else 0
    tail = draw_numbers(draw) if random else (0,) * 5
    if isinstance(fmt, FloatingPoint | FixedPoint | Posit):
        function, numbers = element_kernel(fmt, x.dtype, mode, lane)
        if function is None:
            return False
        if not (x.is_contiguous() and out.is_contiguous()):
            return _through_copies(
                x, out, lambda a, b: _run_elements(function, a, b, (*numbers, *tail))
            )
        _run_elements(function, x, out, (*numbers, *tail))
        return True
    if not isinstance(fmt, MX | BlockFloatingPoint):
        return False
    entry, shape = _layout(x, fmt)
    function = block_kernel(fmt, x.dtype, mode, lane, entry)
    if function is None:
        return False

    def run(a: Tensor, b: Tensor) -> None:
        function(
            ctypes.c_void_p(a.data_ptr()),
            ctypes.c_void_p(b.data_ptr()),
            *(ctypes.c_int64(n) for n in shape),
            (ctypes.c_int64 * 19)(*(0,) * 14, *tail),
            ctypes.c_int(threads_for(a.numel())),
        )

    if not (x.is_contiguous() and out.is_contiguous()):
        return _through_copies(x, out, run)
    run(x, out)
    return True


def draw_numbers(draw: Draw) -> tuple[int, ...]:
    """A draw as the last five of a kernel's numbers."""
    seed = 0 if draw.seed is None else int(draw.seed)
    step = 0 if draw.step is None else int(draw.step)
    return seed, step, draw.site, draw.index_offset, draw.random_bits


_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _layout(x: Tensor, fmt: MX | BlockFloatingPoint) -> tuple[str, tuple[int, ...]]:
    """The kernel function for a row-major x, and its sizes."""
    blocks, n = blocks_of(fmt, x), x.numel()
    if blocks.dim is None and (blocks.axis is None or blocks.run is None):
        return "run", (1, n, n)
    name, of = ("dim", blocks.dim) if blocks.dim is not None else ("axis", blocks.axis)
    assert of is not None
    d, shape = checked_dim(name, of, x), tuple(x.shape) or (1,)
    outer, size, inner = math.prod(shape[:d]), shape[d], math.prod(shape[d + 1 :])
    if blocks.run is not None:
        run = min(blocks.run, size)
        if inner == 1:
            return "run", (outer, size, run)
        return "run_columns", (outer, size, inner, run)
    if outer == 1:
        return "run", (size, inner, inner)
    if inner == 1:
        return "run_columns", (1, outer, size, outer)
    return "run_segments", (outer, size, inner)


def _run_elements(function: Any, x: Tensor, out: Tensor, numbers: tuple[int, ...]) -> None:
    function(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel()),
        (ctypes.c_int64 * len(numbers))(*numbers),
        ctypes.c_int(threads_for(x.numel())),
    )


def threads_for(n: int) -> int:
    """Threads worth starting for n elements."""
    return torch.get_num_threads() if n >= PARALLEL_FROM else 1


def _through_copies(x: Tensor, out: Tensor, run: Any) -> bool:
    """Row-major copies of strided tensors: random bits belong to the index in the shape."""
    dense = x.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(dense)
    run(dense, target)
    if target is not out:
        out.copy_(target)
    return True
