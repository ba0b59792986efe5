"""The manifests of monitoring: alerts and dashboard use metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fakes.clock import FakeClock
from treenail.cli.controller.main import main
from treenail.controllers.drain.controller import DrainMetrics
from treenail.controllers.install.installation import InstallOptions
from treenail.controllers.install.monitoring import (
    build_dashboard,
    build_monitoring,
    build_rule_groups,
)
from treenail.controllers.rollout.pool_metrics import PoolMetrics, compute_pool_tables
from treenail.controllers.runtime.metrics import PREFIX, ControllerMetrics
from treenail.controllers.runtime.workers import WorkerMetrics
from treenail.daemon.local import metrics as node_metrics

NAME = re.compile(r"\b(?:treenail|mcd)_[a-z_]+")
# Added by ControllerRuntime, which needs a cluster.
OF_RUNTIME = {f"{PREFIX}leader", f"{PREFIX}watch_silence_seconds"}


def known_metrics() -> set[str]:
    metrics = ControllerMetrics()
    WorkerMetrics(metrics)
    DrainMetrics(metrics)
    PoolMetrics(metrics, FakeClock(), list)
    served = set(re.findall(r"^# TYPE (\S+)", metrics.render_text(), re.MULTILINE))
    tables = {PREFIX + table.name for table in compute_pool_tables([], 0.0)}
    buckets = {f"{name}_bucket" for name in served if name.endswith("_seconds")}
    return served | buckets | tables | OF_RUNTIME | set(node_metrics._HELP)


def expressions() -> list[str]:
    groups, dashboard = build_rule_groups(), build_dashboard()
    return [
        *(rule["expr"] for rule in groups["groups"][0]["rules"]),  # type: ignore[index]  # a list
        *(panel["targets"][0]["expr"] for panel in dashboard["panels"]),  # type: ignore[attr-defined]  # as above
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
    assert main(["manifests", "--monitoring", "--only", "agent"]) == 2


def test_dashboard_is_json_with_one_panel_per_expression() -> None:
    (config_map,) = [
        each for each in build_monitoring(InstallOptions()) if each["kind"] == "ConfigMap"
    ]
    dashboard = json.loads(config_map["data"]["treenail.json"])  # type: ignore[index]  # a dict
    assert dashboard["title"] == "treenail"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here: install the package prometheus"
)
def test_promtool_accepts_alerts_and_panels(tmp_path: Path) -> None:
    groups = build_rule_groups()
    recorded = [
        {"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions())
    ]
    groups["groups"].append({"name": "panels", "rules": recorded})  # type: ignore[attr-defined]  # a list
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(groups))
    checked = subprocess.run(
        ["promtool", "check", "rules", str(rules)],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
