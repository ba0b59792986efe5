"""Metrics of image builds."""

from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.image_build.build_facts import SetBuildStatus
from treenail.controllers.image_build.writer import BuildMetrics
from treenail.controllers.runtime.controller_metrics import ControllerMetrics

CONFIG = MachineOSConfig.from_json(
    {
        "metadata": {
            "name": "worker",
            "annotations": {"machineconfiguration.openshift.io/current-machine-os-build": "b"},
        },
        "spec": {"machineConfigPool": {"name": "worker"}},
    }
)
BUILD = MachineOSBuild.from_json(
    {
        "metadata": {"name": "b"},
        "spec": {"machineOSConfig": {"name": "worker"}},
        "status": {
            "buildStart": "2026-01-01T00:00:00Z",
            "conditions": [{"type": "Building", "status": "True"}],
        },
    }
)


def test_metrics_have_the_names_of_the_operator() -> None:
    metrics = ControllerMetrics()
    found = BuildMetrics(metrics, lambda: ([CONFIG], {"b": BUILD}))
    began = 1767225600.0
    busy = SetBuildStatus("b", BuildState.BUILDING, "RegistryBusy", "busy")
    found.record_status(busy, BUILD, "worker", began)
    found.record_status(SetBuildStatus("b", BuildState.SUCCEEDED), BUILD, "worker", began + 20.0)
    found.record_push("worker", 3.0)
    lines = metrics.render_text().splitlines()
    for line in (
        'ocl_build_state{pool="worker",state="Building"} 1.0',
        'ocl_build_state{pool="worker",state="Failed"} 0.0',
        'ocl_build_start_timestamp_seconds{pool="worker"} 1.7672256e+09',
        'ocl_active_builds{pool="worker"} 1.0',
        'ocl_build_total{pool="worker",result="Succeeded"} 1.0',
        'ocl_build_retries_total{pool="worker",reason="RegistryBusy"} 1.0',
        'ocl_build_duration_seconds_sum{pool="worker"} 20.0',
        'ocl_image_push_duration_seconds_sum{pool="worker"} 3.0',
        "mco_mosc_count 1.0",
    ):
        assert line in lines
