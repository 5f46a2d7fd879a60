"""`ecospec-orchestrator doctor --engine tensorrt-llm`: whether a server would start here, before minutes are spent on loading.

TensorRT-LLM is looked at, not imported: importing it loads native code, and fails where the doctor is most needed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core import SettingsError
from ...footprint.channel import client_tls
from ...predictor_process import is_serving
from ...settings import Settings
from .artifacts import checked_table, read_schedule
from .facts import ModelFacts, local_directory, read_facts
from .launcher import LaunchPlan, check_memory, memory_need, plan_launch

Verdict = Literal["ok", "warning", "FAILED"]
SHOWN_PACKAGES = ("tensorrt-llm", "torch", "transformers", "numpy", "mpi4py")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 1 << 30  # below it the ranks' communication fails; containers have 64 MiB unless told otherwise
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.free,compute_cap",
    "--format=csv,noheader,nounits",
)
SMI_SECONDS = 30
NO_TREES_FROM = 10.0  # compute capability from which the engine refuses draft trees: Blackwell
PREDICTOR_SECONDS = 3.0


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: float


def run(settings: Settings, say: Callable[[str], None] = print) -> int:
    """Print one line per check as it is made; the exit code is 1 when one failed."""
    failed = False
    for check in checks(settings):
        say(f"{check.verdict:8}{check.name}: {check.detail}")
        failed = failed or check.verdict == "FAILED"
    return int(failed)


def checks(settings: Settings) -> Iterable[Check]:
    yield Check("python", "ok", f"{sys.version.split()[0]}; {', '.join(_versions(SHOWN_PACKAGES))}")
    yield _installed()
    yield _signatures()
    if settings.distributed_executor == "ray":
        yield _ray()
    facts, plan = None, None
    try:
        facts = read_facts(local_directory(settings.model), settings.model_name or Path(settings.model).name)
        plan = plan_launch(settings, facts, read_schedule(settings.draft_len_schedule))
        yield _model(facts, plan)
    except SettingsError as error:
        yield Check("model and settings", "FAILED", str(error))
    gpus: list[Gpu] = []
    try:
        gpus = visible(parse_gpus(_ask_gpus()), os.environ)
        yield gpu_check(gpus, settings.tensor_parallel_size, settings.distributed_executor == "ray")
    except SettingsError as error:
        yield Check("GPUs", "FAILED", str(error))
    if facts is not None and plan is not None and gpus:
        used = gpus[: settings.tensor_parallel_size]
        yield memory_check(settings, facts, plan, used)
        if plan.shape == "tree":
            yield tree_check(used)
    yield _shared_memory()
    if facts is not None and plan is not None and plan.selects:
        yield _table(settings, facts) if settings.cuda_graphs else _predictor(settings)


def parse_gpus(text: str) -> list[Gpu]:
    """Of nvidia-smi's lines "index, name, total MiB, free MiB, compute capability". Raises SettingsError."""
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            index, name, total, free, capability = (part.strip() for part in line.split(","))
            gpus.append(Gpu(int(index), name, int(total) << 20, int(free) << 20, float(capability)))
        except ValueError:
            raise SettingsError(f"nvidia-smi says {line!r}, which cannot be understood.") from None
    return gpus


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, which nvidia-smi does not look at. UUIDs there keep their number."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if all(name.isdecimal() for name in names):
        by_index = {gpu.index: gpu for gpu in gpus}
        return [by_index[int(name)] for name in names if int(name) in by_index]
    return list(gpus[: len(names)])


def gpu_check(gpus: Sequence[Gpu], needed: int, other_nodes: bool = False) -> Check:
    """other_nodes: there may be more GPUs there, which cannot be seen from here."""
    if len(gpus) < needed and gpus and other_nodes:
        return Check("GPUs", "warning", f"{len(gpus)} are here, and {needed - len(gpus)} must be on Ray's other nodes.")
    if len(gpus) < needed:
        return Check(
            "GPUs", "FAILED", f"{len(gpus)} are visible and tensor_parallel_size is {needed}; lower it or add GPUs."
        )
    names = sorted({gpu.name for gpu in gpus[:needed]})
    if len(names) > 1:
        return Check("GPUs", "warning", f"they differ ({', '.join(names)}); all ranks wait for the slowest.")
    return Check("GPUs", "ok", f"{needed} of {len(gpus)} {names[0]}")


def memory_check(settings: Settings, facts: ModelFacts, plan: LaunchPlan, gpus: Sequence[Gpu]) -> Check:
    """What the model needs against what the GPUs have, and what others have taken of it."""
    if not facts.weight_bytes:
        return Check("memory", "warning", "the size of the weights is not known, since they are not there yet.")
    drafter = Path(settings.drafter)
    drafter_bytes = sum(f.stat().st_size for f in drafter.glob("*.safetensors")) if drafter.is_dir() else 0
    need, smallest = memory_need(settings, facts, plan, drafter_bytes), min(gpu.total_bytes for gpu in gpus)
    try:
        check_memory(need, smallest)
    except SettingsError as error:
        return Check("memory", "FAILED", str(error))
    left, free = smallest - need.weights - need.reserve, min(gpu.free_bytes for gpu in gpus)
    numbers = (
        f"{need.weights / 1e9:.1f} GB of weights on each GPU of {smallest / 1e9:.1f} GB, {left / 1e9:.1f} GB for keys and values; "
        f"{settings.max_running} requests of {settings.max_context_tokens} tokens take {need.all_requests / 1e9:.1f} GB"
    )
    if need.least > free:
        return Check(
            "memory", "FAILED", f"{numbers}, but only {free / 1e9:.1f} GB are free; end what else runs on the GPUs."
        )
    if need.all_requests > left:
        return Check("memory", "warning", f"{numbers}: fewer will run at a time.")
    return Check("memory", "ok", numbers)


def tree_check(gpus: Sequence[Gpu]) -> Check:
    newest = max(gpu.capability for gpu in gpus)
    if newest >= NO_TREES_FROM:
        return Check(
            "draft trees",
            "FAILED",
            f"the GPUs have compute capability {newest:g}, on which TensorRT-LLM has none; use --draft-top-k 1 for chains.",
        )
    return Check("draft trees", "ok", f"compute capability {newest:g}")


def _versions(packages: Iterable[str]) -> list[str]:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


def _installed() -> Check:
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        return Check("TensorRT-LLM", "FAILED", "it is not installed; run inside NVIDIA's TensorRT-LLM image.")
    return Check("TensorRT-LLM", "ok", f"in {next(iter(spec.submodule_search_locations))}")


def _ray() -> Check:
    if importlib.util.find_spec("ray") is None:
        return Check("Ray", "FAILED", "it is not installed; build the image with the build argument RAY, or use mpi.")
    return Check("Ray", "ok", _versions(["ray"])[0])


def _signatures() -> Check:
    """Imported here, so that whatever keeps the plug-in from being imported is told like the rest."""
    try:
        from .plugin.signatures import UnsupportedVersionError, require_supported
    except ImportError as error:
        return Check("signatures", "FAILED", f"they cannot be checked: {error}")
    try:
        version = require_supported()
    except UnsupportedVersionError as error:
        return Check("signatures", "FAILED", " ".join((str(error), *error.differences[1:])))
    return Check("signatures", "ok", f"all that the plug-in relies on is there in version {version}")


def _model(facts: ModelFacts, plan: LaunchPlan) -> Check:
    g = facts.geometry
    what = f"{g.name} ({facts.family}), {g.moe_layers} MoE layers of {g.experts} experts; drafts: {plan.shape}, {plan.nodes} nodes"
    if plan.notes:
        return Check("model and settings", "warning", "; ".join((what, *plan.notes)))
    return Check("model and settings", "ok", what)


def _ask_gpus() -> str:
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except FileNotFoundError:
        raise SettingsError("nvidia-smi is not there; no GPU can be seen from here.") from None
    except subprocess.CalledProcessError as error:
        raise SettingsError(f"nvidia-smi failed: {(error.stdout or error.stderr).strip()[:300]}") from None
    except subprocess.TimeoutExpired:
        raise SettingsError(f"nvidia-smi did not answer within {SMI_SECONDS} s; a GPU may hang.") from None
    return done.stdout


def _shared_memory() -> Check:
    try:
        total = shutil.disk_usage(SHARED_MEMORY).total
    except OSError as error:
        return Check("shared memory", "warning", f"{SHARED_MEMORY} cannot be looked at ({error}).")
    if total < LEAST_SHARED_BYTES:
        return Check(
            "shared memory",
            "FAILED",
            f"{SHARED_MEMORY} has {total >> 20} MiB; start the container with --ipc=host or --shm-size.",
        )
    return Check("shared memory", "ok", f"{total / 1e9:.1f} GB")


def _table(settings: Settings, facts: ModelFacts) -> Check:
    """Inside CUDA graphs it stands for the predictor."""
    try:
        return Check("token table", "ok", str(checked_table(settings, facts)))
    except SettingsError as error:
        return Check("token table", "FAILED", str(error))


def _predictor(settings: Settings) -> Check:
    try:
        tls = client_tls(settings)
        serving = is_serving(settings.predictor_address, tls, PREDICTOR_SECONDS)
    except (SettingsError, OSError) as error:
        return Check("predictor", "FAILED", str(error))
    if serving:
        return Check("predictor", "ok", f"serving at {settings.predictor_address}")
    return Check(
        "predictor",
        "warning",
        f"nobody serves predictions at {settings.predictor_address}; until it does, drafts are chosen without it.",
    )
