"""Manifests of monitoring: Service, PodMonitor, PrometheusRule and Grafana dashboard.

PodMonitor and PrometheusRule are kinds of the Prometheus operator. The dashboard is a ConfigMap
with the label that Grafana's sidecar looks for. Alerts and dashboard are files of this package,
which other installations of Prometheus and Grafana load unchanged.
"""

from importlib import resources

import yaml

from treenail.api.decode import Json
from treenail.manifests import ignition_server, installation

_MONITORING_API = "monitoring.coreos.com/v1"
DASHBOARD = "treenail-dashboard"


def build_monitoring(
    options: installation.InstallOptions, server_namespace: str = ""
) -> list[Json]:
    """Build the manifests of monitoring, in the namespace of the controllers.

    ``server_namespace`` is that of the Ignition server; empty without a server.
    """
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _build_metadata(options, installation.NAME),
            "spec": {
                "selector": installation.SELECTOR,
                "ports": [{"name": "metrics", "port": installation.PORT, "targetPort": "metrics"}],
            },
        },
        {
            "apiVersion": _MONITORING_API,
            "kind": "PodMonitor",
            "metadata": _build_metadata(options, installation.NAME),
            "spec": {
                "selector": {"matchLabels": installation.SELECTOR},
                "podMetricsEndpoints": [{"port": "metrics", "interval": "30s"}],
            },
        },
        {
            "apiVersion": _MONITORING_API,
            "kind": "PrometheusRule",
            "metadata": _build_metadata(options, installation.NAME),
            "spec": build_rule_groups(),
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _build_metadata(options, DASHBOARD, grafana_dashboard="1"),
            "data": {"treenail.json": _read_file("dashboard.json")},
        },
        *([_build_server_monitor(server_namespace)] if server_namespace else []),
    ]


def _build_server_monitor(namespace: str) -> Json:
    """Build the PodMonitor of the Ignition server, in its namespace."""
    return {
        "apiVersion": _MONITORING_API,
        "kind": "PodMonitor",
        "metadata": {
            "name": ignition_server.NAME,
            "namespace": namespace,
            "labels": {**installation.LABELS, "app.kubernetes.io/name": ignition_server.NAME},
        },
        "spec": {
            "selector": {"matchLabels": ignition_server.SELECTOR},
            "podMetricsEndpoints": [{"port": "metrics", "interval": "30s"}],
        },
    }


def build_rule_groups() -> Json:
    """Build the groups of alerts, in the format of a Prometheus rule file."""
    groups: Json = yaml.safe_load(_read_file("alerts.yaml"))
    return groups


def _read_file(name: str) -> str:
    folder = resources.files("treenail.manifests").joinpath("monitoring_files")
    return folder.joinpath(name).read_text("utf-8")


def _build_metadata(options: installation.InstallOptions, name: str, **labels: str) -> Json:
    return {
        "name": name,
        "namespace": options.namespace,
        "labels": {**installation.LABELS, **labels},
    }
