"""Low-precision training, simulated: a spec, and two ways to run it."""

from __future__ import annotations

from typing import Any

from .accumulator import Accumulator
from .eager import Handle, simulate
from .handle import Simulation, Site
from .observing import Observation, observe
from .operations import OPERATIONS, Role
from .presets import PRESETS
from .spec import Precision, Rule, SimulationSpec

__all__ = [
    "OPERATIONS",
    "PRESETS",
    "Accumulator",
    "Handle",
    "Observation",
    "Precision",
    "Role",
    "Rule",
    "Simulation",
    "SimulationSpec",
    "Site",
    "observe",
    "simulate",
    "simulation_of",
]


def simulation_of(compiled: Any) -> Simulation:
    """The simulation that a compiled model runs with; see :mod:`qinductor.simulation.graph`."""
    from .graph import simulation_of

    return simulation_of(compiled)
