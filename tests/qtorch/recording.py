"""What qtorch 0.3.0 returned for a million values in each of 30 settings; run to record it anew.

    python tests/qtorch/recording.py        # where qtorch 0.3.0 is installed; writes RECORD

The inputs are a function of the setting (Philox bits), so a hash of the results is enough to
compare all of them; some results are kept to show what differs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from qinductor.numerics.random_bits import random_integers
from qinductor.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint

RECORD = Path(__file__).with_name("qtorch_0_3_0.json")
COUNT = 10**6
SHOWN = slice(0, COUNT, 8191)
"""Results that are kept as they are."""

SETTINGS = [
    *(FloatingPoint(e, m) for e, m in ((8, 7), (8, 22), (8, 1), (7, 20), (6, 9), (5, 10), (5, 2))),
    *(FloatingPoint(e, m) for e, m in ((4, 3), (3, 4), (2, 3), (2, 1), (1, 2))),
    *(FixedPoint(wl, fl) for wl, fl in ((8, 4), (8, 7), (2, 1), (16, 8), (24, 12), (12, 20))),
    *(FixedPoint(8, 4, symmetric=True), FixedPoint(8, 4, clamp=False), FixedPoint(32, 16)),
    *(BlockFloatingPoint(wl) for wl in (2, 4, 8, 16, 22)),
    *(BlockFloatingPoint(8, dim) for dim in (0, 1, 2)),
    BlockFloatingPoint(12, 0),
]


def inputs(number):
    """float32: half of any finite magnitude, half about the format's range; many ties."""
    index = SETTINGS.index(number)
    draws = [
        random_integers(COUNT, 32, torch.tensor(20), torch.tensor(index), site=site)
        for site in range(3)
    ]
    low, high = range_of(number)
    span = torch.where(draws[1] % 2 == 0, 254, high - low)
    first = torch.where(draws[1] % 2 == 0, 0, low)
    exponent = first + (draws[1] >> 8) % span
    fraction = draws[2] & 0x7FFFFF
    # A third has few bits, so that it lies on values and ties; a third lies just below those.
    shift = draws[0] & 15
    few = fraction >> (8 + shift) << (8 + shift)
    kind = draws[0] % 3
    fraction = torch.where(kind == 0, fraction, torch.where(kind == 1, few, (few - 1) & 0x7FFFFF))
    sign = (draws[0] >> 31) << 31
    bits = sign | (exponent << 23) | fraction
    x = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    x = torch.where(in_class(number, x), torch.tensor(0.75 * 2.0 ** -getattr(number, "fl", 0)), x)
    return x.view(100, 50, 200) if isinstance(number, BlockFloatingPoint) else x


def range_of(number):
    """Exponent fields about the format's values."""
    if isinstance(number, FloatingPoint):
        bias = 2 ** (number.exp - 1) - 1
        return max(0, 127 - bias - number.man - 2), min(254, 127 + bias + 4)
    if isinstance(number, FixedPoint):
        return 127 - number.fl - 3, 127 + number.wl - number.fl + 2
    return 120, 131


def in_class(number, x):
    """Whether qtorch is known to be wrong: the classes with a test of their own."""
    if isinstance(number, FloatingPoint):
        return (x.abs() >= number.max) & (number.exp == 8)
    if isinstance(number, FixedPoint):
        return x.double().abs() * 2.0**number.fl >= 2**23
    return x.abs() >= 2.0**126


def results(q):
    """int32 bits; +0 and -0 alike, since their sign is one of the classes."""
    return (q + 0.0).contiguous().view(torch.int32).flatten()


def digest(bits):
    return hashlib.sha256(bits.numpy().astype("<i4").tobytes()).hexdigest()


def theirs(x, number):
    """qtorch's nearest rounding."""
    from qtorch.quant import block_quantize, fixed_point_quantize, float_quantize

    if isinstance(number, FloatingPoint):
        return float_quantize(x, number.exp, number.man, "nearest")
    if isinstance(number, FixedPoint):
        options = (number.wl, number.fl, number.clamp, number.symmetric, "nearest")
        return fixed_point_quantize(x, *options)
    return block_quantize(x, number.wl, number.dim, "nearest")


def main():
    record = {}
    for number in SETTINGS:
        bits = results(theirs(inputs(number), number))
        record[repr(number)] = {
            "sha256": digest(bits),
            "shown": "".join(f"{b & 0xFFFFFFFF:08x}" for b in bits[SHOWN].tolist()),
        }
    RECORD.write_text(json.dumps(record, indent=0) + "\n")


if __name__ == "__main__":
    main()
