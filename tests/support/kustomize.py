"""What `kubectl kustomize DIR` makes of deploy/k8s, in Python: for tests on machines without kubectl.

Covers the features that deploy/k8s uses and refuses every other field, so that nothing is checked half. tests/unit/test_deploy.py
compares it with kubectl where there is one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
FIELDS = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "components",
    "patches",
    "images",
    "configMapGenerator",
    "generatorOptions",
}
CLUSTER_SCOPED = {"Namespace"}
# Lists of Kubernetes that a strategic merge patch merges by a key of their items; it replaces all others.
MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "topologySpreadConstraints": ("topologyKey",),
    "resourceClaims": ("name",),
}


def build(directory: Path) -> list[Object]:
    """The objects of a kustomization, in its order. Raises ValueError for what it does not cover or what matches nothing."""
    return _apply(directory, [])


def _apply(directory: Path, objects: list[Object]) -> list[Object]:
    """objects: what a component's user has so far; empty for a kustomization of its own."""
    file = directory / "kustomization.yaml"
    wanted = yaml.safe_load(file.read_text(encoding="utf-8"))
    if unknown := set(wanted) - FIELDS:
        raise ValueError(f"{file} has {sorted(unknown)}, which this reader does not cover; allowed: {sorted(FIELDS)}.")
    for name in wanted.get("resources", []):
        path = (directory / name).resolve()
        objects = objects + (build(path) if path.is_dir() else _documents(path))
    for generated in wanted.get("configMapGenerator", []):
        objects = [*objects, _config_map(directory, generated, wanted.get("generatorOptions", {}))]
    for name in wanted.get("components", []):
        objects = _apply((directory / name).resolve(), objects)
    for patch in wanted.get("patches", []):  # each a file with one object, named by kind and name
        if set(patch) != {"path"}:
            raise ValueError(f"{file} has the patch {patch}; this reader covers those with a path alone.")
        objects = _patched(objects, directory / patch["path"])
    if "namespace" in wanted:
        for made in objects:
            if made["kind"] not in CLUSTER_SCOPED:
                made["metadata"]["namespace"] = wanted["namespace"]
    for image in wanted.get("images", []):
        _set_image(objects, image)
    return objects


def _documents(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]


def _config_map(directory: Path, wanted: Object, options: Object) -> Object:
    if not options.get("disableNameSuffixHash"):
        raise ValueError(f"{directory}: generated names with a hash are not covered; set disableNameSuffixHash.")
    metadata = {"name": wanted["name"], "labels": options.get("labels", {})}
    data = {Path(name).name: (directory / name).read_text(encoding="utf-8") for name in wanted["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(objects: list[Object], path: Path) -> list[Object]:
    (patch,) = _documents(path)
    kind, name = patch["kind"], patch["metadata"]["name"]
    matching = [made for made in objects if (made["kind"], made["metadata"]["name"]) == (kind, name)]
    if not matching:
        raise ValueError(f"{path} patches {kind} {name}, which is not there.")
    if patch.get("$patch") == "delete":
        return [made for made in objects if made not in matching]
    body = {key: value for key, value in patch.items() if key not in ("apiVersion", "kind", "metadata")}
    for made in matching:
        merge(made, body)
    return objects


def merge(target: Object, patch: Object) -> None:
    """A strategic merge patch, in place: null removes, maps merge, lists with a merge key merge by it."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        elif isinstance(value, list) and key in MERGE_KEYS and isinstance(target.get(key), list):
            _merge_lists(target[key], value, MERGE_KEYS[key])
        else:
            target[key] = _without_nulls(value)


def _merge_lists(target: list[Object], patch: list[Object], keys: tuple[str, ...]) -> None:
    new = []
    for item in patch:
        key = next(name for name in keys if name in item)
        same = next((old for old in target if old.get(key) == item[key]), None)
        if same is None:
            new.append(_without_nulls(item))
        else:
            merge(same, item)
    target[:0] = new


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return copy.deepcopy(value)


def _set_image(objects: list[Object], wanted: Object) -> None:
    """Every container's image of that name gets the new name, tag or digest."""
    if unknown := set(wanted) - {"name", "newName", "newTag"}:
        raise ValueError(f"An image has {sorted(unknown)}, which this reader does not cover.")

    def visit(value: Any) -> None:
        if isinstance(value, list):
            for inner in value:
                visit(inner)
        elif isinstance(value, dict):
            image = value.get("image")
            if isinstance(image, str) and "name" in value:
                name, _, tag = image.partition(":")
                if name == wanted["name"]:
                    value["image"] = f"{wanted.get('newName', name)}:{wanted.get('newTag', tag)}"
            for inner in value.values():
                visit(inner)

    visit(objects)
