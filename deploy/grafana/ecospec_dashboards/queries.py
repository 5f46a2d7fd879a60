"""PromQL of the panels. A ratio whose denominator is zero is no number instead of a wrong one."""

from __future__ import annotations

ORCHESTRATORS = "instance"  # variables of the dashboards
PREDICTORS = "predictor"
NOW = "$__rate_interval"
ALL = "$__range"  # of an instant query: the dashboard's whole time range


def select(metric: str, of: str = ORCHESTRATORS, **labels: str) -> str:
    """The series of the chosen processes; a label that starts with ~ is a regular expression."""
    matchers = [f'instance=~"${of}"']
    for name, value in labels.items():
        matchers.append(f'{name}=~"{value[1:]}"' if value.startswith("~") else f'{name}="{value}"')
    return f"{metric}{{{', '.join(matchers)}}}"


def total(expr: str, by: str = "", how: str = "sum") -> str:
    return f"{how} by ({by}) ({expr})" if by else f"{how}({expr})"


def rate(metric: str, by: str = "", of: str = ORCHESTRATORS, window: str = NOW, **labels: str) -> str:
    """Per second, of all chosen processes together."""
    return total(f"rate({select(metric, of, **labels)}[{window}])", by)


def value(metric: str, by: str = "", of: str = ORCHESTRATORS, how: str = "sum", **labels: str) -> str:
    """Of a gauge."""
    return total(select(metric, of, **labels), by, how)


def ratio(above: str, below: str, shared: bool = False) -> str:
    """shared: every series of `above` is divided by the one of `below`."""
    return f"{above} / {'on () group_left () ' if shared else ''}({below} > 0)"


def mean(histogram: str, by: str = "", of: str = ORCHESTRATORS, **labels: str) -> str:
    return ratio(
        rate(f"{histogram}_sum", by, of, **labels),
        rate(f"{histogram}_count", by, of, **labels),
    )


def quantile(share: float, histogram: str, of: str = ORCHESTRATORS, **labels: str) -> str:
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', 'le', of, **labels)})"


def sortable_layers(expr: str) -> str:
    """Layers as 003, 042, 117: a heat map sorts its rows by name."""
    padded = f'label_replace({expr}, "layer", "00$1", "layer", "([0-9])")'
    return f'label_replace({padded}, "layer", "0$1", "layer", "([0-9][0-9])")'
