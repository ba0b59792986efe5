"""Benchmark of rendering the MachineConfigs of one pool: validate, merge, name and parse."""

import base64
import time
from collections.abc import Callable, Iterable, Iterator

from bench.result import Result
from treenail.api.ignition.schema import IgnoredField
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.config.validation import validate_config
from treenail.controllers.render.controller import ValidatedConfigs
from treenail.controllers.render.render import ControllerConfig, render_pool

ROLE = "machineconfiguration.openshift.io/role"
REPEATS = 9
POOL = MachineConfigPool.from_json(
    {
        "kind": "MachineConfigPool",
        "metadata": {"name": "worker"},
        "spec": {"machineConfigSelector": {"matchLabels": {ROLE: "worker"}}},
    }
)


def measure(_seconds: float) -> Iterator[Result]:
    for count in (10, 100, 500):
        configs = build_configs(count, total_bytes=count * 1600)
        limit_ms = 60.0 if count == 500 else None
        duration_ms = measure_best_ms(configs, validate_config)
        yield Result(f"rendering {count} MachineConfigs of 1.6 kB", "ms", duration_ms, limit_ms)
        validated = ValidatedConfigs()
        render_pool(POOL, configs, ControllerConfig(), validate=validated.validate)
        duration_ms = measure_best_ms(configs, validated.validate)
        yield Result("  again, as the controller does", "ms", duration_ms, limit_ms)
    duration_ms = measure_best_ms(build_configs(50, total_bytes=160_000), validate_config)
    yield Result("rendering 50 MachineConfigs, 160 kB in total", "ms", duration_ms, 150.0)


def measure_best_ms(
    configs: list[MachineConfig], validate: Callable[[MachineConfig], Iterable[IgnoredField]]
) -> float:
    """Return the fastest of several runs: other processes slow down the rest."""
    times = []
    for _ in range(REPEATS):
        started_at = time.perf_counter()
        render_pool(POOL, configs, ControllerConfig(), validate=validate)
        times.append((time.perf_counter() - started_at) * 1000)
    return min(times)


def build_configs(count: int, *, total_bytes: int) -> list[MachineConfig]:
    """Build MachineConfigs with two files and a unit each."""
    size = total_bytes // count // 2 * 3 // 4
    return [build_config(number, size) for number in range(count)]


def build_config(number: int, size: int) -> MachineConfig:
    source = "data:;base64," + base64.b64encode(bytes(size)).decode()
    files = [
        {"path": f"/etc/part-{number}/{each}", "mode": 0o644, "contents": {"source": source}}
        for each in range(2)
    ]
    unit = {"name": f"part-{number}.service", "enabled": True, "contents": "[Service]\n"}
    return MachineConfig.from_json(
        {
            "metadata": {"name": f"{number:03d}-part", "labels": {ROLE: "worker"}},
            "spec": {
                "config": {
                    "ignition": {"version": "3.5.0"},
                    "storage": {"files": files},
                    "systemd": {"units": [unit]},
                }
            },
        }
    )
