"""`make check-deploy`: Dockerfiles, compose files and every Kubernetes overlay through the tools that know them.

    python deploy/check.py [--crds DIR]

Manifests are checked against the schemas of Kubernetes itself, custom resources against deploy/k8s/schemas.yaml, or against the
CustomResourceDefinitions in --crds, where you have them. A policy scanner looks for what is valid but unwise. Then manifests that were
broken on purpose must be caught by one or the other. Exit code 1 and one line for each problem; a tool that is not there is a problem,
too.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
K8S = ROOT / "deploy/k8s"
KUBERNETES = "1.34"  # the oldest version whose schemas know all that is used; components/dra needs it
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
DCLINT = "dclint@3.1.0"
SCANNER = ROOT / ".venv-scanner/bin/checkov"  # of its own environment: it pins what others need newer
Object = dict[str, Any]
Schemas = Mapping[str, Object]


def command(*words: str | Path, variables: Mapping[str, str] | None = None) -> list[str]:
    """Problems: what a tool says when it fails."""
    name = str(words[0])
    beside = Path(sys.executable).parent / name  # a tool of the virtual environment
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        return [f"{name} is not installed; make check-deploy installs it, npx comes with Node.js."]
    done = subprocess.run(
        [program, *map(str, words[1:])],
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
    )
    said = (done.stdout + done.stderr).strip().splitlines()
    return [f"{name}: {line}" for line in said or ["failed and said nothing"]] if done.returncode else []


def dockerfiles() -> list[str]:
    return command("hadolint", *sorted((ROOT / "docker").glob("*.Dockerfile")))


def compose() -> list[str]:
    problems = command("docker-compose", "-f", COMPOSE_FILES[0], "config", "-q")
    both = [word for name in COMPOSE_FILES for word in ("-f", name)]
    return problems + command("docker-compose", *both, "config", "-q", variables={"ECOSPEC_MODEL": "/models/any"})


def compose_style() -> list[str]:
    return command("npx", "--yes", DCLINT, "--max-warnings", "0", *COMPOSE_FILES)


def rendered(overlay: Path) -> list[Object]:
    """Raises RuntimeError with what kustomize says."""
    beside = Path(sys.executable).parent / "kubectl"
    program = str(beside) if beside.exists() else "kubectl"
    done = subprocess.run([program, "kustomize", overlay], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return [made for made in yaml.safe_load_all(done.stdout) if made]


def kind_of(made: Object) -> str:
    return f"{made['apiVersion']} {made['kind']}"


def problems_of(made: Object, schemas: Schemas) -> list[str]:
    """What is wrong with one object; empty when nothing is."""
    where = f"{made['kind']} {made['metadata']['name']}"
    try:
        kubernetes_validate.validate(made, KUBERNETES, strict=True)
        return []
    except kubernetes_validate.ValidationError as error:
        return [f"{where}: {'.'.join(map(str, error.path))}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError:
        pass
    if kind_of(made) not in schemas:
        return [f"{where}: no schema of {kind_of(made)} is known; add one to deploy/k8s/schemas.yaml."]
    schema = schemas[kind_of(made)]
    found = jsonschema.Draft202012Validator(schema).iter_errors(made["spec"])
    problems = [f"{where}: spec.{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]
    for template in pod_templates(made["spec"], schema):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": where, **template.get("metadata", {})}}
        problems += [f"{where}: {text}" for text in problems_of({**pod, "spec": template["spec"]}, schemas)]
    return problems


def pod_templates(value: Any, schema: Object) -> Iterable[Object]:
    if schema.get("podTemplate"):
        yield value
    for name, inner in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            yield from pod_templates(value[name], inner)


def own_schemas() -> Schemas:
    return {
        name: closed(schema)
        for name, schema in yaml.safe_load((K8S / "schemas.yaml").read_text(encoding="utf-8")).items()
    }


def crd_schemas(directory: Path) -> Schemas:
    """By "group/version Kind", of the CustomResourceDefinitions in the YAML files of a directory."""
    made = {}
    for path in sorted(directory.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                    made[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = closed(schema)
    return made


def closed(schema: Any) -> Any:
    """Fields that a schema does not list become errors, as an API server with strict validation has it."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(inner) for name, inner in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    listed = isinstance(made.get("properties"), dict) and made.get("type") == "object"
    if listed and "additionalProperties" not in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def overlays(schemas: Schemas) -> list[str]:
    problems = []
    for directory in sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml")):
        try:
            objects = rendered(directory)
        except (RuntimeError, OSError) as error:
            problems.append(f"{directory.name}: {error}")
            continue
        problems += [f"{directory.name}: {text}" for made in objects for text in problems_of(made, schemas)]
    return problems


def findings(folder: Path, framework: str) -> list[tuple[str, str]]:
    """(name of the file, what the policy scanner says) of all files below a folder; deploy/checkov.yaml says what may be, and why.

    Raises RuntimeError when the scanner itself fails.
    """
    if not SCANNER.exists():
        raise RuntimeError(f"{SCANNER.relative_to(ROOT)} is not installed; make check-deploy installs it.")
    options = ["--config-file", ROOT / "deploy/checkov.yaml", "--framework", framework, "--directory", folder]
    done = subprocess.run([SCANNER, *options], capture_output=True, text=True)
    try:
        results = json.loads(done.stdout)["results"]
    except (ValueError, KeyError, TypeError):
        raise RuntimeError(f"checkov did not scan anything: {(done.stderr or done.stdout).strip()}") from None
    problems = [(error, "cannot be read") for error in results.get("parsing_errors", [])]
    for found in results.get("failed_checks", []):
        problems.append(
            (Path(found["file_path"]).name, f"{found['check_id']} {found['check_name']}: {found['resource']}")
        )
    return problems


def policies() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        for directory in sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml")):
            write(Path(folder) / f"{directory.name}.yaml", rendered(directory))
        try:
            found = findings(ROOT / "docker", "dockerfile") + findings(Path(folder), "kubernetes")
        except RuntimeError as error:
            return [str(error)]
    return [f"{file}: {text}" for file, text in found]


def write(path: Path, objects: list[Object]) -> None:
    path.write_text(yaml.safe_dump_all(objects), encoding="utf-8")


def set_in(made: Object, path: str, value: Any) -> Object:
    """A copy with one field changed; numbers in the path are places in lists."""
    made = copy.deepcopy(made)
    *way, last = path.split(".")
    inner: Any = made
    for step in way:
        inner = inner[int(step)] if step.isdigit() else inner[step]
    inner[last] = value
    return made


BROKEN = (  # overlay, kind, field, value
    ("cpu-demo", "Deployment", "spec.replicas", "two"),
    ("cpu-demo", "Deployment", "spec.template.spec.containers.0.readinessProb", {}),
    ("cpu-demo", "NetworkPolicy", "spec.policyTypes", "Ingress"),
    ("autoscaling", "ScaledObject", "spec.minReplicas", 1),
    ("autoscaling", "ScaledObject", "spec.triggers", "prometheus"),
    ("inference-gateway", "InferencePool", "spec.targetPorts", [{"number": 80000}]),
    ("monitoring", "PodMonitor", "spec.podMetricsEndpoints.0.interval", "often"),
    ("multi-node", "LeaderWorkerSet", "spec.leaderWorkerTemplate.size", "two"),
    (
        "multi-node",
        "LeaderWorkerSet",
        "spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.imagePolicy",
        "Never",
    ),
)


UNWISE = (  # likewise, of the first container of the overlay cpu-demo's first Deployment: valid, but not to be
    ("image", "ecospec-orchestrator"),
    ("securityContext.privileged", True),
    ("securityContext.readOnlyRootFilesystem", False),
    ("securityContext.capabilities.drop", []),
    ("resources.limits", {}),
)


def broken_ones(schemas: Schemas) -> list[str]:
    """Manifests that were broken on purpose and pass nevertheless."""
    missed = []
    for overlay, kind, path, value in BROKEN:
        made = next(made for made in rendered(K8S / "overlays" / overlay) if made["kind"] == kind)
        if not problems_of(set_in(made, path, value), schemas):
            missed.append(f"{overlay}: {kind} with {path} = {value!r} is not caught.")
    return missed + unwise_ones()


def unwise_ones() -> list[str]:
    objects = rendered(K8S / "overlays/cpu-demo")
    deployment = next(made for made in objects if made["kind"] == "Deployment")
    with tempfile.TemporaryDirectory() as folder:
        for number, (path, value) in enumerate(UNWISE):
            changed = set_in(deployment, f"spec.template.spec.containers.0.{path}", value)
            write(Path(folder) / f"{number}.yaml", [changed, *(made for made in objects if made is not deployment)])
        try:
            caught = {file for file, _ in findings(Path(folder), "kubernetes")}
        except RuntimeError as error:
            return [str(error)]
    return [
        f"cpu-demo: a container with {path} = {value!r} is not caught."
        for number, (path, value) in enumerate(UNWISE)
        if f"{number}.yaml" not in caught
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--crds", type=Path, help="a folder of CustomResourceDefinitions to use instead of schemas.yaml"
    )
    options = parser.parse_args()
    schemas = own_schemas() | (crd_schemas(options.crds) if options.crds else {})
    checks: dict[str, Callable[[], list[str]]] = {
        "Dockerfiles (hadolint)": dockerfiles,
        "compose files (docker-compose config)": compose,
        "compose files (dclint)": compose_style,
        "Kubernetes overlays (kubectl kustomize, schemas)": lambda: overlays(schemas),
        "Dockerfiles and overlays (checkov)": policies,
        "broken manifests are caught": lambda: broken_ones(schemas),
    }
    failed = False
    for name, check in checks.items():
        problems = check()
        failed |= bool(problems)
        print(
            f"{'failed' if problems else 'ok':6} {name}", *[f"       {text}" for text in problems], sep="\n", flush=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
