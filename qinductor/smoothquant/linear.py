"""QuantizedLinear: an int8 Linear whose packed weight and scales are plain buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops

_HELD_IN_FLOAT32 = ("w_scale", "bias", "x_scale", "x_inverse_scale", "multiplier")


class QuantizedLinear(nn.Module):
    """``y = x @ w.T + b`` with int8 weight and uint8 activation codes, for inference.

    Static if ``x_scale`` is there: codes ``quantize(x, x_inverse_scale, x_zero_point)``.
    Dynamic otherwise: codes and scales ``quantize_per_token(x, multiplier)``. Output in x's dtype.

    Buffers:
        packed: int8, :func:`qinductor.ops.pack_weight` of the (N, K) codes.
        w_scale: float32 (N,). w_sum: int32 (N,), sums of the codes over k.
        bias: float32 (N,) or None.
        x_scale: float32 (), x_zero_point: int32 (); None if dynamic (the zero point is then 128).
        x_inverse_scale: float32, fl32(1 / x_scale), shape (); or (K,), the reciprocals of x_scale
            times the smoothing factors that no layer before could take; None if dynamic.
        multiplier: float32 (K,), the reciprocals of such factors in the dynamic scheme, or None.

    Scales and bias stay float32 when the module is cast: a bfloat16 scale would be wrong by 0.4 %.

    Args:
        codes: int8 (N, K), and the buffers above. Group members pass the same tensors for
            ``x_scale`` and the like, so that a compiled graph quantizes their input once.
        divisor, min_scale: of :func:`qinductor.ops.quantize_per_token`.
        dtype: what :attr:`weight` is returned in; the model's.
    """

    packed: Tensor
    w_scale: Tensor
    w_sum: Tensor
    bias: Tensor | None
    x_scale: Tensor | None
    x_zero_point: Tensor
    x_inverse_scale: Tensor | None
    multiplier: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        w_scale: Tensor,
        bias: Tensor | None,
        *,
        x_scale: Tensor | None = None,
        x_zero_point: Tensor | None = None,
        x_inverse_scale: Tensor | None = None,
        multiplier: Tensor | None = None,
        divisor: float = 127.0,
        min_scale: float = torch.finfo(torch.float32).tiny,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.divisor = divisor
        self.min_scale = min_scale
        self.dtype = dtype
        if x_zero_point is None:
            x_zero_point = torch.tensor(ops.ZERO_POINT_S8, dtype=torch.int32, device=codes.device)
        self.register_buffer("packed", torch.ops.qinductor.pack_weight(codes))
        self.register_buffer("w_scale", w_scale)
        self.register_buffer("w_sum", codes.sum(dim=1, dtype=torch.int32))
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.register_buffer("x_scale", x_scale)
        self.register_buffer("x_zero_point", x_zero_point)
        self.register_buffer("x_inverse_scale", x_inverse_scale)
        self.register_buffer("multiplier", multiplier)
        self.training = False

    @property
    def is_static(self) -> bool:
        """Whether the activation's scale is fixed."""
        return self.x_scale is not None

    def codes(self) -> Tensor:
        """Return the int8 weight codes, (N, K), unpacked."""
        codes: Tensor = torch.ops.qinductor.unpack_weight(
            self.packed, self.out_features, self.in_features
        )
        return codes

    def smoothing(self) -> Tensor | None:
        """Return the smoothing factors that this layer applies itself, float32 (K,)."""
        if (
            self.x_inverse_scale is not None
            and self.x_inverse_scale.dim()
            and self.x_scale is not None
        ):
            return torch.reciprocal(self.x_inverse_scale * self.x_scale)
        return None if self.multiplier is None else self.multiplier.reciprocal()

    @property
    def weight(self) -> Tensor:
        """The float weight (N, K) that the codes stand for, made anew at every access.

        For code that asks a Linear for its weight's dtype, device or numbers. The layer itself
        never uses it.
        """
        weight = self.codes().float() * self.w_scale[:, None]
        factors = self.smoothing()
        return (weight if factors is None else weight / factors).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N) in the dtype of ``x`` (..., K)."""
        if self.x_scale is not None:
            scale = self.x_scale
            if torch.is_grad_enabled() and x.requires_grad:
                # Codes are integers, where autograd ends: a gradient of x would silently be lost.
                scale = torch.ops.qinductor.inference_scale(scale, x)
            codes = torch.ops.qinductor.quantize(x, self.x_inverse_scale, self.x_zero_point)
        else:
            codes, scale = torch.ops.qinductor.quantize_per_token(
                x, self.multiplier, self.divisor, self.min_scale
            )
        y: Tensor = torch.ops.qinductor.qlinear(
            codes, scale, self.x_zero_point, self.packed, self.w_scale, self.w_sum, self.bias,
            out_dtype=x.dtype,
        )  # fmt: skip
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move buffers, but cast none: casts leave integers alone, so floats go as integers."""
        floats = {name: self._buffers[name] for name in _HELD_IN_FLOAT32}
        as_ints = {n: t.view(torch.int32) for n, t in floats.items() if t is not None}
        self._buffers.update(as_ints)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, ints in as_ints.items():
                moved = self._buffers[name]
                assert moved is not None
                # Unmoved, the very tensor comes back, which other members of the group share.
                self._buffers[name] = floats[name] if moved is ints else moved.view(torch.float32)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        """Shapes and scheme."""
        scheme: list[Any] = [
            f"in_features={self.in_features}",
            f"out_features={self.out_features}",
            f"bias={self.bias is not None}",
            "static" if self.is_static else "dynamic",
        ]
        if self.smoothing() is not None:
            scheme.append("smoothed here")
        return ", ".join(scheme)
