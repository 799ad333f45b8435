"""The backend: ``torch.compile(model, backend="qsim")``."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from .capability import Capability, cpp_compiler
from .compat import check_torch_version
from .config import QSimConfig, mode_options
from .digest import cache_key
from .errors import CompilerMissingError, ConfigError
from .report import RECORDS, GraphRecord, Reporter, read_entries, store_entries

Compiled = Callable[..., Any]


def qsim(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one Dynamo graph with Inductor and this package's passes and templates.

    Args:
        gm: the graph.
        example_inputs: its inputs, parameters and buffers included.
        mode: one of Inductor's modes (``torch._inductor.list_mode_options()``).
        options: fields of :class:`qinductor.QSimConfig`.

    Returns:
        A callable with the graph's signature.

    Raises:
        ConfigError: an unknown mode or option (the message lists the valid ones), or an Inductor
            option that this backend sets itself.
        CapabilityError: ``options["isa"]`` is a set that the machine lacks.
        CompilerMissingError: there is no C++ compiler.
    """
    config = QSimConfig.from_options(options)
    capability = Capability.detect(config.isa)
    patches = {**mode_options(mode), **config.inductor}
    record = GraphRecord(inputs=[], isa=capability.isa.value, graph_break=_break_reason(gm))
    record.called_with(example_inputs)
    more_inputs: Callable[[], tuple[torch.Tensor, ...]] = tuple
    if config.simulate is not None:
        from .simulation.graph import simulate_graph

        simulated = simulate_graph(gm, config.simulate, complete=record.graph_break is None)
        gm, more_inputs = simulated.module, simulated.more_inputs
        example_inputs = (*example_inputs, *simulated.example_inputs())
        record.simulation, record.simulated = simulated.simulation, simulated.entries
    stored_at = _entries_path(gm, example_inputs, patches, cache_key(config, capability))

    def compile_with(**more: Any) -> Compiled:
        from torch._inductor.compile_fx import compile_fx

        ours = _patches(config, capability, record.add, on_gpu=_all_on_gpu(example_inputs))
        compiled = compile_fx(gm, list(example_inputs), config_patches={**patches, **ours, **more})
        return cast(Compiled, compiled)

    compiled = compile_with()
    if record.passes_ran:
        store_entries(stored_at, record.entries)
    else:
        # Inductor had the graph in its cache, so the passes did not run and could not report.
        entries = read_entries(stored_at)
        if entries is None:
            compiled = compile_with(force_disable_caches=True)
            store_entries(stored_at, record.entries)
        else:
            record.from_cache = True
            record.entries = entries

    # Only now: Dynamo may abandon a compilation with an exception, and start again.
    RECORDS.open(record)

    def run(*args: Any) -> Any:
        record.count_call(args)
        return compiled(*args, *more_inputs())

    return run


def inductor_options(**options: Any) -> dict[str, Any]:
    """Options that make stock Inductor run this package's passes: a plugin instead of a backend.

    ``torch.compile(model, options=qinductor.inductor_options())``. The arguments are the fields of
    :class:`qinductor.QSimConfig`. The report of a model compiled so counts no calls, and is empty
    where Inductor found the graph in its cache, since the passes do not run then. On a GPU the
    epilogue of an int8 linear is a kernel of its own then: only the backend sees that no tensor
    lies on the CPU, whose templates forbid what fuses it.

    Raises:
        ConfigError: an option is not valid; ``simulate`` needs the backend.
    """
    config = QSimConfig.from_options(options)
    if config.simulate is not None:
        raise ConfigError(
            "inductor_options(simulate=...) cannot work: stock Inductor's passes run after the "
            "backward graph was made. Use torch.compile(model, backend='qsim', options={...})."
        )
    capability = Capability.detect(config.isa)
    return {**config.inductor, **_patches(config, capability, _plugin_reporter(capability))}


def _all_on_gpu(inputs: Sequence[Any]) -> bool:
    """True if every tensor lies on a CUDA device; single numbers may lie elsewhere."""
    devices = {t.device.type for t in inputs if isinstance(t, torch.Tensor) and t.dim() > 0}
    return devices == {"cuda"}


def _patches(
    config: QSimConfig, capability: Capability, report: Reporter, *, on_gpu: bool = False
) -> dict[str, Any]:
    """Inductor options that install the passes and lowerings."""
    check_torch_version()
    if cpp_compiler() is None:
        raise CompilerMissingError(
            "no C++ compiler was found (looked for $CXX, g++ and clang++), and Inductor needs one. "
            "Install one (Debian, Ubuntu: apt install g++), or set CXX to its path."
        )
    from .passes.manager import QSimPasses
    from .templates import attention_lowering as _attention_lowering  # noqa: F401 - registers it
    from .templates import fused_lowering as _fused_lowering  # noqa: F401 - registers lowerings
    from .templates import lowering as _lowering  # noqa: F401 - registers the lowerings

    ours = {
        "post_grad_custom_pre_pass": QSimPasses(config, capability, report),
        # CPU templates write their whole epilogue themselves; the passes decide what is in it.
        # Triton templates leave it to Inductor.
        "epilogue_fusion": on_gpu,
    }
    for name in ours:
        if name in config.inductor:
            raise ConfigError(
                f"options['inductor'] sets {name!r}, which this backend sets itself, for its "
                "passes and the kernels they choose. Leave it out: a pass of your own can be "
                "'post_grad_custom_post_pass', and options['disable'] switches ours off."
            )
    return ours


def _plugin_reporter(capability: Capability) -> Reporter:
    """Open a record for each graph that stock Inductor hands to the passes."""

    def report(entries: list[Any]) -> None:
        context = torch._guards.TracingContext.try_get()
        # Keyed by every real tensor that Dynamo traced, parameters and buffers among them.
        tensors = context.tensor_to_context.keys() if context is not None else ()
        record = GraphRecord(
            inputs=[weakref.ref(t) for t in tensors],
            isa=capability.isa.value,
            counts_calls=False,
        )
        record.add(entries)
        RECORDS.open(record)

    return report


def _break_reason(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph before the function's end; None where it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    where = ""
    if stack := getattr(reason, "user_stack", None):
        frame = stack[-1]
        where = f" ({Path(frame.filename).name}:{frame.lineno})"
    return str(reason.reason).strip().splitlines()[0] + where


def _entries_path(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], our_key: str
) -> Path:
    """Where the entries of this compilation are kept, beside Inductor's caches.

    All that makes Inductor compile anew is in the name: one graph has other entries with
    gradients, under autocast, or with other options (``patches``).
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    described = [_description(t) if isinstance(t, torch.Tensor) else str(t) for t in inputs]
    state = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(
            (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
            for device in sorted({t.device.type for t in tensors})
            if torch.amp.is_autocast_available(device)
        ),
        # A pass of the user's says by uuid() what it does, as it does to Inductor.
        *((name, _uuid(value)) for name, value in sorted(patches.items())),
    ]
    text = "\0".join((gm.code, str(described), str(state), torch.__version__, our_key))
    key = hashlib.sha256(text.encode()).hexdigest()
    return Path(cache_dir()) / "qinductor" / f"{key}.json"


def _description(t: torch.Tensor) -> tuple[str, ...]:
    """All that a graph may depend on but the values. As text: sizes may be symbols."""
    facts = (tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad)
    return tuple(map(str, facts))


def _uuid(value: Any) -> Any:
    return value.uuid() if callable(getattr(value, "uuid", None)) else value
