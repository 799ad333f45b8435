"""Quantizer: a module that quantizes activations forward and gradients backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qinductor.errors import ConfigError

from .format_base import Format
from .quantize import quantize
from .random_bits import lane_width, site_hash
from .reference import check_format
from .rounding import Rounding


class _QuantizeGradient(torch.autograd.Function):
    """Identity whose gradient is quantized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, options: tuple[Any, ...]) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(step)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        fmt, rounding, seed, site, random_bits = ctx.options
        (step,) = ctx.saved_tensors
        q = quantize(grad, fmt, rounding, seed=seed, site=site, step=step, random_bits=random_bits)
        return q, None, None


class Quantizer(nn.Module):
    """Quantize what passes forward to one format, and its gradient to another.

    Either format may be None: that direction is untouched. With ``backward="mask"`` the gradient is
    zeroed where the input lies outside the forward range, before it is rounded.

    Stochastic bits depend on (seed, site, step, index). The seed and the step are in the
    state_dict, so a resumed run rounds alike; sites come from :func:`assign_sites`, the step from
    :func:`set_step`.

    Raises:
        ConfigError: a format or a mode is not valid, or both formats are None.
    """

    step: Tensor
    seed: Tensor

    def __init__(
        self,
        forward_format: Format | None,
        backward_format: Format | None = None,
        forward_rounding: Rounding = Rounding.TIES_TO_EVEN,
        backward_rounding: Rounding = Rounding.TIES_TO_EVEN,
        *,
        seed: int | None = None,
        random_bits: int = 32,
        backward: str = "identity",
    ) -> None:
        super().__init__()
        if forward_format is None and backward_format is None:
            raise ConfigError("Quantizer: give forward_format, backward_format, or both.")
        for fmt, mode in ((forward_format, forward_rounding), (backward_format, backward_rounding)):
            if fmt is not None:
                check_format(fmt, mode)
        lane_width(random_bits)
        self.forward_format, self.backward_format = forward_format, backward_format
        self.forward_rounding, self.backward_rounding = forward_rounding, backward_rounding
        self.random_bits, self.backward_rule = random_bits, backward
        self.forward_site, self.backward_site = (
            site_hash("", role="input"),
            site_hash("", role="grad"),
        )
        drawn = torch.randint(0, 2**62, ()) if seed is None else torch.tensor(seed)
        self.register_buffer("seed", drawn.to(torch.int64))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """X quantized; any shape, x's dtype."""
        if self.backward_format is not None:
            options = (
                *(self.backward_format, self.backward_rounding, self.seed),
                *(self.backward_site, self.random_bits),
            )
            x = _QuantizeGradient.apply(x, self.step, options)  # type: ignore[no-untyped-call]
        if self.forward_format is None:
            return x
        return quantize(
            x,
            self.forward_format,
            self.forward_rounding,
            seed=self.seed,
            site=self.forward_site,
            step=self.step,
            random_bits=self.random_bits,
            backward=self.backward_rule,
        )

    def extra_repr(self) -> str:
        """Formats and modes."""
        return (
            f"forward={self.forward_format!s} {self.forward_rounding.name}, "
            f"backward={self.backward_format!s} {self.backward_rounding.name}"
        )


def data_parallel_rank() -> int:
    """This process's rank where torch.distributed runs, else 0."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_rank()) if running else 0


def assign_sites(model: nn.Module, rank: int | None = None) -> dict[str, tuple[int, int]]:
    """Give every Quantizer of a model the sites of its module path; returns them by path.

    Activations and gradients differ between data-parallel ranks, so their sites do. ``rank``: the
    data-parallel rank, where it is not :func:`data_parallel_rank`, as with tensor parallelism.

    Raises:
        ConfigError: two of them collide (32-bit hashes); rename a module.
    """
    sites: dict[str, tuple[int, int]] = {}
    taken: dict[int, str] = {}
    rank = data_parallel_rank() if rank is None else rank
    for path, module in model.named_modules():
        if not isinstance(module, Quantizer):
            continue
        pair = site_hash(path, role="input", rank=rank), site_hash(path, role="grad", rank=rank)
        for site in pair:
            if site in taken:
                raise ConfigError(
                    f"the sites of {path!r} and {taken[site]!r} collide; rename one of them."
                )
            taken[site] = path
        module.forward_site, module.backward_site = pair
        sites[path] = pair
    return sites


def set_step(model: nn.Module, step: int) -> None:
    """Set the training step of every Quantizer of a model."""
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.step.fill_(step)
