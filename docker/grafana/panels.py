"""Elements of a Grafana dashboard: queries, and panels without a position."""

from __future__ import annotations

from typing import Any

Panel = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${source}"}
# What the variables on top choose; each goes into braces. `SELECT`: servers. `OF_MODEL`, `ENGINE`, `OF_ENGINE`: their
# series of the models, of the engines, and of both. `WORK`: requests to the models, of the priorities. Requests that
# ask nothing of a model, such as probes, have no priority, and so are never among them.
SELECT = 'job="$job", namespace=~"$namespace", service=~"$service", instance=~"$instance"'
OF_MODEL = f'{SELECT}, model=~"$model"'
ENGINE = f'{SELECT}, engine=~"$engine"'
OF_ENGINE = f'{OF_MODEL}, engine=~"$engine"'
WORK = f'{OF_MODEL}, priority=~"$priority"'
DCGM = 'Hostname=~"$gpu_host"'  # of NVIDIA's exporter, whose series have no label in common with ours
WORK_ON_ENGINE = f'{WORK}, engine=~"$engine"'
RATE = "[$__rate_interval]"
GREEN, YELLOW, RED = "green", "yellow", "red"


def target(expr: str, legend: str = "", **extra: Any) -> Panel:
    """One query of a panel."""
    return {"datasource": SOURCE, "editorMode": "code", "expr": expr, "legendFormat": legend, "range": True, **extra}


def with_exemplars(query: Panel) -> Panel:
    """A query of a histogram's buckets, with a dot for each request that Prometheus has an exemplar of."""
    return {**query, "exemplar": True}


def steps(*bounds: tuple[str, float | None]) -> Panel:
    """Colors by value, lowest first."""
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in bounds]}


def panel(kind: str, title: str, help_: str, targets: list[Panel], width: int, height: int, **more: Any) -> Panel:
    """A panel without a position."""
    named = [{"refId": chr(ord("A") + i), **each} for i, each in enumerate(targets)]
    return {
        "type": kind, "title": title, "description": help_, "datasource": SOURCE, "targets": named,
        "gridPos": {"w": width, "h": height}, **more,
    }  # fmt: skip


def stat(title: str, help_: str, expr: str, unit: str, thresholds: Panel, width: int = 3) -> Panel:
    """One number, colored by how bad it is."""
    defaults = {"unit": unit, "thresholds": thresholds, "color": {"mode": "thresholds"}, "noValue": "no traffic"}
    options = {
        "colorMode": "background", "graphMode": "area", "justifyMode": "auto", "textMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }  # fmt: skip
    fields = {"defaults": defaults, "overrides": []}
    return panel("stat", title, help_, [target(expr)], width, 5, fieldConfig=fields, options=options)


def lines(
    title: str,
    help_: str,
    targets: list[Panel],
    unit: str,
    *,
    width: int = 8,
    stacked: bool = False,
    highest: float | None = None,
) -> Panel:
    """Curves over time."""
    custom = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 40 if stacked else 8, "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }  # fmt: skip
    defaults: Panel = {"unit": unit, "min": 0, "custom": custom, "color": {"mode": "palette-classic"}}
    if highest is not None:
        defaults["max"] = highest
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    fields = {"defaults": defaults, "overrides": []}
    return panel("timeseries", title, help_, targets, width, 9, fieldConfig=fields, options=options)


def heat_map(title: str, help_: str, expr: str, unit: str, width: int = 8) -> Panel:
    """A histogram over time."""
    options = {
        "calculate": False, "cellGap": 1, "legend": {"show": True}, "rowsFrame": {"layout": "auto"},
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5, "scale": "exponential"},
        "yAxis": {"axisPlacement": "left", "unit": unit}, "filterValues": {"le": 1e-9},
    }  # fmt: skip
    queries = [target(expr, "{{le}}", format="heatmap")]
    return panel("heatmap", title, help_, queries, width, 9, options=options)


def rate(metric: str, labels: str = SELECT, by: str = "") -> str:
    """Sum of a counter's rate a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}{RATE}))"


def quantile(share: float, metric: str, labels: str = SELECT) -> str:
    """The quantile `share` of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, 'le')})"


def mean(metric: str, labels: str = SELECT, by: str = "") -> str:
    """The average observation."""
    return f"{rate(f'{metric}_sum', labels, by)} / {rate(f'{metric}_count', labels, by)}"


def several(name: str, label: str, query: str, everything: str = ".*") -> Panel:
    """A choice of any number of values; at first all of them, and what has no such label."""
    chosen = {"selected": True, "text": "All", "value": "$__all"}
    return variable(name, label, query, includeAll=True, multi=True, allValue=everything, current=chosen)


def variable(name: str, label: str, query: str, **more: Any) -> Panel:
    """A choice on top of the dashboard, filled from Prometheus."""
    return {
        "type": "query", "name": name, "label": label, "datasource": SOURCE, "refresh": 2, "sort": 1,
        "query": {"query": query, "refId": name}, **more,
    }  # fmt: skip
