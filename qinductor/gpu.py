"""Models on CUDA devices: the memory layout of int8 weights.

A packed weight has one shape and one meaning everywhere. What differs is the order of its bytes:
vector instructions of CPUs read panels, tensor cores read rows. ``model.to("cuda")`` keeps strides,
so a model that was converted on a CPU arrives in panels; :func:`lay_out` puts it right, once.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from .ops import K_GROUP, PANEL

_Model = TypeVar("_Model", bound=nn.Module)


def lay_out(model: _Model) -> _Model:
    """Lay all packed weights of ``model`` out as their device reads them; return the model.

    On CUDA in rows, on a CPU in panels. Values, shapes and the saved form stay as they are. Call it
    after ``model.to(...)`` and before compiling; weights that lie right are not touched.
    """
    from .smoothquant import QuantizedLinear

    done: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            packed = module.packed
            if id(packed) not in done:
                done[id(packed)] = in_layout_of(packed.device, packed)
            module._buffers["packed"] = done[id(packed)]
    return model


def in_layout_of(device: torch.device, packed: Tensor) -> Tensor:
    """``packed`` itself, or a copy of it with the strides that ``device`` reads."""
    if device.type != "cuda":
        return packed.contiguous()
    return rows_of(packed).view(packed.shape[0], PANEL, -1, K_GROUP).permute(0, 2, 1, 3)


def rows_of(packed: Tensor) -> Tensor:
    """The padded weight, int8 (64 * panels, 4 * groups): a view if the layout is that of CUDA."""
    panels, groups, _, _ = packed.shape
    return packed.permute(0, 2, 1, 3).reshape(panels * PANEL, groups * K_GROUP)
