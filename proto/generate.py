"""Generate the stubs of predictor.proto: python proto/generate.py [folder], by default the package ecospec_proto itself."""

from __future__ import annotations

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
SOURCE = "ecospec/predictor/v1/predictor.proto"


def generate(folder: Path) -> list[Path]:
    """Write predictor_pb2.py, predictor_pb2.pyi and predictor_pb2_grpc.py to folder. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        includes = [f"-I{HERE}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *includes, *outputs, SOURCE]) != 0:
            raise RuntimeError(f"protoc refused {SOURCE}; its message is above.")
        written = []
        for made in sorted((Path(scratch) / SOURCE).parent.iterdir()):
            # The stubs live in one flat package, not in the folders of the proto package.
            text = re.sub(r"^from ecospec\.predictor\.v1 import", "from . import", made.read_text("utf-8"), flags=re.M)
            (folder / made.name).write_text(text, "utf-8")
            written.append(folder / made.name)
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "ecospec_proto"):
        print(f"wrote {path}")
