"""Bytes that a decode step reads, and what other ways of decoding would have read. Pure functions over measured counts.

"Distinct experts" are (layer, expert) pairs, counted once for the whole step: the engine reads each once per step.
"""

from __future__ import annotations

import numpy as np

from ..core import BytesRead
from ..engine.base import StepBytes


def distinct_per_layer(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Experts that a set of rows uses, each counted once: ids int [rows, layers, top_k] -> int64 [layers].

    Raises ValueError for another shape or an id outside 0 to num_experts - 1.
    """
    if experts.ndim != 3:
        raise ValueError(f"experts has shape {experts.shape}; [rows, layers, top_k] is needed.")
    layers = experts.shape[1]
    if experts.size and not (experts.min() >= 0 and experts.max() < num_experts):
        raise ValueError(f"expert ids run from {experts.min()} to {experts.max()}; 0 to {num_experts - 1} is allowed.")
    used = np.zeros((layers, num_experts), bool)
    used[np.arange(layers)[None, :, None], experts] = True
    return used.sum(axis=1, dtype=np.int64)


def bytes_of_step(
    sizes: StepBytes, distinct: np.ndarray, rows: int, context_tokens: int, draft_bytes: int = 0
) -> BytesRead:
    """Bytes that one packed verification reads, by component.

    distinct: int [layers], distinct routed experts of the step; rows: root and draft rows of all requests together
    (with 0 rows the target is not run); context_tokens: cached tokens, summed over the requests, each read once for all rows
    of its request (the step's own keys and values are written, not counted); draft_bytes: what the drafter read.
    """
    if rows == 0:
        return BytesRead(draft=draft_bytes)
    return BytesRead(
        experts=int(distinct.sum()) * sizes.per_expert,
        attention=sizes.attention,
        shared=sizes.shared,
        head=sizes.head,
        kv=context_tokens * sizes.kv_per_token,
        draft=draft_bytes,
    )


def upper_bound_bytes(
    sizes: StepBytes, layers: int, top_k: int, num_experts: int, rows: int, context_tokens: int, draft_bytes: int = 0
) -> int:
    """The same step if no two rows shared an expert: min(rows * top_k, num_experts) per layer, as vLLM estimates it."""
    distinct = np.full(layers, min(rows * top_k, num_experts), np.int64)
    return bytes_of_step(sizes, distinct, rows, context_tokens, draft_bytes).total


def autoregressive_bytes(
    sizes: StepBytes, root_distinct: np.ndarray, requests: int, emitted: int, context_tokens: int
) -> float:
    """Estimated bytes to decode `emitted` tokens one per step and request, with the same requests batched together.

    A plain step of these requests verifies their roots alone and emits one token for each. It reads the union of the
    roots' experts as measured in this step (root_distinct, int [layers]), and the fixed part once for all requests; its
    cost is spread evenly over its tokens. Estimated, since later tokens route to other experts and the context grows.
    """
    if requests == 0:
        return 0.0
    return bytes_of_step(sizes, root_distinct, requests, context_tokens).total * emitted / requests


def overlap_by_layer(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """int64 [3, layers]: (predicted, actual, both), expert pairs counted per node. Precision is both / predicted, recall
    both / actual. predicted, actual: uint64 bitsets [nodes, layers, words]."""
    if predicted.shape != actual.shape:
        raise ValueError(f"predicted has shape {predicted.shape} and actual {actual.shape}; they must be equal.")
    counts = (predicted, actual, predicted & actual)
    return np.stack([np.bitwise_count(bits).sum(axis=(0, 2), dtype=np.int64) for bits in counts])


def union_size(experts: np.ndarray) -> np.ndarray:
    """Distinct experts that rows use together: uint64 bitsets [rows, layers, words] -> int64 [layers]."""
    return np.bitwise_count(np.bitwise_or.reduce(experts, axis=0)).sum(axis=-1, dtype=np.int64)
