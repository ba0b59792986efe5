"""Builds the manifests of monitoring: Service, PodMonitor, PrometheusRule and Grafana dashboard.

PodMonitor and PrometheusRule are kinds of the Prometheus operator. The dashboard is a ConfigMap
with the label that Grafana's sidecar looks for.
"""

import json

from treenail.api.decode import Json
from treenail.controllers.install.installation import (
    LABELS,
    NAME,
    PORT,
    SELECTOR,
    InstallOptions,
)

_MONITORING_API = "monitoring.coreos.com/v1"
_PREFIX = "treenail_controller_"
_DASHBOARD = "treenail-dashboard"

# Name, expression, time for which it must hold, severity, summary.
_ALERTS = (
    (
        "TreenailRolloutHalted",
        f"max by (pool) ({_PREFIX}pool_halted) == 1",
        "1m",
        "critical",
        (
            "The rollout of pool {{ $labels.pool }} is halted: a node failed. The condition "
            "Degraded of the pool names the node and the remedy."
        ),
    ),
    (
        "TreenailPoolDegraded",
        f'max by (pool) ({_PREFIX}pool_condition{{type="Degraded"}}) == 1',
        "15m",
        "warning",
        "Pool {{ $labels.pool }} is degraded. Its condition Degraded names the cause.",
    ),
    (
        "TreenailPoolStalled",
        f'max by (pool) ({_PREFIX}pool_condition{{type="Stalled"}}) == 1',
        "15m",
        "warning",
        (
            "The rollout of pool {{ $labels.pool }} makes no progress. Its condition Stalled "
            "names the cause."
        ),
    ),
    (
        "TreenailNodesDegraded",
        (
            f"max by (pool) (sum by (pool, pod) "
            f'({_PREFIX}pool_nodes{{state=~"Degraded|Unreconcilable"}})) > 0'
        ),
        "15m",
        "warning",
        (
            "{{ $value }} nodes of pool {{ $labels.pool }} are degraded. Their annotation reason "
            "names the cause and the remedy."
        ),
    ),
    (
        "TreenailRolloutOld",
        f"max by (pool) ({_PREFIX}pool_target_age_seconds) > 7 * 24 * 3600",
        "1h",
        "info",
        "Pool {{ $labels.pool }} has been updating for more than a week.",
    ),
    (
        "TreenailDrainLong",
        f"max({_PREFIX}longest_drain_seconds) > 3600",
        "5m",
        "warning",
        (
            "A drain has been running for more than an hour. The annotation "
            "treenail.io/drain-blocked of the Node names the pods that block it."
        ),
    ),
    (
        "TreenailNoLeader",
        f"absent({_PREFIX}leader == 1)",
        "10m",
        "critical",
        "No process of treenail-controller leads: no node gets a target, and no node is drained.",
    ),
    (
        "TreenailWatchSilent",
        f"max by (resource) ({_PREFIX}watch_silence_seconds) > 900",
        "5m",
        "warning",
        "The API server has sent nothing about {{ $labels.resource }} for 15 minutes.",
    ),
    (
        "TreenailReconcileErrors",
        f"sum by (controller) (rate({_PREFIX}reconcile_errors_total[15m])) > 0.05",
        "30m",
        "warning",
        "The controller {{ $labels.controller }} fails repeatedly. Its log names the cause.",
    ),
    (
        "TreenailNodeDrift",
        "mcd_config_drift > 0",
        "15m",
        "warning",
        "Node {{ $labels.instance }} differs from its config. On the node, run: treenail drift",
    ),
    (
        "TreenailNodeUpdateFailed",
        'time() - treenail_last_update_end{outcome="failed"} < 3600',
        "1m",
        "warning",
        "The last update of node {{ $labels.instance }} failed. On the node, run: treenail history",
    ),
)

# Title, unit, expression, legend.
_PANELS = (
    (
        "Nodes by state",
        "short",
        f"max by (pool, state) ({_PREFIX}pool_nodes)",
        "{{pool}} {{state}}",
    ),
    (
        "Updated nodes",
        "percentunit",
        (
            f'max by (pool) ({_PREFIX}pool_machines{{count="updated"}}) / '
            f'clamp_min(max by (pool) ({_PREFIX}pool_machines{{count="total"}}), 1)'
        ),
        "{{pool}}",
    ),
    ("Halted rollouts", "short", f"max by (pool) ({_PREFIX}pool_halted)", "{{pool}}"),
    (
        "Waits by reason",
        "short",
        f"max by (pool, reason) ({_PREFIX}pool_waiting) > 0",
        "{{pool}} {{reason}}",
    ),
    ("Age of the target", "s", f"max by (pool) ({_PREFIX}pool_target_age_seconds)", "{{pool}}"),
    (
        "Duration of updates, 95th percentile",
        "s",
        (
            "histogram_quantile(0.95, "
            f"sum by (le) (rate({_PREFIX}update_duration_seconds_bucket[1h])))"
        ),
        "95th percentile",
    ),
    (
        "Phases of the last update",
        "s",
        "avg by (phase) (treenail_last_update_phase_seconds)",
        "{{phase}}",
    ),
    ("Rolled back updates", "short", "sum(treenail_recorded_rollbacks)", "rolled back"),
    ("Drains by state", "short", f"max by (state) ({_PREFIX}drains)", "{{state}}"),
    (
        "Watch silence",
        "s",
        f"max by (resource) ({_PREFIX}watch_silence_seconds)",
        "{{resource}}",
    ),
)


def build_monitoring(options: InstallOptions) -> list[Json]:
    """Build the manifests of monitoring, in the namespace of the controllers."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _build_metadata(options, NAME),
            "spec": {
                "selector": SELECTOR,
                "ports": [{"name": "metrics", "port": PORT, "targetPort": "metrics"}],
            },
        },
        {
            "apiVersion": _MONITORING_API,
            "kind": "PodMonitor",
            "metadata": _build_metadata(options, NAME),
            "spec": {
                "selector": {"matchLabels": SELECTOR},
                "podMetricsEndpoints": [{"port": "metrics", "interval": "30s"}],
            },
        },
        {
            "apiVersion": _MONITORING_API,
            "kind": "PrometheusRule",
            "metadata": _build_metadata(options, NAME),
            "spec": build_rule_groups(),
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _build_metadata(options, _DASHBOARD, grafana_dashboard="1"),
            "data": {"treenail.json": json.dumps(build_dashboard(), indent=1, sort_keys=True)},
        },
    ]


def build_rule_groups() -> Json:
    """Build the groups of alerts, in the format of a Prometheus rule file."""
    rules = [
        {
            "alert": name,
            "expr": expression,
            "for": duration,
            "labels": {"severity": severity},
            "annotations": {"summary": summary},
        }
        for name, expression, duration, severity, summary in _ALERTS
    ]
    return {"groups": [{"name": "treenail", "rules": rules}]}


def build_dashboard() -> Json:
    """Build the dashboard: one time series panel for each expression, two in a row."""
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
        }
        for number, (title, unit, expression, legend) in enumerate(_PANELS)
    ]
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "treenail",
        "title": "treenail",
        "tags": ["treenail"],
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [variable]},
        "panels": panels,
    }


def _build_metadata(options: InstallOptions, name: str, **labels: str) -> Json:
    return {"name": name, "namespace": options.namespace, "labels": {**LABELS, **labels}}
