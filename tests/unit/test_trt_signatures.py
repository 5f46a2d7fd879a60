"""The signatures of TensorRT-LLM that EcoSpec relies on, checked in a tree of sources without importing it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from trt_engine import STAND_IN

from ecospec_orchestrator.engine.tensorrt_llm.plugin.signatures import (
    RELIED,
    SUPPORTED_VERSIONS,
    Relied,
    UnsupportedVersionError,
    differences,
    installed_root,
    installed_version,
    require_supported,
)

SOURCE = STAND_IN / "tensorrt_llm"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "tensorrt_llm", ignore=shutil.ignore_patterns("__pycache__")))


def rename(path: Path, name: str) -> None:
    """Everywhere in the file."""
    text = path.read_text()
    changed = re.sub(rf"\b{re.escape(name)}\b", f"{name}_renamed", text)
    assert changed != text, f"{path} does not hold {name}"
    path.write_text(changed)


def there(root: Path, item: Relied) -> Path:
    return next(root / file for file in item.files if (root / file).exists())


def test_the_supported_version_passes(root: Path) -> None:
    assert differences(root) == []
    assert installed_version(root) in SUPPORTED_VERSIONS
    assert require_supported(root) == SUPPORTED_VERSIONS[0]


NAMES = [(item, part) for item in RELIED for part in item.name.split(".")]
INSIDE = [
    (item, name) for item in RELIED for name in (*item.parameters, *item.accepts, *item.attributes) if name != "self"
]


@pytest.mark.parametrize(("item", "name"), NAMES + INSIDE, ids=lambda value: getattr(value, "name", value))
def test_a_renamed_name_or_parameter_is_named(root: Path, item: Relied, name: str) -> None:
    rename(there(root, item), name)
    found = differences(root, [item])
    assert found and any(name in sentence for sentence in found)
    with pytest.raises(UnsupportedVersionError) as error:
        require_supported(root)
    assert set(found) <= set(error.value.differences) and "differs from the supported versions" in str(error.value)


@pytest.mark.parametrize("item", RELIED, ids=lambda item: item.name)
def test_a_missing_or_broken_file_is_named(root: Path, item: Relied) -> None:
    path = there(root, item)
    path.write_text("def broken(:\n")
    assert differences(root, [item]) == [f"{' or '.join(item.files)} is missing or cannot be read."]
    path.unlink()
    assert differences(root, [item]) == [f"{' or '.join(item.files)} is missing or cannot be read."]


def test_a_module_that_has_moved_is_found(root: Path) -> None:
    (root / "_torch/moe").mkdir()
    shutil.move(root / "_torch/modules/fused_moe", root / "_torch/moe/fused_moe")
    assert differences(root) == []


def test_a_method_that_we_override_may_not_get_more_parameters(root: Path) -> None:
    path = root / "_torch/speculative/eagle3_dynamic_tree.py"
    path.write_text(
        path.read_text().replace(
            "def resampling_final_draft_tokens(self, batch_size)",
            "def resampling_final_draft_tokens(self, batch_size, *, spec_metadata)",
        )
    )
    assert differences(root) == [
        "_torch/speculative/eagle3_dynamic_tree.py has Eagle3OneModelDynamicTreeWorker.resampling_final_draft_tokens(self, "
        "batch_size, spec_metadata); exactly (self, batch_size) is expected."
    ]


def test_an_unknown_version_is_refused_even_when_every_name_is_there(root: Path) -> None:
    (root / "version.py").write_text('__version__ = "9.9.9"\n')
    with pytest.raises(UnsupportedVersionError, match="9.9.9 is not among the supported") as error:
        require_supported(root)
    assert error.value.differences == ()


def test_the_package_is_found_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert installed_root("tensorrt_llm_that_is_not_there") is None
    (tmp_path / "poisoned_engine").mkdir()
    (tmp_path / "poisoned_engine" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_root("poisoned_engine") == tmp_path / "poisoned_engine"
    assert "poisoned_engine" not in sys.modules


def test_without_tensorrt_llm_the_image_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec_orchestrator.engine.tensorrt_llm.plugin.signatures.installed_root", lambda: None)
    with pytest.raises(UnsupportedVersionError, match=f"not installed; .* version {SUPPORTED_VERSIONS[0]}"):
        require_supported()
