"""quantize() as an operator and as a function: laws, transforms, code words, bad input."""

from __future__ import annotations

import grid_oracle as go
import pytest
import torch

from qinductor.numerics import (
    E4M3,
    E8M0,
    FP16,
    MX,
    NAMED,
    BlockFloatingPoint,
    FixedPoint,
    FloatingPoint,
    Integer,
    Nans,
    Overflow,
    Posit,
    Rounding,
    Table,
    parse_format,
    quantize,
)
from qinductor.numerics.codes import decode, encode
from qinductor.numerics.format_base import ElementFormat
from qinductor.numerics.op import fake_quantize

SR = Rounding.STOCHASTIC
MIRROR = {Rounding.UPWARD: Rounding.DOWNWARD, Rounding.DOWNWARD: Rounding.UPWARD}
ELEMENTS = {
    **{n: f for n, f in NAMED.items() if isinstance(f, ElementFormat)},
    **go.ELEMENT_FORMATS,
    "table": Table((-8.0, -1.0, 0.0, 0.3, 2.5, 8.0)),
}


def modes_of(fmt):
    if isinstance(fmt, Posit):
        return (Rounding.TIES_TO_EVEN, Rounding.TOWARD_ZERO, SR)
    return tuple(Rounding)


@pytest.mark.parametrize("name", ELEMENTS)
def test_laws(name):
    fmt = ELEMENTS[name]
    x = torch.cat([go.near_range(fmt, 20_000, 3), torch.randn(2000)]).sort().values
    nearest = quantize(x, fmt, Rounding.TIES_TO_EVEN)
    inside = (x >= fmt.min) & (x <= fmt.max)
    down = quantize(x, fmt, Rounding.TOWARD_ZERO)
    for mode in modes_of(fmt):
        q = quantize(x, fmt, mode, seed=1)
        again = quantize(q, fmt, mode, seed=2)
        assert not len(go.same(again, q.double().numpy())), "idempotent"
        if mode is not SR and not (isinstance(fmt, FixedPoint) and fmt.overflow is Overflow.WRAP):
            finite = q[~q.isnan()]
            assert (finite[1:] >= finite[:-1]).all(), "monotone"
        symmetric = -fmt.exact_min == fmt.exact_max and not isinstance(fmt, Table)
        if symmetric and mode is not SR:
            mirrored = quantize(-x, fmt, MIRROR.get(mode, mode))
            assert torch.equal(torch.nan_to_num(-q), torch.nan_to_num(mirrored)), "odd"
        if not isinstance(fmt, Posit | Table):
            error = (q.double() - x.double()).abs()[inside]
            best = (nearest.double() - x.double()).abs()[inside]
            if mode in (Rounding.TIES_TO_EVEN, Rounding.TIES_TO_AWAY):
                assert (error == best).all()
            away = quantize(x, fmt, Rounding.UPWARD), quantize(x, fmt, Rounding.DOWNWARD)
            step = (away[0].double() - away[1].double()).abs()[inside]
            known = torch.isfinite(step) & torch.isfinite(error)
            assert (error <= step)[known].all()
            assert (best * 2 <= step)[known].all()
    assert (down.abs() <= x.abs())[inside].all() or isinstance(fmt, Posit | Table)


@pytest.mark.parametrize("name", NAMED)
def test_layouts(name):
    base = torch.randn(4, 6, 8, 32)
    want = quantize(base, name)
    for x in (
        base.to(memory_format=torch.channels_last),
        base.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([base, base], -1)[..., 0],
    ):
        got = quantize(x, name)
        assert torch.equal(got, want)
        assert got.stride() == torch.empty_like(x).stride()
    flat = base[0, 0, 0].expand(3, 32)
    assert torch.equal(quantize(flat, name)[1], quantize(flat.contiguous(), name)[1])
    assert quantize(torch.tensor(0.3), name).shape == ()
    assert quantize(torch.empty(0, 32), name).shape == (0, 32)
    out = torch.empty_like(base).transpose(0, 1).contiguous().transpose(0, 1)
    assert quantize(base, name, out=out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["E4M3", "MXFP4", "INT8", "NVFP4_E2M1", "POSIT8"])
@pytest.mark.parametrize("mask", [False, True])
def test_opcheck(name, mask):
    zero = torch.tensor(0)
    mode = "TIES_TO_EVEN" if name == "POSIT8" else "STOCHASTIC"
    x = torch.randn(3, 32, requires_grad=True)
    args = (x, zero, zero, NAMED[name].key, mode, 0, 32, 0, mask, 1)
    torch.library.opcheck(fake_quantize, args)


def test_gradients():
    x = torch.tensor([-500.0, -448.0, 0.3, 448.0, 449.0, float("nan")], requires_grad=True)
    quantize(x, E4M3).sum().backward()
    assert x.grad.tolist() == [1] * 6
    x.grad = None
    quantize(x, E4M3, backward="mask").sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0, 1]
    y = torch.tensor([1.0, 1.99], requires_grad=True)
    quantize(y, BlockFloatingPoint(4), backward="mask").sum().backward()
    assert y.grad.tolist() == [1, 0]
    z = torch.tensor([1.0, 3.0, -3.0], requires_grad=True)
    quantize(z, Integer(8, scale=1 / 64), backward="mask").sum().backward()
    assert z.grad.tolist() == [1, 0, 0]


def test_vmap_is_one_call_for_each_slice():
    x = torch.randn(5, 3, 32)
    for fmt, mode in (("E4M3", Rounding.UPWARD), ("E4M3", SR), ("MXFP4", Rounding.UPWARD)):
        got = torch.vmap(lambda t, f=fmt, m=mode: quantize(t, f, m, seed=1), in_dims=1)(x)
        want = torch.stack([quantize(t.contiguous(), fmt, mode, seed=1) for t in x.unbind(1)])
        assert torch.equal(got, want)


def test_export_and_fullgraph():
    class M(torch.nn.Module):
        def forward(self, x, step):
            return quantize(x * 2, "E4M3", SR, seed=1, step=step) + quantize(x, MX(E4M3))

    x, step = torch.randn(4, 64), torch.tensor(3)
    want = M()(x, step)
    assert torch.equal(torch.export.export(M(), (x, step)).module()(x, step), want)
    compiled = torch.compile(M(), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, step), want)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for k in range(4, 8):
            step = torch.tensor(k)
            assert torch.equal(compiled(x, step), M()(x, step))


def test_stats():
    x = torch.tensor([1e9, float("nan"), float("inf"), 1e-9, 0.0, 1.0])
    q, s = quantize(x, "E4M3", stats=True)
    assert (s.elements, s.saturated, s.underflowed, s.nan, s.inf) == (6, 1, 1, 1, 1)
    assert quantize(torch.ones(3), "E4M3", stats=True)[1].sqnr_db == float("inf")
    assert q[0] == 448
    y = torch.randn(1000)
    q, s = quantize(y, "E4M3", stats=True)
    noise = (y - q).double().square().sum()
    want = 10 * torch.log10(y.double().square().sum() / noise).item()
    assert s.sqnr_db == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", [n for n, f in NAMED.items() if f.bits <= 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_codes_come_back(name, dtype):
    x = torch.cat([torch.randn(5, 67), torch.tensor([[0.0, -0.0, 1e-20]]).expand(5, 3)], 1).to(
        dtype
    )
    for mode in (Rounding.TIES_TO_EVEN, SR):
        q = quantize(x, name, mode, seed=1)
        e = encode(x, name, mode, seed=1)
        back = decode(e, name, dtype)
        assert torch.equal(back, q) and torch.equal(torch.signbit(back), torch.signbit(q))
        packed = NAMED[name].bits == 4
        assert e.codes.dtype == (torch.uint8 if NAMED[name].bits <= 8 else torch.uint16)
        assert e.codes.shape == ((5, 35) if packed else (5, 70))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2),
     ("E4M3FNUZ", torch.float8_e4m3fnuz), ("E5M2FNUZ", torch.float8_e5m2fnuz)],
)  # fmt: skip
def test_codes_are_torchs(name, dtype):
    x = quantize(torch.randn(500) * 10, name)
    assert torch.equal(encode(x, name).codes, x.to(dtype).view(torch.uint8))


def test_nan_codes():
    nan = torch.tensor([float("nan"), 1.0])
    assert encode(nan, "E4M3").codes[0] == 0x7F
    assert encode(nan, "POSIT8").codes[0] == 0x80
    for name in ("E2M1", "INT8", "MXFP4", "NVFP4_E2M1"):
        with pytest.raises(ValueError, match="NaN"):
            encode(nan, name)
    assert decode(encode(nan, "MXFP4", nan_scale=True), "MXFP4").isnan().all()


@pytest.mark.parametrize("fmt", [*NAMED.values(), *go.ELEMENT_FORMATS.values(),
                                 BlockFloatingPoint(5, axis=-1, block=3)])  # fmt: skip
def test_repr_is_read_back(fmt):
    assert parse_format(repr(fmt)) == fmt
    assert str(fmt)
    if isinstance(fmt, ElementFormat):
        assert fmt.min < fmt.max and fmt.step > 0
        if fmt.bits <= 16:
            values = fmt.values
            assert list(values) == sorted(set(values))
            assert values[-1] == fmt.max and values[0] == fmt.min
            assert len(values) <= 2**fmt.bits


def test_the_definitions_table():
    got = {n: (f.bias, f.max, f.min_normal, f.step) for n, f in NAMED.items()
           if isinstance(f, FloatingPoint)}  # fmt: skip
    assert got["E4M3"] == (7, 448, 2**-6, 2**-9)
    assert got["E5M2"] == (15, 57344, 2**-14, 2**-16)
    assert got["E4M3FNUZ"] == (8, 240, 2**-7, 2**-10)
    assert got["E5M2FNUZ"] == (16, 57344, 2**-15, 2**-17)
    assert got["E3M4"] == (3, 15.5, 2**-2, 2**-6)
    assert got["E3M2"] == (3, 28, 2**-2, 2**-4)
    assert got["E2M3"] == (1, 7.5, 1, 2**-3)
    assert got["E2M1"] == (1, 6, 1, 2**-1)
    assert got["FP16"] == (15, 65504, 2**-14, 2**-24)
    assert FloatingPoint(4, 3).max == 240
    assert FloatingPoint(4, 3, nans=Nans.NONE).max == 480


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FixedPoint(1, 0), "wl=1"),
        (lambda: FixedPoint(0, 0, signed=False), "wl=0"),
        (lambda: FloatingPoint(0, 3), "exp=0"),
        (lambda: FloatingPoint(12, 3), "exp=12"),
        (lambda: FloatingPoint(1, 0), "no finite"),
        (lambda: BlockFloatingPoint(1), "wl=1"),
        (lambda: BlockFloatingPoint(8, axis=1), "give both"),
        (lambda: Posit(8, 7), "es=7"),
        (lambda: Table((1.0, 0.0)), "ascending"),
        (lambda: Table((0.0, float("nan"))), "finite"),
        (lambda: FixedPoint(8, 0, symmetric=True, overflow=Overflow.WRAP), "WRAP"),
        (lambda: MX(NAMED["DLFLOAT16"]), "subnormals"),
        (lambda: E4M3.replace(mantissa=2), "mantissa.*man"),
        (lambda: parse_format("E9M9"), "E4M3"),
        (lambda: quantize(torch.ones(2, dtype=torch.int32), E4M3), "torch.int32"),
        (lambda: quantize(torch.ones(2, dtype=torch.complex64), E4M3), "torch.complex64"),
        (lambda: quantize(torch.ones(2), E8M0), "E8M0"),
        (lambda: quantize(torch.ones(2), "E8M0"), "E4M3"),
        (lambda: quantize(torch.ones(2), MX(E4M3, axis=1)), "valid: -1 to 0"),
        (lambda: quantize(torch.ones(2), BlockFloatingPoint(8, dim=-3)), "valid: -1 to 0"),
        (lambda: quantize(torch.ones(2), E4M3, "nearest"), "TIES_TO_EVEN"),
        (lambda: quantize(torch.ones(2), Posit(8), Rounding.UPWARD), "TIES_TO_EVEN"),
        (lambda: quantize(torch.ones(2), E4M3, SR, random_bits=33), "1 to 32"),
        (lambda: quantize(torch.ones(2), E4M3, SR, seed=torch.ones(2)), "0-d int64"),
        (lambda: quantize(torch.ones(2), E4M3, backward="clip"), "mask"),
        (lambda: quantize(torch.ones(2), E4M3, out=torch.ones(3)), "out must be"),
        (lambda: quantize(torch.ones(2, dtype=torch.float16), FloatingPoint(2, 1, bias=-40)),
         "wider dtype"),
        (lambda: encode(torch.ones(2), "TF32"), "16"),
        (lambda: FloatingPoint(5, 30).values, "16 bits"),
    ],
)  # fmt: skip
def test_bad_input(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_formats_wider_than_the_carrier():
    x = go.all_16_bit(torch.float16)
    same = quantize(x, FloatingPoint(8, 23))
    assert torch.equal(torch.nan_to_num(same), torch.nan_to_num(x))
    assert torch.equal(quantize(x, FP16).nan_to_num(), x.nan_to_num())
