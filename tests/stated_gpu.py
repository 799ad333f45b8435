"""A CUDA device that is only stated: torch.compile for it up to the generated code.

Tensors are fake ones on "cuda", Inductor is told the device's properties, and nothing is launched.
The list of what has to answer was found by trying, with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._subclasses.fake_tensor import FakeTensorMode

from qinductor import capability


def _properties(sm: tuple[int, int]) -> Any:
    return types.SimpleNamespace(
        major=sm[0],
        minor=sm[1],
        name="stated",
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )


class _Driver:
    """What Triton asks its driver for when code is made, and nothing is run."""

    def __init__(self, sm: tuple[int, int]) -> None:
        self.sm = sm

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm[0] * 10 + self.sm[1], 32)

    def get_current_device(self) -> int:
        return 0


@contextlib.contextmanager
def stated_gpu(sm: tuple[int, int]) -> Iterator[FakeTensorMode]:
    """Have torch believe in a GPU of compute capability ``sm``; yield a mode for fake tensors."""
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.post_grad as post_grad
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime.driver import driver

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: _properties(sm),
        "get_device_capability": lambda device=None: sm,
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *args: None,
        "synchronize": lambda *args: None,
        "is_bf16_supported": lambda *args, **more: True,
        "is_tf32_supported": lambda: True,
        "get_arch_list": lambda: [f"sm_{sm[0]}{sm[1]}"],
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    caches = (
        capability._detect,
        DeviceProperties.create,
        torch.utils._triton.triton_hash_with_backend,
        torch.utils._triton.has_triton,
    )
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, answer: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, answer))

        for name, answer in answers.items():
            patch(torch.cuda, name, answer)
            if hasattr(device_interface.CudaInterface, name):
                patch(device_interface.CudaInterface, name, staticmethod(answer))
        worker = device_interface.CudaInterface.Worker
        for name in ("current_device", "get_device_properties"):
            patch(worker, name, staticmethod(answers[name]))
        # Inductor's own patterns are traced on real tensors of the device.
        for module in (joint_graph, post_grad):
            patch(module, "lazy_init", lambda *args: None)
        active = getattr(driver, "_active", None)
        driver.set_active(_Driver(sm))
        for cached in caches:
            cached.cache_clear()
        try:
            yield FakeTensorMode(allow_non_fake_inputs=True)
        finally:
            driver._active = active
            for cached in caches:
                cached.cache_clear()


class _Called(Exception):
    """The code is made and was called; nothing is to be run."""


@dataclass(frozen=True)
class Generated:
    """What backend "qsim" made.

    Attributes:
        code: the wrapper, with the kernels' text in it.
        inputs: the real tensors that the wrapper is called with, in its order.
        report: what the passes said, as (site, action, detail).
    """

    code: str
    inputs: tuple[Tensor, ...]
    report: tuple[tuple[str, str, str], ...]

    def kernels(self) -> list[str]:
        """Names of the launched kernels, in the order of their launches."""
        return re.findall(r"^ *(triton_\w+)\.run\(", self.code, re.MULTILINE)


class _Fakes:
    """Fake copies on the GPU, one for each real tensor, strides kept."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, real: Any) -> Any:
        if not isinstance(real, Tensor):
            return real
        if id(real) not in self.made:
            with self.mode:
                fake = torch.empty_strided(
                    real.shape, real.stride(), dtype=real.dtype, device="cuda"
                )
            self.made[id(real)] = (real, fake)
        return self.made[id(real)][1]

    def real(self, fake: Tensor) -> Tensor:
        return next(real for real, known in self.made.values() if known is fake)

    def module(self, module: nn.Module) -> nn.Module:
        """A copy of the module with fake tensors."""
        # Shared tensors have to stay shared: the copy starts with the very tensors.
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
        copied = copy.deepcopy(module, dict(tensors))
        for part in copied.modules():
            for held in (part._buffers, part._parameters):
                held.update({name: self(t) for name, t in held.items() if t is not None})
        return copied


def generate(
    sm: tuple[int, int],
    function: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
    **options: Any,
) -> Generated:
    """Compile a function or module of CPU tensors as if they lay on a GPU.

    Args:
        sm: its compute capability.
        function: what to compile. args: what it is called with.
        dynamic: sizes are symbols.
        options: of the backend.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    from qinductor import report
    from qinductor.backend import qsim

    made: list[str] = []
    called: list[list[Tensor]] = []
    entries: list[Any] = []

    class Module:
        @staticmethod
        def call(inputs: list[Tensor]) -> None:
            called.append(list(inputs))
            raise _Called

    def compile_to_module(graph: Any) -> Any:
        wrapper, kernels = graph.codegen()
        made.append(wrapper.value + (kernels.value if kernels else ""))
        return Module()

    def add(record: Any, found: list[Any]) -> None:
        entries.extend(found)

    torch._dynamo.reset()
    with (
        stated_gpu(sm) as mode,
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        mock.patch.object(report.GraphRecord, "add", add),
        mock.patch("qinductor.backend.store_entries", lambda *args: None),
        mock.patch("qinductor.backend.read_entries", lambda *args: []),
        config.patch(force_disable_caches=True),
    ):
        fake = _Fakes(mode)
        on_gpu = fake.module(function) if isinstance(function, nn.Module) else function
        compiled = torch.compile(on_gpu, backend=qsim, dynamic=dynamic, options=options)
        with torch.no_grad(), contextlib.suppress(_Called):
            compiled(*(fake(arg) for arg in args))
        ((code,), (inputs,)) = made, called
        reals = tuple(fake.real(t) if isinstance(t, Tensor) else t for t in inputs)
    torch._dynamo.reset()
    return Generated(code, reals, tuple((e.site, e.action, e.detail) for e in entries))
