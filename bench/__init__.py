"""Measurements: one harness, one file a question. Results with their machine lie in results/."""
