"""Which elements share a scale: a tensor as a matrix of blocks, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from qinductor.errors import ConfigError

from .format_base import Format
from .qpytorch import QTorchBlock
from .scaled import MX, NVFP4, BlockFloatingPoint, Granularity, Integer


@dataclass(frozen=True)
class Blocks:
    """The partition: by ``dim``, or by runs of ``run`` along ``axis``, or one block."""

    dim: int | None = None
    axis: int | None = None
    run: int | None = None

    def matrix(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(blocks, length) view or copy of x, padded with zeros, and the way back to x's shape.

        Raises:
            ConfigError: x has no such dim.
        """
        shape = x.shape
        if self.dim is not None:
            d = checked_dim("dim", self.dim, x)
            moved = (x if x.dim() else x.reshape(1)).movedim(d, 0)
            turned = moved.shape
            return (
                moved.reshape(turned[0], -1),
                lambda y: y.reshape(turned).movedim(0, d).reshape(shape),
            )
        if self.axis is None or self.run is None:
            return x.reshape(1, -1), lambda y: y.reshape(shape)
        d = checked_dim("axis", self.axis, x)
        moved = (x if x.dim() else x.reshape(1)).movedim(d, -1)
        turned, length = moved.shape, moved.shape[-1]
        run = min(self.run, max(length, 1))
        pad = -length % run
        padded = nn.functional.pad(moved, (0, pad)) if pad else moved

        def back(y: Tensor) -> Tensor:
            rows = y.reshape(*turned[:-1], length + pad)[..., :length]
            return rows.movedim(-1, d).reshape(shape)

        return padded.reshape(-1, run), back


def checked_dim(name: str, dim: int, x: Tensor) -> int:
    """``dim`` counted from the front (a 0-d tensor has dim 0).

    Raises:
        ConfigError: out of range.
    """
    n = max(x.dim(), 1)
    if not -n <= dim < n:
        raise ConfigError(
            f"{name}={dim} is out of range for a {x.dim()}-d tensor; valid: {-n} to {n - 1}."
        )
    return dim % n


def blocks_of(fmt: Format, x: Tensor) -> Blocks:
    """The partition that a scaled format asks for."""
    if isinstance(fmt, QTorchBlock):
        fmt = fmt.plain
    if isinstance(fmt, BlockFloatingPoint):
        return Blocks(dim=fmt.dim, axis=fmt.axis, run=fmt.block)
    if isinstance(fmt, MX | NVFP4):
        return Blocks(axis=fmt.axis, run=fmt.block)
    assert isinstance(fmt, Integer), fmt
    if fmt.granularity is Granularity.PER_CHANNEL:
        return Blocks(dim=fmt.axis)
    if fmt.granularity is Granularity.PER_TOKEN:
        return Blocks(axis=-1, run=max(x.shape[-1] if x.dim() else 1, 1))
    if fmt.granularity is Granularity.GROUP:
        return Blocks(axis=-1, run=fmt.group)
    return Blocks()
