"""One cache key of everything that decides what code is generated.

Inductor caches compiled graphs by the graph and by the ``uuid()`` of custom passes. Neither sees
the text of a template or a lowering, so every ``uuid()`` here is the digest of all our files.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from .capability import Capability
from .config import QSimConfig

_SUFFIXES = (".py", ".h")


@functools.cache
def source_digest() -> str:
    """SHA-256 over the package's source files, names included."""
    root = Path(__file__).parent
    # passes/ and templates/ are links in a checkout, which Path.rglob does not follow.
    files = sorted(
        Path(folder) / name
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(_SUFFIXES)
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_key(config: QSimConfig, capability: Capability) -> str:
    """Key of one compilation: sources, options and machine."""
    text = "\0".join((source_digest(), config.cache_key(), capability.cache_key()))
    return hashlib.sha256(text.encode()).hexdigest()
