"""Give a model on CUDA the kernels of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache import KvPool
from ..experts import Bfloat16Experts, ExpertStore, Fp8Experts
from .experts_triton import TritonExperts, has_triton
from .graph import CudaCapture
from .step import DeviceStep


def make_device_step(
    model: Any, pool: KvPool, experts: Sequence[Any], features: Callable[[], list[torch.Tensor]]
) -> DeviceStep | None:
    """The forward of a model on CUDA (see DeviceStep for the arguments); None without triton, which then leaves the engine's
    plain torch. Graphs are used if the kernel can stand in for every layer's experts; the others wait for the device."""
    if not has_triton():
        return None
    capturable = use_triton_experts(experts) == len(experts)
    return DeviceStep(model, pool, experts, features, CudaCapture(pool.keys.device) if capturable else None)


def use_triton_experts(modules: Sequence[Any]) -> int:
    """Replace `store` of the given experts modules where the kernel can stand in for it; returns how many were replaced.

    It stands in for bfloat16 and FP8 experts on CUDA with SiLU gates and without biases. The others (MXFP4, float32, gpt-oss's
    gate) keep their plain torch.
    """
    replaced = 0
    for module in modules:
        store = triton_store(module.store)
        if store is not None and store.gate_up.is_cuda:
            module.store = store
            replaced += 1
    return replaced


def triton_store(store: ExpertStore) -> TritonExperts | None:
    """The same weights (not copied) for the kernel; None where it cannot compute what this store does."""
    if not isinstance(store, Bfloat16Experts | Fp8Experts) or store.gate != "silu" or store.gate_up_bias is not None:
        return None
    if isinstance(store, Bfloat16Experts):
        return TritonExperts(store.gate_up[0], store.down[0])
    (gate_up, gate_up_scale), (down, down_scale) = store.gate_up, store.down
    return TritonExperts(
        gate_up.view(torch.float8_e4m3fn),
        down.view(torch.float8_e4m3fn),
        gate_up_scale.float().contiguous(),
        down_scale.float().contiguous(),
    )
