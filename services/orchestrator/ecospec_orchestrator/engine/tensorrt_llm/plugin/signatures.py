"""What EcoSpec relies on inside TensorRT-LLM, and whether an installed version still has it: read with ast, without importing it.

Importing loads native code and takes a GPU; so the package is found by its name alone, and its files are read as text. The table was
written from the public sources of mid-2026; inside the image the check decides.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "tensorrt_llm"
SUPPORTED_VERSIONS = ("1.3.0rc24",)
_SPECULATIVE = "_torch/speculative/"
_MODELS = "_torch/models/"


class UnsupportedVersionError(RuntimeError):
    """differences: one sentence each; empty when only the version's number is unknown."""

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Relied:
    """One name that must be there. files: where, below the package; one of them must have it (a module that has moved).

    name: a function, a class, "Class.method" or a constant. parameters: of a function, in order, self included; exact: there must be
    no others (we override it, or it is called by position), else these come first and others only after them. accepts: parameters
    that must exist, anywhere. attributes: of a class, set in its body or on self in its methods.
    """

    files: tuple[str, ...]
    name: str
    parameters: tuple[str, ...] = ()
    exact: bool = False
    accepts: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


_TREE_BUFFERS = (
    "K",
    "max_total_draft_tokens",
    "history_score_buffer",
    "history_draft_tokens_buffer",
    "history_draft_tokens_parent_buffer",
    "_accepted_tokens_buf",
    "_num_accepted_tokens_buf",
    "_accepted_draft_indices_tensor",
)
RELIED = (
    Relied((_SPECULATIVE + "eagle3_dynamic_tree.py",), "Eagle3OneModelDynamicTreeWorker", attributes=_TREE_BUFFERS),
    Relied(
        (_SPECULATIVE + "eagle3_dynamic_tree.py",),
        "Eagle3OneModelDynamicTreeWorker.resampling_final_draft_tokens",
        ("self", "batch_size"),
        exact=True,
    ),
    Relied((_SPECULATIVE + "eagle3.py",), "Eagle3OneModelWorker", attributes=("max_draft_len",)),
    Relied((_SPECULATIVE + "eagle3.py",), "Eagle3OneModelSpecMetadata.prepare", ("self",), exact=True),
    Relied((_SPECULATIVE + "mtp.py",), "MTPSpecMetadata.prepare", ("self",), exact=True),
    Relied((_SPECULATIVE + "interface.py",), "SpecMetadata", attributes=("request_ids", "seq_lens", "num_generations")),
    Relied(
        (_SPECULATIVE + "utils.py",),
        "get_draft_len_for_batch_size",
        ("draft_len_schedule", "batch_size", "max_draft_len"),
    ),
    Relied(
        (_MODELS + "modeling_speculative.py",), "SpecDecOneEngineForCausalLM", attributes=("spec_worker", "draft_model")
    ),
    Relied((_MODELS + "modeling_utils.py",), "register_auto_model", ("name",), exact=True),
    Relied((_MODELS + "modeling_qwen3_moe.py",), "Qwen3MoeForCausalLM"),
    Relied((_MODELS + "modeling_qwen3_moe.py",), "Qwen3MoE", attributes=("experts",)),
    Relied((_MODELS + "modeling_qwen3_moe.py",), "Qwen3MoEModel", attributes=("layers",)),
    Relied((_MODELS + "modeling_gpt_oss.py",), "GptOssForCausalLM"),
    Relied((_MODELS + "modeling_gpt_oss.py",), "MLPBlock", attributes=("experts",)),
    Relied((_MODELS + "modeling_gpt_oss.py",), "Transformer", attributes=("block",)),
    Relied((_MODELS + "modeling_deepseekv3.py",), "DeepseekV3ForCausalLM"),
    Relied((_MODELS + "modeling_deepseekv3.py",), "Deepseekv3MoE", attributes=("experts",)),
    Relied((_MODELS + "modeling_deepseekv3.py",), "DeepseekV3Model", attributes=("layers",)),
    Relied(
        ("_torch/modules/fused_moe/routing.py", "_torch/moe/fused_moe/routing.py"),
        "BaseMoeRoutingMethod.apply",
        ("self",),  # and the logits, by position: their name differs between the base class and its heirs
    ),
    Relied(("_torch/pyexecutor/cuda_graph_runner.py",), "CUDA_GRAPH_DUMMY_REQUEST_ID"),
    Relied(
        ("llmapi/llm_args.py",),
        "DecodingBaseConfig",
        attributes=("max_draft_len", "max_total_draft_tokens", "speculative_model", "draft_len_schedule"),
    ),
    Relied(("llmapi/llm_args.py",), "EagleDecodingConfig", attributes=("use_dynamic_tree", "dynamic_tree_max_topK")),
    # Filled in by the engine; where it is a public field instead, the launcher would have to give it.
    Relied(("llmapi/llm_args.py",), "Eagle3DecodingConfig", attributes=("_max_batch_size",)),
    Relied(("llmapi/llm_args.py",), "MTPDecodingConfig"),
    Relied(
        ("executor/ray_gpu_worker.py", "executor/ray/gpu_worker.py"),
        "RayWorkerWrapper._inject_worker_extension",
        accepts=("worker_class", "extension_cls_name"),
    ),
)


def installed_root(package: str = PACKAGE) -> Path | None:
    """The folder of the installed package, None where there is none. Nothing is imported: only a top-level name is looked up."""
    spec = importlib.util.find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def installed_version(root: Path) -> str | None:
    """__version__ of version.py; None where it cannot be read."""
    tree = _parse(root / "version.py")
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and _binds(node, "__version__"):
            return str(node.value.value)
    return None


def differences(root: Path, relied: Sequence[Relied] = RELIED) -> list[str]:
    """One sentence for everything that is not as the table says; empty when all is."""
    return [sentence for item in relied for sentence in _check(root, item)]


def require_supported(root: Path | None = None) -> str:
    """The installed version. Raises UnsupportedVersionError saying what differs."""
    root = root or installed_root()
    if root is None:
        raise UnsupportedVersionError(
            f"TensorRT-LLM is not installed; run inside NVIDIA's image of version {SUPPORTED_VERSIONS[0]}."
        )
    version, found = installed_version(root), differences(root)
    if version in SUPPORTED_VERSIONS and not found:
        return str(version)
    known = ", ".join(SUPPORTED_VERSIONS)
    if not found:
        raise UnsupportedVersionError(
            f"TensorRT-LLM {version} is not among the supported versions ({known}), although every name that EcoSpec relies on is "
            "there; take the image of a supported version."
        )
    more = f" and {len(found) - 1} more differences" if len(found) > 1 else ""
    raise UnsupportedVersionError(
        f"TensorRT-LLM {version} differs from the supported versions ({known}): {found[0].rstrip('.')}{more}; take the image of a "
        "supported version.",
        found,
    )


def _check(root: Path, item: Relied) -> Iterator[str]:
    trees = [(file, _parse(root / file)) for file in item.files]
    found = [(file, tree) for file, tree in trees if tree is not None]
    if not found:
        yield f"{' or '.join(item.files)} is missing or cannot be read."
        return
    file, tree = found[0]
    owner_name, _, member = item.name.partition(".")
    owner = _defined(tree.body, owner_name)
    if owner is None:
        yield f"{file} has no {owner_name}."
        return
    node = owner
    if member:
        inside = _defined(owner.body, member) if isinstance(owner, ast.ClassDef) else None
        if inside is None:
            yield f"{file} has no {item.name}."
            return
        node = inside
    if item.parameters or item.accepts:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{file} has {item.name}, which is no function."
            return
        yield from _check_parameters(file, item, node)
    if item.attributes:
        there = _attributes(node) if isinstance(node, ast.ClassDef) else set()
        yield from (f"{file} has no {item.name}.{name}." for name in item.attributes if name not in there)


def _check_parameters(file: str, item: Relied, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = function.args
    ordered = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    everything = [*ordered, *(a.arg for a in arguments.kwonlyargs)]
    if item.parameters:
        expected = list(item.parameters)
        fits = everything == expected if item.exact else ordered[: len(expected)] == expected
        if not fits:
            wanted = "exactly " if item.exact else "first "
            yield f"{file} has {item.name}({', '.join(everything)}); {wanted}({', '.join(expected)}) is expected."
    yield from (f"{file} has {item.name} without parameter {name}." for name in item.accepts if name not in everything)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names bound in the body of a class, methods included, and on self anywhere in it."""
    names = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for inner in node.body:
        for target in _targets(inner):
            if isinstance(target, ast.Name):
                names.add(target.id)
    for anywhere in ast.walk(node):
        for target in _targets(anywhere):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                names.add(target.attr)
    return names


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What an assignment binds, tuples taken apart."""
    pending: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        pending = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        pending = [node.target]
    while pending:
        target = pending.pop()
        if isinstance(target, ast.Tuple | ast.List):
            pending.extend(target.elts)
        else:
            yield target


def _binds(node: ast.AST, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in _targets(node))


def _defined(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """The last definition of a name, as Python would have it."""
    for node in reversed(body):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        if named or _binds(node, name):
            return node
    return None


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
