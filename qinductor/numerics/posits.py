"""Rounding to posits: the same rule in the posit's code, which counts log2|x|."""

from __future__ import annotations

import functools
from fractions import Fraction

from qinductor.errors import ConfigError

from .carrier import Carrier, Word, floor_log2
from .formats import Posit
from .rounding import (
    Lane,
    Lanes,
    Rounding,
    maximum,
    minimum,
    normalised,
    stochastic_addend,
    where,
)

POSIT_MODES = (Rounding.TIES_TO_EVEN, Rounding.TOWARD_ZERO, Rounding.STOCHASTIC)


def check_posit_mode(mode: Rounding) -> None:
    """Raise ConfigError for modes that posits do not define."""
    if mode not in POSIT_MODES:
        raise ConfigError(
            f"a Posit rounds with {', '.join(m.name for m in POSIT_MODES)}, not {mode.name}."
        )


@functools.cache
def posit_range(fmt: Posit, carrier: Carrier) -> tuple[int, int]:
    """Bits of the smallest and the largest positive posit that the carrier holds."""
    word = carrier.word
    smallest = max(fmt.exact_step, Fraction(2) ** carrier.qmin)
    largest = fmt.exact_max
    if largest > carrier.max:
        # Walk down the posit's codes; at most the carrier's binades, since they are coarse there.
        low, high = 1, (1 << (fmt.n - 1)) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if fmt.magnitude(middle) <= carrier.max:
                low = middle
            else:
                high = middle - 1
        largest = fmt.magnitude(low)
        while not _holds(carrier, largest):
            low -= 1
            largest = fmt.magnitude(low)
    while not _in_posit(fmt, smallest):
        smallest *= 2
    return word.pattern(smallest), word.pattern(largest)


def _holds(carrier: Carrier, x: Fraction) -> bool:
    step = Fraction(2) ** max(floor_log2(x) - carrier.man, carrier.qmin)
    return x % step == 0


def _in_posit(fmt: Posit, power: Fraction) -> bool:
    """Whether a power of two is a posit: its exponent bits that are cut off must be zero."""
    e = floor_log2(power)
    k = e >> fmt.es
    kept = fmt.n - 1 - (k + 2 if k >= 0 else 1 - k)
    return e % (1 << max(fmt.es - max(kept, 0), 0)) == 0


def posit_bits(
    m: Lanes, bits: Lane, fmt: Posit, carrier: Carrier, mode: Rounding, u: Lane = None
) -> Lane:
    """The quantized bits; arguments as :func:`qinductor.numerics.rounding.quantize_bits`."""
    word = carrier.word
    smallest, largest = posit_range(fmt, carrier)
    offset = word.bias << word.man
    a = bits & word.magnitude
    # b counts log2|x| in units of 2^-man: regime k, es exponent bits, fraction.
    b = normalised(m, m.minimum(a, word.inf - 1), word) - offset
    payload = word.man + fmt.es
    k = b >> payload
    regime = m.where(k >= 0, k + 2, 1 - k)
    kept = maximum(m, minimum(m, (fmt.n - 1) - regime, payload), 0)
    own = payload - kept
    carried = (carrier.qmin + word.man) - (b >> word.man)
    d = minimum(m, maximum(m, maximum(m, own, carried), word.man - carrier.man), payload)
    mask = ((d * 0 + 1) << d) - 1
    # The bit above the discarded ones; where no bit is kept, the regime's last: 0 1 0 for k >= 0.
    odd = m.where(d == payload, m.where(k >= 0, 0, 1), (b >> d) & 1)
    match mode:
        case Rounding.TIES_TO_EVEN:
            r = b + (mask >> 1) + (odd & mask)
        case Rounding.STOCHASTIC:
            r = b + stochastic_addend(d, word, u)
        case _:
            r = b
    r = (r & ~mask) + offset
    low = normalised_int(smallest, word)
    r = m.maximum(m.minimum(r, largest), low)
    right = minimum(m, maximum(m, 1 - (r >> word.man), 0), word.man + 1)
    subnormal = ((r & (word.implicit - 1)) | word.implicit) >> right
    r = where(m, r >= word.implicit, r, subnormal)
    r = m.where(a == 0, 0, r | (bits & word.sign))
    return m.where(a > word.inf, bits, m.where(a == word.inf, word.nan, r))


def normalised_int(bits: int, word: Word) -> int:
    """:func:`normalised` of constant bits."""
    if bits >= word.implicit:
        return bits
    e = bits.bit_length() - 1
    fraction = (bits << (word.man - e)) & (word.implicit - 1)
    return ((e + word.qmin + word.bias) << word.man) + fraction
