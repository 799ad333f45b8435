"""Templates for CUDA devices, imported where one is wanted, and not before."""
