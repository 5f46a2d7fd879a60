"""Tree-masked attention over the paged cache on CUDA, with fixed shapes: what a captured step needs in place of Segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cache import PAGE_TOKENS
from ..step_plan import StepPlan

OWN_WIDTH = 64  # slots that a row may see behind its sequence's committed ones: the largest row count of a graph
WARPS, STAGES = 4, 2  # not tuned on a device yet
PADDINGS = {"pages": 0, "run": 0, "own": 0, "own_count": 0, "slot": -1}


@dataclass(frozen=True)
class RowPlan:
    """What each row of a step sees; int64, on the device. pages: [rows, P], the pages of the row's sequence; run: [rows], slots
    seen from 0 on; own: [rows, OWN_WIDTH], slots seen behind these, the first own_count [rows] of them real; slot: [rows],
    where the row itself goes, -1 for padding."""

    pages: torch.Tensor
    run: torch.Tensor
    own: torch.Tensor
    own_count: torch.Tensor
    slot: torch.Tensor


def row_tensors(plan: StepPlan, device: torch.device | str) -> dict[str, torch.Tensor]:
    """RowPlan's fields by name, as inputs of graph.StepGraphs with these PADDINGS. The page tables' width is the next power of
    two, so that a growing sequence needs a new graph only when it doubles."""
    tables, sequence, run, own, own_count, slot = (torch.from_numpy(array) for array in plan.arrays)
    if own.shape[1] > OWN_WIDTH:
        raise ValueError(f"a row of this step sees up to {own.shape[1]} uncommitted rows; {OWN_WIDTH} are supported.")
    width = 1 << (tables.shape[1] - 1).bit_length()
    pages = torch.nn.functional.pad(tables, (0, width - tables.shape[1]))[sequence]
    own = torch.nn.functional.pad(own, (0, OWN_WIDTH - own.shape[1]))
    rows = {"pages": pages, "run": run, "own": own, "own_count": own_count, "slot": slot}
    return {name: tensor.to(device) for name, tensor in rows.items()}


def write_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: RowPlan,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query: float32 [rows, heads, D]; key: [rows, kv_heads, D]; value: [rows, kv_heads, V]; keys, values: the pool's, of one
    layer -> [rows, heads, V]. Writes the rows into the cache first, so that they see each other as the plan says."""
    from . import attention_kernels as kernels

    (rows, heads, size), (_, kv_heads, value_size) = query.shape, value.shape
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty(rows, heads, value_size, dtype=torch.float32, device=query.device)
    shape = {"KV_HEADS": kv_heads, "KEY": size, "VALUE": value_size, "PAGE": PAGE_TOKENS}
    key_block, value_block, group = _block(size), _block(value_size), heads // kv_heads
    width = plan.pages.shape[1]
    kernels.write_rows[(rows, kv_heads)](
        key, value, keys, values, plan.pages, plan.slot, width, **shape, BLOCK=max(key_block, value_block)
    )
    kernels.attend[(rows, kv_heads)](
        query,
        keys,
        values,
        plan.pages,
        plan.run,
        plan.own,
        plan.own_count,
        query if sinks is None else sinks,  # never read without SINKS
        out,
        scaling,
        window or 0,
        width,
        plan.own.shape[1],
        **shape,
        GROUP=group,
        SINKS=sinks is not None,
        GROUP_BLOCK=_block(group),
        KEY_BLOCK=key_block,
        VALUE_BLOCK=value_block,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


def _block(size: int) -> int:
    """The next power of two, at least 16: what a product's tile must be."""
    return int(max(16, 1 << (size - 1).bit_length()))
