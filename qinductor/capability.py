"""What the machine can do: instruction sets, cache sizes, threads, GPU, compiler.

The only module that asks ``torch.cpu`` or ``torch.cuda`` such questions. Templates state what they
require as an :class:`Isa`; they never look at the machine themselves.
"""

from __future__ import annotations

import enum
import functools
import os
import platform
import shutil
from dataclasses import dataclass

import torch

from .errors import CapabilityError, ConfigError


class Isa(enum.Enum):
    """An instruction set that CPU templates are written for, from least to most capable."""

    PORTABLE = "portable"
    AVX2 = "avx2"
    AVX512_VNNI = "avx512_vnni"

    @property
    def rank(self) -> int:
        """Position in the order of preference; a higher rank is preferred."""
        return list(Isa).index(self)

    @property
    def cpu_flags(self) -> tuple[str, ...]:
        """Keys of ``torch.cpu.get_capabilities()`` that all have to be true."""
        return _CPU_FLAGS[self]

    @classmethod
    def parse(cls, name: str | Isa) -> Isa:
        """Return the member called ``name``.

        Raises:
            ConfigError: ``name`` is not the value of a member; the message lists those that are.
        """
        if isinstance(name, Isa):
            return name
        try:
            return cls(name)
        except ValueError:
            valid = ", ".join(isa.value for isa in cls)
            raise ConfigError(f"unknown instruction set {name!r}. Valid: {valid}.") from None


_CPU_FLAGS: dict[Isa, tuple[str, ...]] = {
    Isa.PORTABLE: (),
    Isa.AVX2: ("avx2", "fma3"),
    Isa.AVX512_VNNI: ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni"),
}


# Shared memory that one block may ask for, by compute capability: CUDA C++ Programming Guide 13,
# table "Technical Specifications per Compute Capability". Others: what every GPU has.
_SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
}


@dataclass(frozen=True)
class Gpu:
    """A CUDA device, as far as code for it depends on it.

    Attributes:
        sm: compute capability, (major, minor).
        name: what the driver calls it.
        processors: streaming multiprocessors.
    """

    sm: tuple[int, int]
    name: str = "unnamed"
    processors: int = 108

    @property
    def target(self) -> str:
        """The architecture as compilers spell it: sm_90."""
        return f"sm_{self.sm[0]}{self.sm[1]}"

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may ask for."""
        return _SHARED_BYTES.get(self.sm, 48 << 10)

    def reason_against(self, operands: str) -> str | None:
        """Why tensor cores cannot multiply ``operands`` (``s8`` or ``fp8``) here; None if they can.

        The bounds are those of Triton's code generator, which wants more than the hardware does:
        int8 tensor cores are used from sm_80, fp8 ones exist from sm_89.
        """
        least = _LEAST_SM[operands]
        if self.sm >= least:
            return None
        return f"{operands} products need sm_{least[0]}{least[1]}, this GPU is {self.target}"


_LEAST_SM: dict[str, tuple[int, int]] = {"s8": (8, 0), "fp8": (8, 9)}


@dataclass(frozen=True)
class Capability:
    """What code may be generated for. Sizes in bytes.

    Attributes:
        isas: the usable instruction sets, best first; PORTABLE is always among them.
        cpu_name: the processor's name as the system gives it.
        l1d, l2: data cache sizes of one core.
        l3: size of one last-level cache, 0 where unknown.
        cores: logical processors this process may run on.
        avx512_bf16: bf16 dot products are available.
        amx_int8: the CPU has AMX tiles for int8.
        gpu: the current CUDA device, None without one.
    """

    isas: tuple[Isa, ...]
    cpu_name: str
    l1d: int
    l2: int
    l3: int
    cores: int
    avx512_bf16: bool
    amx_int8: bool
    gpu: Gpu | None = None

    @property
    def isa(self) -> Isa:
        """The best usable instruction set."""
        return self.isas[0]

    def capped(self, cap: Isa | None) -> Capability:
        """Return this capability without the sets that rank above ``cap``.

        Raises:
            CapabilityError: the machine lacks ``cap`` itself.
        """
        if cap is None:
            return self
        if cap not in self.isas:
            has = ", ".join(isa.value for isa in self.isas)
            raise CapabilityError(
                f"isa={cap.value!r} was asked for, but this machine ({self.cpu_name}) has only: "
                f"{has}. Choose one of these, or leave the option out."
            )
        kept = tuple(isa for isa in self.isas if isa.rank <= cap.rank)
        return Capability(**{**self.__dict__, "isas": kept})

    @classmethod
    def detect(cls, cap: Isa | None = None) -> Capability:
        """Read the machine's facts (once) and cap them."""
        return _detect().capped(cap)

    def cache_key(self) -> str:
        """Text that changes whenever generated code would have to."""
        return repr(self)


def _l3_bytes() -> int:
    """Size of the last-level cache from Linux' sysfs; 0 where it does not tell."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return 0
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


@functools.cache
def _detect() -> Capability:
    facts = torch.cpu.get_capabilities()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    usable = [
        isa
        for isa in Isa
        if isa is Isa.PORTABLE or (x86 and all(facts.get(flag, False) for flag in isa.cpu_flags))
    ]
    affinity = getattr(os, "sched_getaffinity", None)
    return Capability(
        isas=tuple(sorted(usable, key=lambda isa: isa.rank, reverse=True)),
        cpu_name=str(facts.get("cpu_name", platform.processor() or "unknown")),
        l1d=int(facts.get("l1d_cache_size", 0)) or 32 << 10,
        l2=int(facts.get("l2_cache_size", 0)) or 512 << 10,
        l3=_l3_bytes(),
        cores=len(affinity(0)) if affinity else (os.cpu_count() or 1),
        avx512_bf16=bool(facts.get("avx512_bf16", False)),
        amx_int8=bool(facts.get("amx_int8", False)),
        gpu=_detect_gpu(),
    )


def _detect_gpu() -> Gpu | None:
    # ROCm answers to torch.cuda too, but has none of the instructions named here.
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu((facts.major, facts.minor), facts.name, facts.multi_processor_count)


def cpp_compiler() -> str | None:
    """Path of the C++ compiler that Inductor would call, or None where there is none."""
    named = os.environ.get("CXX")
    for candidate in (named, "g++", "clang++"):
        if candidate and (found := shutil.which(candidate)):
            return found
    return None
