"""The manifests of monitoring: alerts and dashboard use metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.clock import FakeClock
from treenail.cli.controller.main import main
from treenail.controllers.drain.controller import DrainMetrics
from treenail.controllers.rollout.pool_metrics import PoolMetrics, compute_pool_tables
from treenail.controllers.runtime.controller_metrics import PREFIX, ControllerMetrics
from treenail.controllers.runtime.workers import WorkerMetrics
from treenail.daemon.local import metrics as node_metrics
from treenail.manifests.installation import InstallOptions
from treenail.manifests.monitoring import build_monitoring, build_rule_groups
from treenail.provisioning.machines.request_recorder import RequestMetrics, add_token_metrics
from treenail.provisioning.tokens.tokens import TokenTable

NAME = re.compile(r"\b(?:treenail|mcd)_[a-z_]+")
ALERTS = Path(__file__).parents[2] / "agent/treenail/manifests/monitoring_files/alerts.yaml"
# Added by ControllerRuntime, which needs a cluster.
OF_RUNTIME = {f"{PREFIX}{name}" for name in ("leader", "watch_silence_seconds", "watch_degraded")}


def known_metrics() -> set[str]:
    metrics = ControllerMetrics()
    WorkerMetrics(metrics)
    DrainMetrics(metrics)
    PoolMetrics(metrics, FakeClock(), list, lambda _node: None)
    RequestMetrics(metrics, lambda _: True)
    add_token_metrics(metrics, TokenTable, FakeClock())
    served = set(re.findall(r"^# TYPE (\S+)", metrics.render_text(), re.MULTILINE))
    tables = {PREFIX + table.name for table in compute_pool_tables([], 0.0)}
    buckets = {f"{name}_bucket" for name in served if name.endswith("_seconds")}
    return served | buckets | tables | OF_RUNTIME | set(node_metrics._HELP)


def rules() -> list[dict[str, Any]]:
    groups: Any = build_rule_groups()["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    dashboard = next(
        part for part in build_monitoring(InstallOptions()) if part["kind"] == "ConfigMap"
    )
    data: Any = dashboard["data"]
    panels = json.loads(data["treenail.json"])["panels"]
    return [
        *(rule["expr"] for rule in rules()),
        *(panel["targets"][0]["expr"] for panel in panels),
    ]


def test_alerts_and_panels_use_metrics_that_exist() -> None:
    used = {name for each in expressions() for name in NAME.findall(each)}
    assert used - known_metrics() == set()
    assert len(used) > 10


def test_monitoring_is_printed_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    def kinds(*arguments: str) -> list[str]:
        assert main(["manifests", "--namespace", "ops", *arguments]) == 0
        found = list(yaml.safe_load_all(capsys.readouterr().out))
        assert all(each["metadata"].get("namespace") in (None, "ops", "default") for each in found)
        return [each["kind"] for each in found]

    more = ["Service", "PodMonitor", "PrometheusRule", "ConfigMap"]
    assert kinds("--monitoring") == [*kinds(), *more]
    assert main(["manifests", "--monitoring", "--only", "agent"]) == 64
    assert main(["manifests", "--metrics-from", "monitoring", "--only", "agent"]) == 64


def test_server_has_a_monitor_in_its_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    def list_monitors(*arguments: str) -> list[Any]:
        assert main(["manifests", "--monitoring", *arguments]) == 0
        found = yaml.safe_load_all(capsys.readouterr().out)
        return [each for each in found if each["kind"] in ("PodMonitor", "DaemonSet")]

    assert len(list_monitors()) == 1
    daemonset, _, monitor = list_monitors(
        "--enable=rollout,serve", "--serve-namespace=edge", "-n", "core"
    )
    assert monitor["metadata"]["namespace"] == "edge"
    pod = daemonset["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {each["name"] for each in pod["spec"]["containers"][0]["ports"]}
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_dashboard_is_json_with_one_panel_per_expression() -> None:
    (config_map,) = [
        each for each in build_monitoring(InstallOptions()) if each["kind"] == "ConfigMap"
    ]
    dashboard = json.loads(config_map["data"]["treenail.json"])  # type: ignore[index]  # a dict
    assert dashboard["title"] == "treenail"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"])


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert len(rule["annotations"]["summary"]) < 80
        # The meaning, and then a command or another remedy.
        sentences = rule["annotations"]["description"].split(". ")
        assert len(sentences) >= 2, rule["alert"]
        assert "\n" not in rule["annotations"]["description"]


def test_alerts_of_nodes_use_metrics_of_nodes_only() -> None:
    # Under the Machine Config Operator no controller of treenail runs.
    groups: Any = build_rule_groups()["groups"]
    (nodes,) = [group["rules"] for group in groups if group["name"] == "treenail-nodes"]
    assert {name for rule in nodes for name in NAME.findall(rule["expr"])} <= set(
        node_metrics._HELP
    )


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here: install the package prometheus"
)


def run_promtool(*arguments: str | Path) -> None:
    checked = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=30
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.process
@needs_promtool
def test_promtool_accepts_alerts_and_panels(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions())
    ]
    panels = tmp_path / "panels.yaml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    run_promtool("check", "rules", ALERTS, panels)


# Series from minute 0 to 20, the alert, and whether it fires after 20 minutes.
SERIES = [
    ('treenail_controller_pool_halted{pool="worker",pod="a"}', "1x20", "RolloutHalted", True),
    ('treenail_controller_pool_halted{pool="worker",pod="a"}', "0x20", "RolloutHalted", False),
    (
        'treenail_controller_pool_condition{pool="worker",type="Degraded"}',
        "1x20", "PoolDegraded", True,
    ),
    (
        'treenail_controller_pool_condition{pool="worker",type="Updating"}',
        "1x20", "PoolDegraded", False,
    ),
    ('treenail_controller_pool_nodes{pool="a",state="Degraded"}', "2x20", "NodesDegraded", True),
    ('treenail_controller_pool_nodes{pool="a",state="Done"}', "2x20", "NodesDegraded", False),
    ("treenail_controller_longest_drain_seconds", "3601x20", "DrainLong", True),
    ('treenail_controller_leader{pod="a"}', "0x20", "NoLeader", True),
    ('treenail_controller_leader{pod="a"}', "1x20", "NoLeader", False),
    (
        'treenail_controller_ignition_requests_total{pool="a",version="",outcome="failed"}',
        "0+1x20", "NewMachinesFail", True,
    ),
    (
        'treenail_controller_ignition_requests_total{pool="a",version="",outcome="served"}',
        "0+1x20", "NewMachinesFail", False,
    ),
    ('treenail_controller_ignition_tokens{state="overused"}', "1x20", "TokenOverused", True),
    ('treenail_controller_ignition_tokens{state="used"}', "1x20", "TokenOverused", False),
    ("mcd_config_drift", "1700000000x20", "NodeDrift", True),
    ("mcd_config_drift", "0x20", "NodeDrift", False),
    ('treenail_last_update_end{outcome="failed"}', "60x20", "NodeUpdateFailed", True),
    ('treenail_last_update_end{outcome="done"}', "60x20", "NodeUpdateFailed", False),
    ('treenail_last_update_end{outcome="failed"}', "-3600x20", "NodeUpdateFailed", False),
]  # fmt: skip


def add_slope(values: str) -> str:
    return values if "+" in values else values.replace("x", "+0x")


@pytest.mark.process
@needs_promtool
def test_alerts_fire_on_the_series_that_they_mean(tmp_path: Path) -> None:
    cases = [
        {
            "interval": "1m",
            "input_series": [
                {
                    "series": series,
                    "values": values if "+" in values else values.replace("x", "+0x"),
                }
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="Treenail{alert}",alertstate="firing"}})',
                    "eval_time": "20m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for series, values, alert, fires in SERIES
    ]
    test = tmp_path / "test.yaml"
    test.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases})
    )
    run_promtool("test", "rules", test)
