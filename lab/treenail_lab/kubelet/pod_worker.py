"""The worker of one pod: it runs the containers and reports their states."""

import logging
import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.clocks import Clock
from treenail.errors import ClusterError, ConfigError, HostError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import PODS
from treenail_lab.apiserver.objects import Json, is_equal, read_uid
from treenail_lab.kubelet.pod_spec import (
    Container,
    PodPlan,
    parse_quantity,
    plan_pod,
    resolve_variables,
)
from treenail_lab.kubelet.pod_status import (
    ContainerRecord,
    PodOutcome,
    build_status,
    set_condition,
)
from treenail_lab.kubelet.runtime import (
    ContainerPlace,
    ContainerProcess,
    PortForward,
    Sandbox,
    build_image_environment,
)
from treenail_lab.kubelet.volumes import MissingObjectError, VolumeReader

log = logging.getLogger(__name__)

LOGS = "logs"
"""Name of the directory of logs: ``NAMESPACE/POD/CONTAINER.log``."""
_POLL_S = 0.05
_REPORT_POLL_S = 0.5
_STORAGE_POLL_S = 2.0
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class KubeletPlaces:
    """Where the kubelet keeps the files of its pods, and what it gives to them."""

    directory: Path
    hidden: tuple[Path, ...]
    """Directories of the host that no container may see."""
    forwards: tuple[PortForward, ...]
    """Ports of this host that containers reach."""
    files: Mapping[str, str]
    """Text of files that the image has beside those of the host, by path."""


class PodWorker:
    """One pod, from its binding to its end, in a thread of its own."""

    def __init__(self, client: Client, pod: Json, places: KubeletPlaces, clock: Clock) -> None:
        self._client, self._clock, self._places = client, clock, places
        self._pod = pod
        self._records: dict[str, ContainerRecord] = {}
        self._processes: dict[str, ContainerProcess] = {}
        self._plan: PodPlan | None = None
        self._reported: Json = {}
        self._outcome: PodOutcome | None = None
        self._grace_s: float | None = None
        self._wakeup = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name=f"pod-{pod['metadata']['name']}", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def terminate(self, grace_s: float) -> None:
        """End the containers, because the pod is being deleted; a second call may shorten."""
        if self._grace_s is None or grace_s < self._grace_s:
            self._grace_s = grace_s
            self._wakeup.set()

    def kill_container(self, name: str) -> bool:
        """Kill a container with SIGKILL, as an administrator of the host does.

        Returns whether it ran.
        """
        process, record = self._processes.get(name), self._records.get(name)
        if process is None or record is None or not record.is_running:
            return False
        process.send_signal(signal.SIGKILL)
        return True

    def stop(self) -> None:
        """Kill the containers and report nothing, as a machine that loses its power."""
        self._is_stopped = True
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(_KILL_TIMEOUT_S)

    @property
    def _directory(self) -> Path:
        return self._places.directory / "pods" / read_uid(self._pod)

    @property
    def _name(self) -> str:
        return str(self._pod["metadata"]["name"])

    def _run(self) -> None:
        sandbox = Sandbox(self._name, self._places.forwards)
        try:
            plan = self._plan = plan_pod(self._pod)
            for container in (*plan.init_containers, *plan.containers):
                self._records[container.name] = ContainerRecord()
            volumes = self._write_volumes(plan)
            if self._can_continue():
                sandbox.start()
            for container in plan.init_containers:
                self._run_group((container,), sandbox, volumes)
            self._run_group(plan.containers, sandbox, volumes)
        except (ConfigError, HostError, OSError) as error:
            self._outcome = self._outcome or PodOutcome("CreateContainerConfigError", str(error))
        finally:
            sandbox.stop()
            self._finish()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _write_volumes(self, plan: PodPlan) -> dict[str, Path]:
        reader = VolumeReader(self._client, self._pod["metadata"]["namespace"])
        volumes = {}
        for volume in plan.volumes:
            volumes[volume["name"]] = self._directory / "volumes" / volume["name"]
            while self._can_continue():
                try:
                    reader.write_volume(volume, volumes[volume["name"]], plan.fs_group, self._pod)
                    break
                except (MissingObjectError, ClusterError) as error:
                    # As a kubelet, which waits until the object exists.
                    log.debug("pod %s waits for volume %s: %s", self._name, volume["name"], error)
                    shutil.rmtree(volumes[volume["name"]], ignore_errors=True)
                    self._wakeup.wait(_REPORT_POLL_S)
        return volumes

    def _run_group(
        self, containers: Sequence[Container], sandbox: Sandbox, volumes: Mapping[str, Path]
    ) -> None:
        """Run containers until all have ended; do nothing after a failure or a deletion."""
        if not self._can_continue():
            return
        processes = {}
        try:
            for container in containers:
                process = self._prepare(container, volumes)
                process.start(sandbox)
                self._processes[container.name] = process
                self._records[container.name].began = self._clock.now()
                processes[container.name] = process
            self._report()
            self._follow(processes)
        finally:
            for process in processes.values():
                process.close()
        self._report()

    def _can_continue(self) -> bool:
        if self._is_stopped or self._grace_s is not None or self._outcome is not None:
            return False
        ends = [record.end for record in self._records.values()]
        return all(end is None or end.code == 0 for end in ends)

    def _prepare(self, container: Container, volumes: Mapping[str, Path]) -> ContainerProcess:
        reader = VolumeReader(self._client, self._pod["metadata"]["namespace"])
        try:
            known = build_image_environment(self._name)
            for source in container.sources:
                known |= reader.read_source(source)
            environment = resolve_variables(
                container.variables,
                known,
                lambda source: reader.read_variable(source, self._pod),
            )
        except ClusterError as error:
            raise ConfigError(f"cannot start container {container.name}: {error}") from error
        place = ContainerPlace(self._directory / container.name, self.find_log(container.name))
        return ContainerProcess(
            container,
            place,
            environment=environment,
            volumes=volumes,
            hidden=self._places.hidden,
            files=self._places.files,
            name=f"{read_uid(self._pod)}-{container.name}",
        )

    def find_log(self, container: str) -> Path:
        """Return the path of a container's log, which stays after the pod."""
        namespace = str(self._pod["metadata"]["namespace"])
        return self._places.directory / LOGS / namespace / self._name / f"{container}.log"

    def _follow(self, processes: Mapping[str, ContainerProcess]) -> None:
        """Wait for the end of all containers; end them when the pod is deleted or evicted."""
        killed_at: float | None = None
        next_look = self._clock.monotonic() + _STORAGE_POLL_S
        while any(self._records[name].end is None for name in processes):
            self._wakeup.wait(_POLL_S)
            self._wakeup.clear()
            now = self._clock.monotonic()
            if self._is_stopped:
                return
            if now >= next_look and self._outcome is None:
                self._check_storage()
                next_look = now + _STORAGE_POLL_S
            grace_s = 0.0 if self._outcome is not None else self._grace_s
            if grace_s is not None:
                if killed_at is None:
                    self._signal(processes, signal.SIGTERM)
                    killed_at = now
                if now >= killed_at + grace_s:
                    self._signal(processes, signal.SIGKILL)
            for name, process in processes.items():
                if self._records[name].end is None and (end := process.find_end()) is not None:
                    self._records[name].end = end
                    self._records[name].ended = self._clock.now()
                    self._report()

    def _signal(self, processes: Mapping[str, ContainerProcess], number: signal.Signals) -> None:
        for process in processes.values():
            process.send_signal(number)

    def _check_storage(self) -> None:
        """Evict the pod when its files take more than its limit of ephemeral storage."""
        if self._plan is None:
            return
        for volume in self._plan.volumes:
            limit = find_size_limit(volume)
            if limit and measure_directory(self._directory / "volumes" / volume["name"]) > limit:
                self._outcome = PodOutcome(
                    "Evicted",
                    f'Usage of EmptyDir volume "{volume["name"]}" exceeds the limit '
                    f'"{volume["emptyDir"]["sizeLimit"]}". ',
                    is_disruption=True,
                )
                return
        if self._plan.storage_limit and measure_directory(self._directory) > (
            self._plan.storage_limit
        ):
            self._outcome = PodOutcome(
                "Evicted",
                "Pod ephemeral local storage usage exceeds the total limit of containers "
                f"{self._plan.storage_limit}. ",
                is_disruption=True,
            )

    def _report(self) -> None:
        """Write the status of the pod if it changed; a lost write is repeated with the next one."""
        status = self._build_status()
        if is_equal(status, self._reported):
            return
        try:
            self._write_status(status)
        except ClusterError as error:
            log.debug("cannot report pod %s: %s", self._name, error)

    def _build_status(self) -> Json:
        now = self._clock.now()
        if self._plan is None:
            message = self._outcome.message if self._outcome else ""
            return {"phase": "Failed", "reason": "CreateContainerConfigError", "message": message}
        # A deleted pod whose containers never started has failed, too.
        outcome = self._outcome
        if outcome is None and self._grace_s is not None and not self._is_running():
            has_ended = all(record.end is not None for record in self._records.values())
            outcome = None if has_ended else PodOutcome("Terminated", "The pod was deleted.")
        plan = self._plan
        return build_status(
            self._pod, plan.init_containers, plan.containers, self._records, now, outcome
        )

    def _is_running(self) -> bool:
        return any(record.is_running for record in self._records.values())

    def _write_status(self, status: Json) -> None:
        namespace = self._pod["metadata"]["namespace"]
        # Merged into what the server has: an eviction adds a condition at any time.
        current: Json = self._client.get(PODS, self._name, namespace=namespace)
        if read_uid(current) != read_uid(self._pod):
            raise NotFoundError(f"cannot report pod {self._name}: another one has its name")
        conditions = (current.get("status") or {}).get("conditions") or []
        for condition in status.get("conditions") or []:
            conditions = set_condition(
                conditions,
                condition["type"],
                is_true=condition["status"] == "True",
                reason=condition.get("reason", ""),
                now=self._clock.now(),
                message=condition.get("message", ""),
            )
        body: Json = {"status": status | {"conditions": conditions}}
        self._pod = self._client.patch(
            PODS, self._name, body, namespace=namespace, subresource="status"
        )
        self._reported = status

    def _finish(self) -> None:
        """Report the end until the API server has it, and remove a pod that is being deleted."""
        while not self._is_stopped:
            try:
                status = self._build_status()
                if not is_equal(status, self._reported):
                    self._write_status(status)
                if self._grace_s is not None:
                    self._client.delete(
                        PODS,
                        self._name,
                        namespace=self._pod["metadata"]["namespace"],
                        uid=read_uid(self._pod),
                        grace_s=0,
                    )
            except NotFoundError:
                return
            except ClusterError as error:
                log.debug("retrying the report of pod %s: %s", self._name, error)
                self._clock.sleep(_REPORT_POLL_S)
            else:
                return


def find_size_limit(volume: Json) -> int:
    """Return the bytes that an emptyDir may have; 0 without a limit."""
    text = (volume.get("emptyDir") or {}).get("sizeLimit")
    return parse_quantity(str(text)) if text else 0


def measure_directory(directory: Path) -> int:
    """Return the bytes on disk below a directory."""
    total = 0
    for place, _, files in os.walk(directory):
        for name in files:
            try:
                total += (Path(place) / name).lstat().st_blocks * 512
            except OSError:
                continue
    return total
