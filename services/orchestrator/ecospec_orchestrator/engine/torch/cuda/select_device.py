"""A step's trees on a device, for the greedy of cost-aware selection there."""

from __future__ import annotations

import numpy as np
import torch

from ....selection.pack import Pack
from ...greedy import DevicePack, greedy_marginal

__all__ = ["DevicePack", "greedy_marginal", "to_device"]


def to_device(pack: Pack, rows: int, device: torch.device | str) -> DevicePack:
    """Copy a step's trees, padded to so many rows. Raises ValueError when there are more."""
    real = len(pack.parents)
    if real > rows:
        raise ValueError(f"the trees of this step have {real} rows, roots included; the device pack holds {rows}.")
    tree = np.repeat(np.arange(len(pack.offsets) - 1), np.diff(pack.offsets))
    words = pack.experts.shape[1]
    experts = np.zeros((rows, max(words, 1)), np.uint64)
    experts[:real, :words] = pack.experts
    arrays = (
        experts.view(np.int64),
        *(
            np.concatenate([array, np.full(rows - real, fill, array.dtype)])
            for array, fill in ((pack.known, False), (pack.values, 0), (pack.parents, -1), (tree, 0))
        ),
    )
    return DevicePack(*(torch.from_numpy(array).to(device) for array in arrays))
