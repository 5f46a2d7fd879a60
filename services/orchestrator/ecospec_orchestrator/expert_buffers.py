"""Whose chosen nodes make an expert free: what the greedy choice counts as already read. numba compiles these into its kernels."""

from __future__ import annotations

BUFFER_BATCH = 0  # what is chosen anywhere makes its experts free for all requests of the step
BUFFER_REQUEST = 1  # one buffer per request
BUFFER_NONE = 2  # nothing that is chosen makes anything cheaper
