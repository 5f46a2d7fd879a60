"""A real predictor in a process of its own, whose model is the tests' fake one.

python predictor_server.py SETTINGS [GEOMETRY], both JSON: fields of Settings, with model_seconds for the time of one run of the
model, and of TargetGeometry. A model's version is the name of the directory that it was loaded from.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ecospec_proto.geometry import TargetGeometry


@contextlib.contextmanager
def predictor_process(geometry: TargetGeometry | None = None, **settings: Any) -> Iterator[tuple[Any, int]]:
    """(process, port) once it is ready; killed at the end unless it has ended."""
    command = [sys.executable, "-W", "error::ResourceWarning", __file__, json.dumps(settings, default=str)]
    command += [json.dumps(asdict(geometry))] if geometry is not None else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "ready on 127.0.0.1:" in line, line or process.communicate()[1]
        yield process, int(line.split("127.0.0.1:")[1].split(":")[0])
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from fake_expert_model import FakeExpertModel

    from ecospec_predictor.server import run
    from ecospec_predictor.settings import Settings

    settings = {"model_dir": ".", "port": 0, "metrics_port": 0} | json.loads(sys.argv[1])
    model_seconds = settings.pop("model_seconds", 0.0)

    class Model(FakeExpertModel):
        def predict(self, queries: Any) -> Any:
            time.sleep(model_seconds)
            return super().predict(queries)

    def load(directory: Path, _embeddings: Path | None) -> Model:
        model = Model(*(TargetGeometry(**json.loads(text)) for text in sys.argv[2:]))
        model.version = directory.name
        return model

    run(Settings(**settings), load)
