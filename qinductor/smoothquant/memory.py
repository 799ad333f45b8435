"""Giving memory back to the system after many short-lived tensors."""

from __future__ import annotations

import ctypes
import sys


def release_free_memory() -> None:
    """Ask glibc to return freed blocks, which it otherwise keeps inside its heap.

    Packing the weights of BERT-base leaves up to 150 MB of freed blocks between the 83 MB of packed
    ones. Elsewhere than on glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    trim(0)
