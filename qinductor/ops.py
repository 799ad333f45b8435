"""The operators ``torch.ops.qinductor.*``: what each one means.

The eager body of an operator is its definition, its reference in tests, and the fallback where no
template applies. Integers are exact. The dequantizing epilogue of :func:`qlinear` has one fixed
order of operations, without fused multiply-add, so that every template can reproduce every bit:

    acc = sum_k x[m, k] * w[n, k]  -  x_zero_point * w_sum[n]             int32, exact
    y   = fl(fl(fl(acc) * x_scale[m]) * w_scale[n])                        float32
    y   = fl(y + bias[n])
    y   = activation(y)
    y   = fl(y + residual[m, n])
    out = y rounded to out_dtype, or quantize(y, out_inverse_scale, out_zero_point)

A code is uint8. A signed int8 activation ``s`` is carried as ``s + 128`` with zero point 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .activations import ACTIVATIONS, apply_activation
from .errors import BackwardThroughInt8Error, ConfigError, NanActivationError

PANEL = 64
"""Columns (rows of the weight) in one packed panel."""
K_GROUP = 4
"""Consecutive k that one 32-bit lane of a packed panel holds."""
MAX_K = (2**31 - 1) // (255 * 128)
"""Longest inner dimension whose int32 sum of u8 times s8 products cannot overflow."""
ZERO_POINT_S8 = 128
"""Zero point of a signed int8 code that is carried as uint8."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""

_Fake = TypeVar("_Fake", bound=Callable[..., Any])
_lib = torch.library.Library("qinductor", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)


def _define(schema: str) -> None:
    _lib.define(schema, tags=TAGS)


_define("quantize(Tensor x, Tensor inverse_scale, Tensor zero_point) -> Tensor")
_define(
    "quantize_per_token(Tensor x, Tensor? multiplier=None, float divisor=127.0, "
    "float min_scale=1.1754943508222875e-38) -> (Tensor, Tensor)"
)
_define("pack_weight(Tensor weight) -> Tensor")
_define("unpack_weight(Tensor packed, SymInt n, SymInt k) -> Tensor")
_define(
    "qlinear(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor packed, Tensor w_scale, "
    "Tensor w_sum, Tensor? bias=None, Tensor? residual=None, str activation='none', "
    "ScalarType out_dtype=float, Tensor? out_inverse_scale=None, "
    "Tensor? out_zero_point=None) -> Tensor"
)
_define("inference_scale(Tensor scale, Tensor x) -> Tensor")
_define("check_nan(Tensor x, str site) -> Tensor")
_define("no_gradient(Tensor grad, str op, SymInt[] size) -> Tensor")


# ---------------------------------------------------------------- quantize


def quantize(x: Tensor, inverse_scale: Tensor, zero_point: Tensor) -> Tensor:
    """Quantize a float tensor to uint8 codes with a given scale.

    ``code = clamp(RNE(fl32(x * inverse_scale)) + zero_point, 0, 255)``, where
    ``inverse_scale = fl32(1 / scale)`` was computed once, when the scale was.

    Args:
        x: (..., K) float16, bfloat16 or float32; widened to float32 first, which is exact.
        inverse_scale: float32, shape () or (1,) for the whole tensor, or (K,) for the last
            dimension.
        zero_point: int32, shape () or (1,).

    Returns:
        uint8, the shape of ``x``. -inf gives 0, +inf gives 255. A NaN has no code; it gives 0.

    Raises:
        ConfigError: an argument is of another dtype or shape.
    """
    _check_quantizer(x, inverse_scale, zero_point)
    codes = torch.round(x.float() * inverse_scale) + zero_point.to(torch.float32)
    return torch.nan_to_num(codes, nan=0.0).clamp(0, 255).to(torch.uint8)


def quantize_per_token(
    x: Tensor,
    multiplier: Tensor | None = None,
    divisor: float = 127.0,
    min_scale: float = torch.finfo(torch.float32).tiny,
) -> tuple[Tensor, Tensor]:
    """Quantize each row of ``x`` symmetrically with a scale of its own.

    ``t = x * multiplier``; ``scale = max(fl32(amax|t| / divisor), min_scale)``;
    ``code = clamp(RNE(fl32(t * fl32(1 / scale))), -128, 127) + 128``

    Args:
        x: (..., K) float.
        multiplier: float32 (K,), the reciprocal of a smoothing factor that could not be folded.
        divisor: code of the row's largest magnitude. torchao's symmetric mapping uses 127.5.
        min_scale: lower bound of a scale, which keeps ``1 / scale`` finite for a row of zeros.

    Returns:
        uint8 (..., K) with zero point 128, and float32 scales (..., 1).
    """
    t = x.float() if multiplier is None else x.float() * multiplier
    amax = t.abs().amax(dim=-1, keepdim=True)
    # On CUDA torch divides by a number by multiplying with its rounded reciprocal; by a tensor not.
    scale = (amax / torch.full_like(amax, divisor)).clamp_min(min_scale)
    codes = torch.round(t * torch.reciprocal(scale)).clamp(-128, 127) + ZERO_POINT_S8
    return torch.nan_to_num(codes, nan=0.0).to(torch.uint8), scale


def inference_scale(scale: Tensor, x: Tensor) -> Tensor:
    """Return a copy of a static ``scale`` through which a gradient of ``x`` is refused.

    Codes are integers, so autograd ends at them: without this link a backward pass would silently
    leave out whatever flows through a static int8 layer. Layers take it where ``x`` needs a
    gradient; the passes remove it from every graph.
    """
    return scale.clone()


def check_nan(x: Tensor, site: str) -> Tensor:
    """Return a copy of ``x``.

    Raises:
        NanActivationError: ``x`` holds a NaN; the message names ``site``.
    """
    if bool(x.isnan().any()):
        raise NanActivationError(site, int(x.isnan().sum()))
    return x.clone()


def _check_tensor(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], fits: bool, shape: str
) -> None:
    if tensor.dtype not in dtypes or not fits:
        raise ConfigError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it has to be "
            f"{' or '.join(map(str, dtypes))} of shape {shape}."
        )


def _has_one_element(tensor: Tensor) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    count = tensor.numel()
    return count == 1 if isinstance(count, int) else guard_or_false(count == 1)


def _has_shape(tensor: Tensor, shape: Sequence[int]) -> bool:
    """True if the shapes are equal. Sizes not known yet are compared when the code runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    sizes: Sequence[Any] = tensor.shape
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):
        if isinstance(size, int) and isinstance(wanted, int):
            if size != wanted:
                return False
        elif guard_or_true(size == wanted):
            torch._check(size == wanted)
        else:
            return False
    return True


def _check_quantizer(
    x: Tensor, inverse_scale: Tensor, zero_point: Tensor, prefix: str = ""
) -> None:
    one = _has_one_element(inverse_scale) and inverse_scale.dim() < 2
    fits = one or _has_shape(inverse_scale, x.shape[-1:])
    _check_tensor("x", x, FLOATS, x.dim() > 0, "(..., K)")
    _check_tensor(
        f"{prefix}inverse_scale", inverse_scale, (torch.float32,), fits, "(), (1,) or (K,)"
    )
    one = _has_one_element(zero_point)
    _check_tensor(f"{prefix}zero_point", zero_point, (torch.int32,), one, "() or (1,)")


# ---------------------------------------------------------------- packed weights


def packed_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """Shape of a packed (N, K) weight: (panels, groups of four k, 64 columns, 4)."""
    return (-(-n // PANEL), -(-k // K_GROUP), PANEL, K_GROUP)


def pack_weight(weight: Tensor) -> Tensor:
    """Pack int8 (N, K) into panels of 64 rows, zero padded to whole panels and groups of four k.

    Element (n, k) lies at ``[n // 64, k // 4, n % 64, k % 4]``: what one vpdpbusd reads is 64
    consecutive bytes, and a GEMM reads a panel from front to back.

    On CUDA the indices are the same and the strides are not: tensor cores read rows, so the memory
    stays the padded (N, K) matrix, of which the result is a view.
    """
    n, k = weight.shape
    panels, groups, _, _ = packed_shape(n, k)
    padded = weight.new_zeros((panels * PANEL, groups * K_GROUP))
    padded[:n, :k] = weight
    return _in_memory_order(padded.view(panels, PANEL, groups, K_GROUP))


def _in_memory_order(tiles: Tensor) -> Tensor:
    """Packed weight of the rows' tiles (panels, 64, groups, 4), laid out as the device reads it."""
    packed = tiles.permute(0, 2, 1, 3)
    return packed if tiles.device.type == "cuda" else packed.contiguous()


def empty_packed(weight: Tensor) -> Tensor:
    """Memory for :func:`pack_weight` of ``weight`` (N, K), with its strides."""
    panels, groups, _, _ = packed_shape(*weight.shape)
    return _in_memory_order(weight.new_empty((panels, PANEL, groups, K_GROUP)))


def unpack_weight(packed: Tensor, n: int, k: int) -> Tensor:
    """Undo :func:`pack_weight`: int8 (N, K), contiguous."""
    panels, groups, _, _ = packed.shape
    rows = packed.permute(0, 2, 1, 3).reshape(panels * PANEL, groups * K_GROUP)
    return rows[:n, :k].contiguous()


# ---------------------------------------------------------------- int8 linear


def int_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Exact product of integer codes: (M, K) uint8 times the transpose of (N, K) int8 → int32.

    Computed in float32 in slices of K so short (255 * 128 * 512 < 2**24) that every partial sum is
    an integer float32 holds exactly, in whatever order the matrix library adds.
    """
    m, k = x.shape
    acc = torch.zeros((m, weight.shape[0]), dtype=torch.int32, device=x.device)
    # Autocast would have the product rounded to bfloat16.
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, k, 512):
            stop = min(start + 512, k)
            acc += (x[:, start:stop].float() @ weight[:, start:stop].float().t()).to(torch.int32)
    return acc


def qlinear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """Int8 linear layer with its epilogue, in the order the module's docstring fixes.

    Args:
        x: uint8 (..., K).
        x_scale: float32, () or (1,), or (..., 1) or (rows, 1) for one scale a token.
        x_zero_point: int32, () or (1,).
        packed: int8, :func:`pack_weight` of the (N, K) weight.
        w_scale: float32 (N,).
        w_sum: int32 (N,), the weight's sum over k.
        bias: float (N,).
        residual: float (..., N).
        activation: a key of :data:`qinductor.activations.ACTIVATIONS`.
        out_dtype: float32, bfloat16, float16 or uint8.
        out_inverse_scale: as in :func:`quantize`; needed for uint8 and only then.
        out_zero_point: as in :func:`quantize`; needed for uint8 and only then.

    Returns:
        ``out_dtype`` (..., N), contiguous.
    """
    n, k = w_scale.shape[0], x.shape[-1]
    rows = x.reshape(-1, k)
    acc = int_matmul(rows, unpack_weight(packed, n, k)) - x_zero_point * w_sum
    per_row = x_scale.reshape(()) if x_scale.numel() == 1 else x_scale.reshape(-1, 1)
    y = acc.to(torch.float32) * per_row * w_scale
    if bias is not None:
        y = y + bias.float()
    y = apply_activation(y, activation).reshape(*x.shape[:-1], n)
    if residual is not None:
        y = y + residual.float()
    if out_dtype is torch.uint8:
        assert out_inverse_scale is not None and out_zero_point is not None
        return quantize(y, out_inverse_scale, out_zero_point)
    return y.to(out_dtype)


def _check_qlinear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    out_inverse_scale: Tensor | None,
    out_zero_point: Tensor | None,
) -> None:
    """Refuse arguments that no implementation may be handed (shapes are facts at trace time)."""
    k, n = x.shape[-1], w_scale.shape[0]
    if x.dtype is not torch.uint8 or packed.dtype is not torch.int8:
        raise ConfigError(
            f"qlinear takes uint8 codes and an int8 packed weight, got {x.dtype} and "
            f"{packed.dtype}. Quantize the input with torch.ops.qinductor.quantize."
        )
    if tuple(packed.shape) != packed_shape(n, k):
        raise ConfigError(
            f"packed weight has shape {tuple(packed.shape)}, but N={n}, K={k} needs "
            f"{packed_shape(n, k)}. Make it with torch.ops.qinductor.pack_weight."
        )
    if k > MAX_K:
        raise ConfigError(
            f"K={k} can overflow the int32 sum of u8*s8 products; at most {MAX_K} is exact. "
            "Split the layer, or keep it in float."
        )
    if activation not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {activation!r}. Valid: {', '.join(ACTIVATIONS)}.")
    valid = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    if out_dtype not in valid:
        raise ConfigError(f"out_dtype={out_dtype} is not one of {', '.join(map(str, valid))}.")
    if (out_dtype is torch.uint8) != (out_inverse_scale is not None and out_zero_point is not None):
        raise ConfigError(
            "out_inverse_scale and out_zero_point are needed for out_dtype=torch.uint8 and only "
            f"then; got out_dtype={out_dtype}."
        )
    # A template reads these by pointer: another shape would be read beyond its end.
    f32, i32 = (torch.float32,), (torch.int32,)
    lead = x.shape[:-1]
    fits = (
        _has_one_element(x_scale)
        or _has_shape(x_scale, (*lead, 1))
        or _has_shape(x_scale, (math.prod(lead), 1))
    )
    _check_tensor("x_scale", x_scale, f32, fits, f"() or {(*lead, 1)}")
    _check_tensor("x_zero_point", x_zero_point, i32, _has_one_element(x_zero_point), "() or (1,)")
    _check_tensor("w_sum", w_sum, i32, _has_shape(w_sum, (n,)), f"({n},)")
    _check_tensor("w_scale", w_scale, f32, w_scale.dim() == 1, f"({n},)")
    if bias is not None:
        _check_tensor("bias", bias, FLOATS, _has_shape(bias, (n,)), f"({n},)")
    if residual is not None:
        shape = (*lead, n)
        _check_tensor("residual", residual, FLOATS, _has_shape(residual, shape), str(shape))
    if out_inverse_scale is not None and out_zero_point is not None:
        _check_quantizer(w_scale, out_inverse_scale, out_zero_point, "out_")


def _qlinear_checked(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    _check_qlinear(
        x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation,
        out_dtype, out_inverse_scale, out_zero_point,
    )  # fmt: skip
    return qlinear(
        x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation,
        out_dtype, out_inverse_scale, out_zero_point,
    )  # fmt: skip


def _no_gradient(grad: Tensor, op: str, size: list[int]) -> Tensor:
    raise BackwardThroughInt8Error(op)


for _name, _body in (
    ("quantize", quantize),
    ("quantize_per_token", quantize_per_token),
    ("pack_weight", pack_weight),
    ("unpack_weight", unpack_weight),
    ("qlinear", _qlinear_checked),
    ("no_gradient", _no_gradient),
    ("inference_scale", inference_scale),
    ("check_nan", check_nan),
):
    _lib.impl(_name, _body, "CompositeExplicitAutograd")


# ---------------------------------------------------------------- fakes: shapes and dtypes


def _fake(name: str) -> Callable[[_Fake], _Fake]:
    """Register the decorated function as what tells shape and dtype of operator ``name``."""

    def register(function: _Fake) -> _Fake:
        torch.library.register_fake(f"qinductor::{name}", function, lib=_lib)
        return function

    return register


@_fake("quantize")
def _(x: Tensor, inverse_scale: Tensor, zero_point: Tensor) -> Tensor:
    _check_quantizer(x, inverse_scale, zero_point)
    return torch.empty_like(x, dtype=torch.uint8)


@_fake("check_nan")
def _(x: Tensor, site: str) -> Tensor:
    return torch.empty_like(x)


@_fake("inference_scale")
def _(scale: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(scale)


@_fake("quantize_per_token")
def _(
    x: Tensor,
    multiplier: Tensor | None = None,
    divisor: float = 127.0,
    min_scale: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty(
        (*x.shape[:-1], 1), dtype=torch.float32
    )


@_fake("pack_weight")
def _(weight: Tensor) -> Tensor:
    return empty_packed(weight)


@_fake("unpack_weight")
def _(packed: Tensor, n: int, k: int) -> Tensor:
    return packed.new_empty((n, k))


@_fake("qlinear")
def _(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.float32,
    out_inverse_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    _check_qlinear(
        x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation,
        out_dtype, out_inverse_scale, out_zero_point,
    )  # fmt: skip
    return x.new_empty((*x.shape[:-1], w_scale.shape[0]), dtype=out_dtype)


@_fake("no_gradient")
def _(grad: Tensor, op: str, size: list[int]) -> Tensor:
    return grad.new_empty(size)


# ---------------------------------------------------------------- autograd: a clear refusal


def register_refusal(
    name: str, differentiable: tuple[int, ...], lib: torch.library.Library = _lib
) -> None:
    """Give operator ``name`` a backward that traces, and raises when it is really run.

    A backward that raised while tracing would forbid compiling a forward pass whose backward is
    never called. ``differentiable`` are the positions of float inputs a gradient may be asked of.
    """

    def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.sizes = {
            i: list(inputs[i].shape)
            for i in differentiable
            if i < len(inputs) and isinstance(inputs[i], Tensor)
        }
        ctx.count = len(inputs)
        # A materialized gradient of codes would be a constant, and the refusal that reads it would
        # be computed, and raise, in a compiled forward pass.
        ctx.set_materialize_grads(False)

    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        grad = next((g for g in grads if g is not None), None)
        if grad is None:
            return (None,) * ctx.count
        refuse = torch.ops.qinductor.no_gradient
        return tuple(
            refuse(grad, f"qinductor::{name}", ctx.sizes[i])
            if i in ctx.sizes and ctx.needs_input_grad[i]
            else None
            for i in range(ctx.count)
        )

    torch.library.register_autograd(f"qinductor::{name}", backward, setup_context=setup, lib=lib)


register_refusal("quantize", (0, 1))
register_refusal("quantize_per_token", (0, 1))
register_refusal("qlinear", (1, 4, 6, 7))
register_refusal("inference_scale", (1,))
