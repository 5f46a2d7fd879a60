"""Where the embedded engine computes: what the setting means on this machine, the device's name and its free memory."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ecospec_proto.memory import available_memory_bytes

from ...core import SettingsError

AUTO = "auto"


def device_of(setting: str, auto_is_cpu: bool = False) -> torch.device:
    """The device of "auto", "cpu", "cuda" or "cuda:N", with its number. auto is the first CUDA device where there is one, or with
    auto_is_cpu the CPU in any case. Raises SettingsError where CUDA is asked for and absent."""
    if setting == AUTO:
        setting = "cuda" if torch.cuda.is_available() and not auto_is_cpu else "cpu"
    kind, _, number = setting.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = (
            "is built without CUDA: install a CUDA build of torch"
            if torch.version.cuda is None
            else f"is built for CUDA {torch.version.cuda} and finds no device that it can use: see what nvidia-smi says"
        )
        raise SettingsError(f"Setting device is {setting!r}, but torch {torch.__version__} here {reason}, or set cpu.")
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        raise SettingsError(
            f"Setting device is {setting!r}, but torch finds {count} CUDA devices here, numbered from 0; give one of these, or auto."
        )
    return torch.device("cuda", index)


def name_of(device: torch.device) -> str:
    """What the hardware is called."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken there now, with what torch holds of a GPU's and does not use."""
    if device.type != "cuda":
        return available_memory_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
