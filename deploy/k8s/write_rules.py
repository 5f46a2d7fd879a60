"""Writes components/monitoring/rules.yaml, the Prometheus operator's form of deploy/prometheus/{recording,alerts}.yml:

python deploy/k8s/write_rules.py
"""

from __future__ import annotations

from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
SOURCES = ("recording.yml", "alerts.yml")
OUT = HERE / "components/monitoring/rules.yaml"
HEAD = "# Made by deploy/k8s/write_rules.py from deploy/prometheus; change it there.\n"


def render() -> str:
    groups = [
        group
        for name in SOURCES
        for group in yaml.safe_load((HERE.parent / "prometheus" / name).read_text(encoding="utf-8"))["groups"]
    ]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "ecospec", "labels": {"app.kubernetes.io/part-of": "ecospec"}},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8")
