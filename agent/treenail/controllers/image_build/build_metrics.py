"""Metrics of image builds, with the names that the Machine Config Operator gives them."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clock import parse_rfc3339
from treenail.controllers.image_build.actions import SetBuildStatus
from treenail.controllers.image_build.status import UNSCHEDULABLE
from treenail.controllers.runtime.metrics import SLOW_BUCKETS_S, ControllerMetrics, MetricTable

STATES = tuple(state for state in BuildState if state is not BuildState.INITIAL)
ReadObjects = Callable[[], tuple[Iterable[MachineOSConfig], Mapping[str, MachineOSBuild]]]


class BuildMetrics:
    """Counts what ends, and computes the gauges of pools at each scrape."""

    def __init__(self, metrics: ControllerMetrics, read_objects: ReadObjects) -> None:
        self._total = metrics.add_counter(
            "ocl_build_total", "Builds that ended, by result.", ("pool", "result"), prefix=""
        )
        self._retries = metrics.add_counter(
            "ocl_build_retries_total",
            "Failed attempts that are retried, by reason.",
            ("pool", "reason"),
            prefix="",
        )
        self._durations = metrics.add_histogram(
            "ocl_build_duration_seconds",
            "Time from the begin to the end of a build.",
            ("pool",),
            buckets=SLOW_BUCKETS_S,
            prefix="",
        )
        self._pushes = metrics.add_histogram(
            "ocl_image_push_duration_seconds",
            "Time of the push alone.",
            ("pool",),
            buckets=SLOW_BUCKETS_S,
            prefix="",
        )
        metrics.add_tables(lambda: compute_build_tables(*read_objects()))

    def record_status(
        self, action: SetBuildStatus, before: MachineOSBuild, pool: str, now: float
    ) -> None:
        """Count a status that was written. ``before`` is the build before the write."""
        if action.state.has_ended:
            self._total.increment(pool, action.state.value)
            began = parse_rfc3339(before.start) if before.start else None
            self._durations.observe(max(0.0, now - (began or now)), pool)
        elif action.reason not in ("", UNSCHEDULABLE):
            self._retries.increment(pool, action.reason)

    def record_push(self, pool: str, seconds: float) -> None:
        """Record the duration of a push."""
        self._pushes.observe(seconds, pool)


def compute_build_tables(
    configs: Iterable[MachineOSConfig], builds: Mapping[str, MachineOSBuild]
) -> Iterator[MetricTable]:
    """Return the gauges of all MachineOSConfigs, by the pool that they build for."""

    def make_table(name: str, about: str, *labels: str) -> MetricTable:
        return MetricTable(name, about, ("pool", *labels), prefix="")

    state = make_table("ocl_build_state", "1 for the state of the current build.", "state")
    begin = make_table("ocl_build_start_timestamp_seconds", "Begin of the current build.")
    end = make_table("ocl_build_end_timestamp_seconds", "End of the current build.")
    active = make_table("ocl_active_builds", "Builds that have not ended.")
    count = MetricTable("mco_mosc_count", "MachineOSConfigs.", (), prefix="")
    running: dict[str, int] = {}
    for build in builds.values():
        if not build.state.has_ended:
            running[build.image_config] = running.get(build.image_config, 0) + 1
    number = 0
    for config in configs:
        number += 1
        active.values[(config.pool,)] = float(running.get(config.name, 0))
        current = builds.get(config.current_build)
        for each in STATES:
            is_current = current is not None and current.state is each
            state.values[(config.pool, each.value)] = float(is_current)
        for table, text in ((begin, current and current.start), (end, current and current.end)):
            at = parse_rfc3339(text) if text else None
            if at is not None:
                table.values[(config.pool,)] = at
    count.values[()] = float(number)
    yield from (state, begin, end, active, count)
