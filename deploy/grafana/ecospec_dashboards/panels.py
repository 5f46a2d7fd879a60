"""Panels and dashboards in the house style: every panel has a unit and a description that names its metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries, trend
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from .queries import ORCHESTRATORS, PREDICTORS

METRIC = re.compile(r"\becospec_[a-z0-9_]+")
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "ecospec"
HEIGHT = 9  # of every graph, so that rows end together
GREEN, YELLOW, RED = "green", "yellow", "red"
Level = tuple[float | None, str]  # from this value on, in this colour; the first one is None


@dataclass(frozen=True)
class Query:
    """legend: Grafana's, with {{label}} for the value of a label."""

    expr: str
    legend: str = ""


def described(text: str, queries: Sequence[Query]) -> str:
    """The text and the metrics, each once, in order."""
    names = dict.fromkeys(name for query in queries for name in METRIC.findall(query.expr))
    return f"{text}\n\nMetrics: {', '.join(f'`{name}`' for name in names)}."


def thresholds(*levels: Level) -> build.ThresholdsConfig:
    steps = [dashboard.Threshold(value=value, color=color) for value, color in levels]
    return build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _common(panel: Any, title: str, text: str, unit: str, queries: Sequence[Query], span: int, height: int) -> Any:
    panel = panel.title(title).description(described(text, queries)).unit(unit)
    return panel.datasource(SOURCE).span(span).height(height)


def number(title: str, text: str, unit: str, expr: str, *levels: Level, decimals: int = 2, span: int = 4) -> Any:
    """One figure with its recent course behind it."""
    query = Query(expr, title)
    panel = _common(stat.Panel(), title, text, unit, [query], span, 5)
    panel = panel.with_target(prometheus.Dataquery().expr(expr).legend_format(title).range().ref_id("A"))
    panel = panel.reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel = panel.graph_mode(common.BigValueGraphMode.AREA).color_mode(common.BigValueColorMode.VALUE)
    return panel.decimals(decimals).thresholds(thresholds(*(levels or ((None, "blue"),))))


def course(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    stacked: bool = False,
    most: float | None = None,
    zero: bool = True,
) -> Any:
    """Lines over time, or areas on top of each other. most: end of the axis; zero: where it begins."""
    panel = _common(timeseries.Panel(), title, text, unit, queries, span, HEIGHT)
    for ref, query in zip(ascii_uppercase, queries, strict=False):
        panel = panel.with_target(
            prometheus.Dataquery().expr(query.expr).legend_format(query.legend).range().ref_id(ref)
        )
    legend = parts.VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE).show_legend(True)
    legend = legend.placement(common.LegendPlacement.BOTTOM).calcs(["lastNotNull", "mean", "max"])
    panel = panel.legend(legend.sort_by("Mean").sort_desc(True))
    tooltip = parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    panel = panel.tooltip(tooltip).line_width(1).fill_opacity(40 if stacked else 5)
    panel = panel.show_points(common.VisibilityMode.NEVER)
    if stacked:
        panel = panel.stacking(parts.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if zero:
        panel = panel.min(0)
    return panel if most is None else panel.max(most)


def curve(title: str, text: str, unit: str, label: str, *queries: Query, span: int = 12) -> Any:
    """Values against a label whose values are numbers, over the whole time range."""
    panel = _common(trend.Panel(), title, text, unit, queries, span, HEIGHT)
    names = {}
    for ref, query in zip(ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).instant().format(PromQueryFormat.TABLE).ref_id(ref)
        panel = panel.with_target(target)
        names["Value" if len(queries) == 1 else f"Value #{ref}"] = query.legend
    for kind, options in (
        ("joinByField", {"byField": label, "mode": "outer"}),
        ("convertFieldType", {"conversions": [{"targetField": label, "destinationType": "number"}]}),
        ("filterFieldsByName", {"include": {"pattern": f"^({label}|Value.*)$"}}),
        ("sortBy", {"fields": {}, "sort": [{"field": label}]}),
        ("organize", {"excludeByName": {}, "indexByName": {}, "renameByName": names}),
    ):
        panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val=kind, options=options))
    legend = parts.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    panel = panel.legend(legend.placement(common.LegendPlacement.BOTTOM))
    return panel.x_field(label).show_points(common.VisibilityMode.ALWAYS).min(0)


def map_of_layers(title: str, text: str, unit: str, expr: str, span: int = 12) -> Any:
    """Time by layer; the colour is the value."""
    query = Query(expr, "{{layer}}")
    panel = _common(heatmap.Panel(), title, text, unit, [query], span, HEIGHT)
    panel = panel.with_target(prometheus.Dataquery().expr(expr).legend_format(query.legend).range().ref_id("A"))
    colors = heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Viridis").steps(64)
    panel = panel.calculate(False).color(colors).cell_values(heatmap.CellValues().unit(unit).decimals(2))
    return panel.cell_gap(0).show_legend().y_axis(heatmap.YAxisConfig().axis_label("MoE layer"))


def page(name: str, title: str, text: str, *rows: tuple[str, Sequence[Any]], predictors: bool = False) -> Any:
    """A dashboard. rows: title and panels; predictors: it also lets the reader choose predictors."""
    link = build.DashboardLink("EcoSpec").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    made = (
        build.Dashboard(title)
        .uid(f"{TAG}-{name}")
        .description(text)
        .tags([TAG])
        .editable()
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(link.as_dropdown(True).include_vars(True).keep_time(True))
        .with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("model", "Model", "label_values(ecospec_model_info, model)"))
        .with_variable(
            _variable(ORCHESTRATORS, "Orchestrator", 'label_values(ecospec_model_info{model=~"$model"}, instance)')
        )
    )
    if predictors:
        query = 'label_values(ecospec_predictor_model_info{target=~"$model"}, instance)'
        made = made.with_variable(_variable(PREDICTORS, "Predictor", query))
    for heading, panels in rows:
        made = made.with_row(build.Row(heading))
        for panel in panels:
            made = made.with_panel(panel)
    built = made.build()
    for number_of_panel, panel in enumerate(built.panels, start=1):
        panel.id_val = number_of_panel
    for variable in built.templating.list_val:  # of interval variables only, and not in Grafana's own types
        variable.auto = variable.auto_min = variable.auto_count = None
    return built


def _variable(name: str, label: str, query: str) -> build.QueryVariable:
    everything = dashboard.VariableOption(selected=True, text="All", value="$__all")
    return (
        build.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .current(everything)
        .multi(True)
        .include_all(True)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
