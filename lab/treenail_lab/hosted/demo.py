"""The update in place that ``make demo ARGS=--hosted`` shows, in a hosted cluster of treenail.

The demo does what a user does with kubectl, and shows what ``treenail-controller status --hosted``
reports in a form of 80 columns, beside what the nodes say. It fits into 24 lines.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.clocks import SystemClock
from treenail.controllers.hosted.status import rows, snapshot
from treenail.errors import ClusterError, HostError
from treenail.kube.resources import NODES
from treenail_lab.demo.outages import NodeOutages
from treenail_lab.demo.rollout import PODS_PER_NODE, wrap_line
from treenail_lab.hosted import site
from treenail_lab.hosted.site import HostedSite
from treenail_lab.images import Credential, make_image
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.workload import Workload

POOL = "np"
_VERSION, _IMAGE_BYTES = "4.22.1", 200_000_000
_MOTD = "/etc/motd"
_BEFORE, _AFTER = "first config\n", "second config\n"
_INTERVAL_S, _SHORT_HASH, _MAX_CAUSES, _LINE = 0.5, 8, 2, 78
_NODE_FORMAT = "{:<8}{:<13}{:<13}{:<11}{:<7}{}"
_CHANGE = (
    f"$ kubectl -n {site.NAMESPACE} apply -f config.yaml   # ConfigMap {POOL}: another {_MOTD}"
)
_NEXT = (
    "Try next: docs/guides/hosted-clusters.md   the same in your management cluster",
    "          make demo                        a pool of an ordinary cluster",
)


@dataclass(frozen=True, slots=True)
class HostedResult:
    """The end of the demo."""

    updated: tuple[str, ...]
    seconds: float
    """From the change of the config."""
    max_out_of_service: int
    evicted_pods: int
    failure: str = ""

    def to_json(self) -> Json:
        return {
            "updated": list(self.updated),
            "maxOutOfService": self.max_out_of_service,
            "evictedPods": self.evicted_pods,
            "seconds": round(self.seconds, 3),
            "failed": self.failure,
        }


class HostedDemo:
    """A NodePool of ``count`` machines that join, and are then updated in place."""

    def __init__(self, hosted: HostedSite, count: int, stream: TextIO) -> None:
        self._site = hosted
        self._count = count
        self._stream = stream
        self._clock = SystemClock()
        self._shown = ""
        self._drawn_lines = 0
        self._most_cordoned = 0
        self._begin = time.monotonic()

    def run(self, limit_s: float) -> HostedResult:
        """Let machines join, change their config, and wait for each change at most this long."""
        hosted, client = self._site, self._site.guest.client
        hosted.put_config(POOL, {_MOTD: _BEFORE})
        hosted.create_pool(POOL, "InPlace", self._count)
        print("\n$ treenail-controller status --hosted   # shortened", file=self._stream)
        if not self._watch_until(self._is_at_rest, limit_s):
            return self._build_result(f"no {self._count} nodes joined within {limit_s:g} s")
        outages = NodeOutages(client, self._clock)
        workload = Workload(client, replicas=PODS_PER_NODE * self._count)
        outages.start()
        workload.start()
        try:
            print(f"\n{_CHANGE}", file=self._stream)
            self._drawn_lines, self._begin = 0, time.monotonic()
            hosted.put_config(POOL, {_MOTD: _AFTER})

            def is_updated() -> bool:
                self._most_cordoned = max(self._most_cordoned, len(outages.list_cordoned()))
                return self._is_updated()

            is_done = self._watch_until(is_updated, limit_s)
            evicted = sum(map(outages.count_evicted, hosted.guest.machines))
        finally:
            workload.stop()
            outages.stop()
        return self._build_result(
            "" if is_done else f"not all nodes were updated within {limit_s:g} s", evicted
        )

    def _build_result(self, failure: str, evicted: int = 0) -> HostedResult:
        updated = tuple(name for name in self._site.guest.machines if self._has_config(name))
        seconds = time.monotonic() - self._begin
        return HostedResult(updated, seconds, self._most_cordoned, evicted, failure)

    def _has_config(self, name: str) -> bool:
        place = self._site.guest.machines[name].root / _MOTD[1:]
        return place.exists() and place.read_text("utf-8") == _AFTER

    def _read_row(self) -> rows.NodePoolRow | None:
        with contextlib.suppress(ClusterError):
            pools = snapshot.read_pools(self._site.client, self._clock)
            return next(iter(rows.build_rows(pools, now=self._clock.now())), None)
        return None

    def _is_at_rest(self) -> bool:
        """Return whether the pool is updated, and the agent of each node has said so."""
        row = self._row
        if row is None or row.state != rows.PoolState.UPDATED or len(row.machines) != self._count:
            return False
        try:
            notes = [self._site.guest.read_annotations(name) for name in row.machines]
        except ClusterError:
            return False
        return all(each.get(key.STATE) == key.NodeState.DONE for each in notes)

    def _is_updated(self) -> bool:
        return self._is_at_rest() and all(map(self._has_config, self._site.guest.machines))

    def _watch_until(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Draw the state until it is as wanted; return False at the limit."""
        end = time.monotonic() + limit_s
        while True:
            self._row = self._read_row()
            result = is_done()
            self._draw()
            if result or time.monotonic() > end:
                return result
            time.sleep(_INTERVAL_S)

    def _draw(self) -> None:
        """Draw the table over the last one; without a terminal, print each change once."""
        lines = [*self._format_pool(), "", *self._format_nodes()]
        if self._stream.isatty():
            # Cursor up, and clear to the end of the screen.
            print(f"\x1b[{self._drawn_lines}A\x1b[J" if self._drawn_lines else "", end="",
                  file=self._stream)  # fmt: skip
        elif "\n".join(lines) == self._shown:
            return
        self._shown, self._drawn_lines = "\n".join(lines), len(lines)
        print(self._shown, file=self._stream, flush=True)

    def _format_pool(self) -> list[str]:
        row = self._row
        if row is None:
            return ["no NodePool yet"]
        hashes = dict.fromkeys((row.current_hash, row.wanted_hash))
        change = " -> ".join((text or "-")[:_SHORT_HASH] for text in hashes)
        counts = ", ".join(f"{count} {state}" for state, count in row.counts.items())
        title = f"{row.namespace}/{row.name} {row.upgrade_type}  {row.state}  {change}  {counts}"
        causes = [f"  {cause.kind}: {cause.message}" for cause in row.causes[:_MAX_CAUSES]]
        causes += [f"  not looked at: {text}" for text in row.unread[:1]]
        return [
            line if len(line) <= _LINE else f"{line[: _LINE - 1]}…" for line in (title, *causes)
        ]

    def _format_nodes(self) -> list[str]:
        lines = [_NODE_FORMAT.format("NODE", "STATE", "CONFIG", "SERVICE", "BOOTS", "MOTD")]
        for name, machine in sorted(self._site.guest.machines.items()):
            try:
                node = self._site.guest.client.get(NODES, name)
                notes = self._site.guest.read_annotations(name)
            except ClusterError:
                lines.append(_NODE_FORMAT.format(name, "booting", "", "", "", ""))
                continue
            spec = node.get("spec")
            is_cordoned = isinstance(spec, dict) and bool(spec.get("unschedulable"))
            motd = machine.root / _MOTD[1:]
            cells = (
                name,
                notes.get(key.STATE, "-") if machine.is_on else "rebooting",
                notes.get(key.CURRENT_CONFIG, "-")[:_SHORT_HASH],
                "cordoned" if is_cordoned else "yes",
                str(machine.boot_count),
                motd.read_text("utf-8").strip() if motd.exists() else "",
            )
            lines.append(_NODE_FORMAT.format(*cells))
        return [line.rstrip() for line in lines]


def run_hosted_demo(directory: Path, count: int, limit_s: float, stream: TextIO) -> HostedResult:
    """Run the demo; raise `HostError` if the lab cannot start."""
    image = make_image(
        "os/node", _VERSION, _IMAGE_BYTES, credential=Credential("lab", "let-me-pull")
    )
    settings = MachineSettings(boot_s=1.0)
    print(
        f"starting a management cluster, and a hosted cluster for {count} machines",
        file=stream,
        flush=True,
    )
    with HostedSite(directory, (image,), machine_settings=settings) as hosted:
        try:
            return HostedDemo(hosted, count, stream).run(limit_s)
        except ClusterError as error:
            raise HostError(f"cannot show the demo: {error}") from error


def print_hosted_result(result: HostedResult, stream: TextIO) -> None:
    """Print how the update ended, and what to try next."""
    print(
        f"\n{len(result.updated)} nodes updated in place in {result.seconds:.0f} s, at most "
        f"{result.max_out_of_service} out of service at once",
        file=stream,
    )
    print(
        f"{result.evicted_pods} pods moved to other nodes; each node rebooted into the config once",
        file=stream,
    )
    if result.failure:
        print("\n".join(wrap_line(f"failed: {result.failure}", stream)), file=stream)
    print("\n".join(_NEXT), file=stream)
