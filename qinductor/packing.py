"""Packed forms of int8 weights that somebody else's conversion left unpacked in a graph's inputs.

A model converted by :func:`qinductor.convert` holds packed weights. One that torchao or PT2E
converted holds plain (N, K) weights, and a compiled graph must not bake those in: Dynamo runs one
graph for every module of a class. ``qinductor::packed_of`` packs at run time, once a weight, and
finds the packed form again in every later call. It is one call a graph, not one a linear: measured
with everything packed, 3 µs a call and 1.25 µs for each weight in its list (92 µs for the 72 of
BERT-base). Packing itself takes 3.6 ms for a 3072 x 768 weight.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .errors import ConfigError
from .ops import empty_packed, pack_weight

T = TypeVar("T")
_Key = tuple[int, int, torch.Size, tuple[int, ...]]


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """What was computed, and the state of the tensor it was computed from."""

    storage: weakref.ref[torch.UntypedStorage]
    data_ptr: int
    version: int
    result: T


class StorageCache(Generic[T]):
    """Remembers ``compute(tensor)`` while the tensor's storage lives and is not written to.

    A tensor is recognized by its storage, offset, shape and strides, so a fresh view of the same
    data is recognized too. A write through any view (``copy_``, ``load_state_dict``) raises the
    version counter that all views share, and the result is computed anew; so is it for another
    storage. A write that torch itself does not count, through ``tensor.data`` or another library's
    pointer, is not seen. When the storage dies, so does the result.

    An inference tensor has no version counter. Its result is computed in every call.

    Safe to use from several threads; one tensor is computed once even so.
    """

    def __init__(self, compute: Callable[[Tensor], T]) -> None:
        self._compute = compute
        self._entries: dict[_Key, _Entry[T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, tensor: Tensor) -> T:
        """``compute(tensor)``, or what it gave before."""
        if tensor.is_inference():
            return self._computed(tensor)
        storage = tensor.untyped_storage()
        key = (id(storage), int(tensor.storage_offset()), tensor.shape, tensor.stride())
        found = self._valid(key, storage, tensor)
        if found is not None:
            return found.result
        with self._lock:
            found = self._valid(key, storage, tensor)
            if found is None:
                # The version is read first: a write during the computation makes the entry stale.
                version = tensor._version
                found = _Entry(
                    weakref.ref(storage, functools.partial(self._evict, key)),
                    tensor.data_ptr(),
                    version,
                    self._computed(tensor),
                )
                self._entries[key] = found
        return found.result

    def _computed(self, tensor: Tensor) -> T:
        # A result made under inference_mode would be an inference tensor, and useless outside it.
        with torch.inference_mode(False), torch.no_grad():
            return self._compute(tensor)

    def _valid(self, key: _Key, storage: torch.UntypedStorage, tensor: Tensor) -> _Entry[T] | None:
        entry = self._entries.get(key)
        if (
            entry is None
            or entry.storage() is not storage
            or entry.version != tensor._version
            or entry.data_ptr != tensor.data_ptr()
        ):
            return None
        return entry

    def _evict(self, key: _Key, storage: weakref.ref[torch.UntypedStorage]) -> None:
        """Forget a dead storage's result. Takes no lock: the collector may run inside ``of``."""
        entry = self._entries.get(key)
        # A new storage may have taken over the dead one's id, and the key with it.
        if entry is not None and entry.storage is storage:
            self._entries.pop(key, None)


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    if weight.is_inference():
        warnings.warn(
            "an int8 weight was made under torch.inference_mode(), where torch does not count "
            "writes to a tensor, so its packed form cannot be kept and it is packed again in every "
            "call. Convert or load the model outside inference_mode (torch.no_grad() will do).",
            stacklevel=2,
        )
    return pack_weight(weight), weight.sum(dim=1, dtype=torch.int32)


def _check_zero(zero_point: Tensor) -> None:
    if bool(zero_point.any()):
        raise ConfigError(
            f"a weight has the zero point {int(zero_point[zero_point != 0][0])}, but the graph was "
            "compiled for a model whose weights are symmetric (zero point 0). Quantize weights "
            "symmetrically, or compile with options={'disable': ('pt2e_chain',)}."
        )


PACKED: StorageCache[tuple[Tensor, Tensor]] = StorageCache(_pack)
"""Packed weights and their sums over k."""
_ZERO: StorageCache[None] = StorageCache(_check_zero)

_lib = torch.library.Library("qinductor", "FRAGMENT")
_lib.define(
    "packed_of(Tensor[] weights, Tensor[] zero_points) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def packed_of(weights: list[Tensor], zero_points: list[Tensor]) -> list[Tensor]:
    """Packed form and sums of each weight; computed once a weight and remembered (see above).

    Args:
        weights: int8 (N, K) each, any strides.
        zero_points: tensors that are zero in a model this graph is right for. Looked at once each.

    Returns:
        For each weight, :func:`qinductor.ops.pack_weight` of it and its int32 (N,) sum over k.
        They belong to the cache; nobody may write to them.

    Raises:
        ConfigError: an element of ``zero_points`` is not zero.
    """
    for zero_point in zero_points:
        _ZERO.of(zero_point)
    return [tensor for weight in weights for tensor in PACKED.of(weight)]


_lib.impl("packed_of", packed_of, "CompositeExplicitAutograd")


def _fake_packed_of(weights: list[Tensor], zero_points: list[Tensor]) -> list[Tensor]:
    out = []
    for weight in weights:
        out += [
            empty_packed(weight),
            weight.new_empty((weight.shape[0],), dtype=torch.int32),
        ]
    return out


torch.library.register_fake("qinductor::packed_of", _fake_packed_of, lib=_lib)
