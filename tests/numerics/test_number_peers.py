"""Other people's implementations, where they implement the mode and the overflow rule."""

from __future__ import annotations

import grid_oracle as go
import numpy as np
import pytest
import torch

from qinductor.numerics import NAMED, Rounding, quantize

GFLOAT = {
    "E4M3": "format_info_ocp_e4m3",
    "E5M2": "format_info_ocp_e5m2",
    "E3M2": "format_info_ocp_e3m2",
    "E2M3": "format_info_ocp_e2m3",
    "E2M1": "format_info_ocp_e2m1",
    "FP16": "format_info_binary16",
    "BF16": "format_info_bfloat16",
}
GFLOAT_MODES = {
    Rounding.TIES_TO_EVEN: "TiesToEven",
    Rounding.TIES_TO_AWAY: "TiesToAway",
    Rounding.TOWARD_ZERO: "TowardZero",
    Rounding.UPWARD: "TowardPositive",
    Rounding.DOWNWARD: "TowardNegative",
}
ML_DTYPES = {
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
    "E4M3FNUZ": "float8_e4m3fnuz",
    "E5M2FNUZ": "float8_e5m2fnuz",
    "E3M4": "float8_e3m4",
    "E3M2": "float6_e3m2fn",
    "E2M3": "float6_e2m3fn",
    "E2M1": "float4_e2m1fn",
    "BF16": "bfloat16",
}
TORCH = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E4M3FNUZ": torch.float8_e4m3fnuz,
    "E5M2FNUZ": torch.float8_e5m2fnuz,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
}


def inputs(fmt):
    return torch.cat(
        [
            go.all_16_bit(torch.bfloat16).float(),
            go.all_16_bit(torch.float16).float(),
            go.boundaries(fmt),
            go.random_patterns(2**15, 4),
        ]
    )


@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat(name):
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    info = getattr(formats, GFLOAT[name])
    fmt = NAMED[name]
    x = inputs(fmt)
    has_nan = info.num_nans > 0
    if not has_nan:
        x = x[~x.isnan()]
    wide = x.double().numpy()
    for mode, theirs in GFLOAT_MODES.items():
        for saturate in (True, False) if has_nan else (True,):
            want = gfloat.round_ndarray(info, wide, gfloat.RoundMode[theirs], saturate)
            got = quantize(x, fmt.replace(saturate=saturate), mode)
            assert not len(go.same(got, want)), (mode, saturate)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, ML_DTYPES[name])
    small = name in ("E3M2", "E2M3", "E2M1")
    fmt = NAMED[name].replace(saturate=small)
    x = inputs(fmt)
    if small:  # Theirs have no NaN to give.
        x = x[~x.isnan()]
    with np.errstate(invalid="ignore"):  # NaN payloads
        want = x.numpy().astype(dtype).astype(np.float64)
    got = quantize(x, fmt)
    assert not len(go.same(got, want))


@pytest.mark.parametrize("name", TORCH)
def test_torch_dtypes(name):
    # Which overflow rule a cast has depends on the dtype, and for float8_e4m3fn on torch's version.
    saturates = bool(torch.tensor(1e9).to(TORCH[name]).float().isfinite())
    fmt = NAMED[name].replace(saturate=saturates and name not in ("FP16", "BF16"))
    x = inputs(fmt)
    want = x.to(TORCH[name]).double().numpy()
    assert not len(go.same(quantize(x, fmt), want))
