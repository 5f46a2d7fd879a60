"""Writes dashboards/*.json from ecospec_dashboards: python deploy/grafana/generate.py [DIRECTORY]"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ecospec_dashboards import DASHBOARDS
from grafana_foundation_sdk.cog.encoder import JSONEncoder

HERE = Path(__file__).resolve().parent


def render() -> dict[str, str]:
    """File name -> content; the same code gives the same bytes."""
    return {
        f"{made.uid}.json": json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for made in (make() for make in DASHBOARDS)
    }


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "dashboards")
