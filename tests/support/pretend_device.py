"""A device for machines that have none but the CPU: its tensors say "meta", and are kept and computed in the CPU's memory.

What a real device refuses is refused: operands of two devices (but for scalars and indices), and .numpy(). So a run on it shows
that every tensor is where it has to be, and that the path off the CPU gives the right numbers; not that CUDA's kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
MAKE = torch.tensor
MIXES_DEVICES = ("copy_", "to", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_")


class OnDevice(torch.Tensor):
    """held: the CPU tensor that holds the values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )
        made.held = real
        return made

    def tolist(self) -> Any:  # which torch does not let dispatch
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """What makes tensors on the device is told by an argument alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = list(_leaves((args, list(kwargs.values()))))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    ours = any(isinstance(t, OnDevice) for t in tensors)
    if not ours and wanted != DEVICE:
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    strangers = [t.device for t in tensors if not isinstance(t, OnDevice) and t.ndim]
    assert DEVICE not in strangers, f"{func} has an operand without values"
    assert name in MIXES_DEVICES or not strangers, f"{func} has operands on {DEVICE} and on {strangers[0]}"
    held_args, held_kwargs = _held(args), {name: _held(value) for name, value in kwargs.items()}
    if func is torch.ops.aten.mm.dtype:  # of another type than its operands: CUDA's alone
        func, (left, right, dtype) = torch.ops.aten.mm.default, held_args
        held_args = left.to(dtype), right.to(dtype)
    out = func(*held_args, **held_kwargs)
    if name.endswith("_") and not name.endswith("__"):  # in place
        return args[0]
    if wanted is not None and (wanted == DEVICE) != ours:
        out = out.clone() if tensors else out  # another device is other memory
    return out if wanted is not None and wanted != DEVICE else _wrapped(out)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _leaves(each)
    else:
        yield tree


def _held(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(_held, tree))
    if isinstance(tree, torch.device):
        return torch.device("cpu")
    return tree.held if isinstance(tree, OnDevice) else tree


def _wrapped(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return tuple(map(_wrapped, tree))
    return OnDevice(tree) if isinstance(tree, torch.Tensor) else tree


def _tensor(data: Any, device: Any = None, **kind: Any) -> torch.Tensor:
    return MAKE(data, **kind) if device is None else MAKE(data, device="cpu", **kind).to(device)


def enter() -> None:
    """Know the device in this thread from now on."""
    _Mode().__enter__()


@contextmanager
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Know the device in this thread; tensors that were made on it stay there."""

    def begin(context: Any) -> None:
        context.without_gradients = torch.no_grad()
        context.without_gradients.__enter__()

    # Views of wrapped tensors cannot be made in inference mode.
    monkeypatch.setattr(torch.inference_mode, "__enter__", begin)
    monkeypatch.setattr(torch.inference_mode, "__exit__", lambda context, *e: context.without_gradients.__exit__(*e))
    # Made on its device below what dispatches.
    monkeypatch.setattr(torch, "tensor", _tensor)
    with _Mode():
        yield DEVICE
