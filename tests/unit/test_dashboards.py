"""Dashboards, recording rules and alerts ask for metrics that are exported, in a way that fits their type."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
import yaml
from monitoring import GRAFANA, PROMETHEUS, ROOT, Exported, Rule, dashboards, exported, panels, rules
from promql import groupings, selectors, unguarded

SCRAPED = {"instance", "job"}  # labels that Prometheus adds
LEGEND = re.compile(r"{{(\w+)}}")


@pytest.fixture(scope="module")
def known() -> dict[str, Exported]:
    return exported()


@pytest.fixture(scope="module")
def recorded() -> set[str]:
    return {rule.name for rule in rules("recording.yml")}


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel, variable, recording rule and alert."""
    for where, panel in panels():
        for target in panel["targets"]:
            yield f"{where}, {target['refId']}", target["expr"]
    for file, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{file}, variable {variable['name']}", variable["query"]
    for file in ("recording.yml", "alerts.yml"):
        for rule in rules(file):
            yield f"{file}: {rule.name}", rule.expr


def problems(expr: str, known: dict[str, Exported], recorded: set[str]) -> list[str]:
    """What keeps an expression from its data."""
    found, labels = [], set(SCRAPED)
    for asked in selectors(expr):
        if asked.name in recorded or asked.name == "up":
            metric = Exported("gauge", frozenset())
        elif asked.name in known:
            metric = known[asked.name]
        else:
            found.append(f"{asked.name} is not exported")
            continue
        labels |= metric.labels
        found += [f"{asked.name} has no label {label}" for label in asked.labels - metric.labels - SCRAPED]
        rated = asked.before in ("rate", "increase") and asked.range is not None
        if rated != (metric.kind in ("counter", "histogram")):
            found.append(f"{asked.name} is a {metric.kind}, but its rate is {'' if rated else 'not '}taken")
    return found + [f"there is no label {label} to group by" for label in groupings(expr) - labels]


def test_what_is_asked_for_is_exported(known: dict[str, Exported], recorded: set[str]) -> None:
    asked = list(expressions())
    assert len(asked) > 100
    wrong = {where: found for where, expr in asked if (found := problems(expr, known, recorded))}
    assert not wrong


def test_a_wrong_question_is_noticed(known: dict[str, Exported], recorded: set[str]) -> None:
    for expr, words in {
        "rate(ecospec_stepz_total[5m])": "ecospec_stepz_total is not exported",
        'rate(ecospec_steps_total{expert="3"}[5m])': "no label expert",
        "sum by (expert) (rate(ecospec_steps_total[5m]))": "no label expert to group by",
        "rate(ecospec_num_requests_running[5m])": "is a gauge, but its rate is taken",
        "sum(ecospec_steps_total)": "is a counter, but its rate is not taken",
        "rate(ecospec_steps_total)": "is a counter, but its rate is not taken",
        "ecospec:none:rate5m > 1": "ecospec:none:rate5m is not exported",
    }.items():
        assert any(words in problem for problem in problems(expr, known, recorded)), expr
    right = (
        'sum by (instance, phase) (rate(ecospec_step_seconds_sum{phase="total", job="x"}[5m])) + ecospec:tokens:rate5m'
    )
    assert not problems(right, known, recorded)


def test_no_ratio_divides_by_zero() -> None:
    assert not {where: found for where, expr in expressions() if (found := unguarded(expr))}
    assert not unguarded('a{b="/ c"} / on () group_left () (sum(rate(d[5m])) > 0)')
    for bad in ("a / b", "a / (b + 1)", "a / (b > 0) / c", "a / on () group_left () b", "(a / sum(b)) / (c > 0)"):
        assert unguarded(bad), bad


def test_every_panel_has_a_unit_and_names_its_metrics() -> None:
    seen = set()
    for where, panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], where
        text = panel["description"]
        names = {asked.name for target in panel["targets"] for asked in selectors(target["expr"])}
        assert names and all(f"`{name}`" in text for name in names), where
        assert len(text.split("Metrics:")[0].strip()) > 15, where
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, where
        for target in panel["targets"]:
            shown = set(LEGEND.findall(target.get("legendFormat", "")))
            assert shown <= groupings(target["expr"]), f"{where}: a label of the legend is summed away"
        assert where not in seen, "two panels of one type have one title"
        seen.add(where)


def test_every_dashboard_has_its_variables_and_no_panel_covers_another() -> None:
    assert [d["title"].split(" / ")[1] for d in dashboards().values()] == [
        "Expert footprint",
        "Predictor",
        "Serving",
        "Speculation",
        "HBM traffic",
    ]
    for file, dashboard in dashboards().items():
        variables = [v["name"] for v in dashboard["templating"]["list"]]
        assert variables[:3] == ["datasource", "model", "instance"], file
        for target in (t for p in dashboard["panels"] for t in p.get("targets", [])):
            used = set(re.findall(r"\$(?!__)(\w+)", target["expr"].replace("$1", "")))
            assert used and used <= set(variables), (file, target["expr"])
        ids = [p["id"] for p in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        cells: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & covered and max(x for x, _ in covered) < 24, (file, panel["title"])
            cells |= covered


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")  # which files cannot provision yet
def test_generating_again_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GRAFANA))
    import generate

    made = generate.render()
    checked_in = {path.name: path.read_text("utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert sorted(made) == sorted(checked_in)
    for name, text in made.items():
        assert text == checked_in[name], f"{name} is not what its code makes; run make dashboards."
    assert generate.render() == made
    for name in [n for n in sys.modules if n == "generate" or n.startswith("ecospec_dashboards")]:
        sys.modules.pop(name)


def heading(rule: Rule) -> str:
    assert rule.alert is not None
    return rule.alert["annotations"]["runbook"].partition("#")[2]


def test_every_alert_is_explained_and_has_a_unit_test() -> None:
    guide = (ROOT / "docs/operating.md").read_text("utf-8")
    sections = {part.splitlines()[0].lower(): part for part in guide.split("\n### ")[1:]}
    tests = yaml.safe_load((PROMETHEUS / "tests/rules_test.yml").read_text("utf-8"))["tests"]
    alerts = rules("alerts.yml")
    assert sorted(sections) == sorted(heading(rule) for rule in alerts)
    for rule in alerts:
        assert rule.alert is not None
        assert rule.alert["annotations"]["runbook"] == f"docs/operating.md#{rule.name.lower()}"
        assert rule.alert["labels"]["severity"] in ("page", "warning")
        assert "*Means:*" in sections[heading(rule)] and "*Do:*" in sections[heading(rule)], rule.name
        assert rule.alert["annotations"]["summary"].endswith("."), rule.name
    assert {rule.name for rule in alerts} == {test["name"] for test in tests if test["name"].startswith("EcoSpec")}
    for test in (test for test in tests if test["name"].startswith("EcoSpec")):
        cases = test.get("promql_expr_test", []) + test.get("alert_rule_test", [])
        expected = [case.get("exp_samples", case.get("exp_alerts")) for case in cases]
        assert [] in expected and any(expected), f"{test['name']} must be tested both quiet and firing"


def test_files_agree_with_each_other() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text("utf-8"))["datasources"][0]
    scraping = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    assert scraping["rule_files"] == ["recording.yml", "alerts.yml"]
    jobs = {job["job_name"] for job in scraping["scrape_configs"]}
    assert {job for job in jobs if re.fullmatch("ecospec-.*", job)} == {"ecospec-orchestrator", "ecospec-predictor"}
