"""Templates for CUDA devices. Only `lowering.py` and tools import from here, and only when asked."""
