"""The passes as one Inductor custom pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..capability import Capability
from ..config import QSimConfig
from ..digest import cache_key
from . import ON_REQUEST, PASSES
from .base import Entry, PassLog


class QSimPasses(CustomGraphPass):
    """Runs :data:`PASSES` in order and hands what they did to ``report``.

    Inductor skips it when it finds the compiled graph in its cache; ``report`` is not called then.
    """

    def __init__(
        self,
        config: QSimConfig,
        capability: Capability,
        report: Callable[[list[Entry]], None],
    ) -> None:
        self.config = config
        self.capability = capability
        self.report = report

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place."""
        log = PassLog()
        for rule in PASSES:
            if rule.name in ON_REQUEST:
                wanted = bool(getattr(self.config, rule.name))
            else:
                wanted = not (rule.optional and rule.name in self.config.disable)
            if wanted:
                rule.run(graph, self.capability, log)
        graph.eliminate_dead_code()
        graph.lint()
        self.report(log.entries)

    def uuid(self) -> str:
        """Digest of all sources, the options and the machine."""
        return cache_key(self.config, self.capability)
