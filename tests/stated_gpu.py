"""A CUDA device that is only stated: torch.compile for it up to the generated code.

Tensors are fake ones on "cuda", Inductor is told the device's properties, and nothing is launched.
The list of what has to answer was found by trying, with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
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
def stated_gpu(sm: tuple[int, int]) -> Iterator[Callable[..., torch.Tensor]]:
    """Yield a function that makes fake tensors on a GPU of compute capability ``sm``."""
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
        "is_bf16_supported": lambda *args: True,
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
            mode = FakeTensorMode(allow_non_fake_inputs=True)

            def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                with mode:
                    return torch.empty(size, dtype=dtype, device="cuda")

            empty.mode = mode  # type: ignore[attr-defined]
            yield empty
        finally:
            driver._active = active
            for cached in caches:
                cached.cache_clear()
