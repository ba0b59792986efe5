"""An installation in image mode from an empty directory to a finished rollout.

The lab does what a user and an installer do: it runs the commands of ``treenail-controller
install`` on the bootstrap host, boots machines, applies the manifests to the new cluster and starts
its controllers. Everything else is treenail's.
"""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from treenail.api import annotations as key
from treenail.api import documents
from treenail.api.decode import Fields, load_json
from treenail.api.machineconfigpool import MASTER, WORKER, MachineConfigPool
from treenail.config.bootstrap_registry import MIRROR_FILE, RECORD_FILE
from treenail.encoding.json_text import parse_json
from treenail.errors import ClusterError, ConfigError, HostError
from treenail.host.system.state_file import LEDGER_PATH
from treenail.installer.directory.install_files import InstallDirectory
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    NODES,
)
from treenail.manifests.ignition_server import build_settings_access
from treenail.manifests.installation import InstallOptions
from treenail.process import stop_process
from treenail.provisioning.content.document import build_pointer
from treenail_lab.controllers import (
    ALL_CONTROLLERS,
    CONTROLLER_COMMAND,
    ControllerReplicas,
    StatusWatch,
)
from treenail_lab.demo.rollout import wrap_line
from treenail_lab.install.install_lab import (
    CERTIFICATES,
    PUSH_SECRET,
    InstallInputs,
    InstallLab,
    write_inputs,
)
from treenail_lab.lifetime.fork_server import LabProcess, run_process
from treenail_lab.lifetime.owner import owner
from treenail_lab.provision import ConfigServer

HOST = "127.0.0.1"
_COMMAND_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """How a command ended, and what it printed to both streams."""

    code: int
    text: str


class BootstrapHost:
    """A host with an install directory; `start` begins the stage ``bootstrap``."""

    def __init__(self, root: Path, log: Path, machines: int) -> None:
        """``machines`` is the number of control-plane machines."""
        self._machines = machines
        self.directory = InstallDirectory(root)
        self.log = log
        self.port = find_free_port()
        # The same at each start: machines keep it in the name of the mirror.
        self.registry_port = find_free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def run_command(self, verb: str, *arguments: str) -> CommandOutput:
        """Run ``install VERB`` to its end; raise `HostError` when it does not end."""
        command = [*CONTROLLER_COMMAND, "install", verb, "--dir", str(self.directory.root)]
        try:
            done = run_process(
                [*command, *arguments],
                env={**os.environ, **owner.mark_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(
                f"cannot run install {verb}: it did not end within {_COMMAND_TIMEOUT_S:g} s"
            ) from error
        return CommandOutput(done.returncode, done.stdout.decode("utf-8", "replace"))

    def start(self, *arguments: str) -> None:
        """Start the stage ``bootstrap``; its log is in `log`."""
        with self.log.open("ab") as output:
            self._process = LabProcess(
                self.make_command(arguments),
                env={**os.environ, **owner.mark_environment()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def make_command(self, arguments: Sequence[str] = ()) -> list[str]:
        """Return the command of the stage ``bootstrap``."""
        return [
            *(*CONTROLLER_COMMAND, "install", "bootstrap", "--dir", str(self.directory.root)),
            *("--host", HOST, "--listen", f"{HOST}:{self.port}"),
            *("--registry-listen", f"{HOST}:{self.registry_port}", "--stop-when-complete"),
            f"--control-plane-machines={self._machines}",
            *arguments,
        ]

    def find_exit_code(self) -> int | None:
        """Return the exit code of the stage; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Stop the stage with SIGTERM."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_process(process, _STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the stage and what it runs, as a power cut does."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def read_status(self) -> Json:
        """Return ``status.json``; empty before the stage wrote one."""
        try:
            content = self.directory.status.read_bytes()
            return Fields.from_json(load_json(content, where="status.json"), "").values
        except (OSError, ConfigError):
            return {}

    def create_pointer_config(self, pool: str) -> bytes:
        """Return the user data of a machine of the control plane."""
        authorities = self.directory.ca_certificate.read_bytes()
        url = f"https://{HOST}:{self.port}"
        return json.dumps(build_pointer(url, pool, "3.1.0", authorities=authorities)).encode()


def find_free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


CONTROLLERS = (*ALL_CONTROLLERS, "build", "approve", "install")
_POLL_S = 0.1
_DIGEST = re.compile(r"(sha256:[0-9a-f]{8})[0-9a-f]{56}")
_APPLIED_FIRST = ("Namespace", "ConfigMap", "Secret", "ControllerConfig")


@dataclass(frozen=True, slots=True)
class InstalledNode:
    """A machine as last observed."""

    name: str
    boots: int
    image: str
    """Digest of the booted image; empty while the machine is off."""
    reported_image: str = ""
    """Pull spec that the Node reports."""
    state: str = ""
    is_ready: bool = False
    has_bootstrap_registry: bool = False
    """Whether files of the bootstrap registry are on the machine."""
    updates: int = 0
    """Updates after the first boot, by the ledger of its agent."""

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "boots": self.boots,
            "image": self.image,
            "reportedImage": self.reported_image,
            "state": self.state,
            "ready": self.is_ready,
            "hasBootstrapRegistry": self.has_bootstrap_registry,
            "updates": self.updates,
        }


class InstallRun:
    """One installation, between `start` and `stop`."""

    def __init__(
        self, lab: InstallLab, root: Path, inputs: InstallInputs, stream: TextIO, limit_s: float
    ) -> None:
        self.lab = lab
        self._inputs = inputs
        self._stream = stream
        self._limit_s = limit_s
        self.host = BootstrapHost(
            root, lab.directory / "bootstrap.log", len(lab.plan.control_plane)
        )
        self.controllers = ControllerReplicas(lab, enable=CONTROLLERS)
        self.server = ConfigServer(lab)
        self._watch: StatusWatch | None = None
        self._threads: list[threading.Thread] = []
        self._failures: dict[str, str] = {}
        self._activity = "", ""
        self._deadline = time.monotonic() + limit_s
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    # The user

    def write_inputs(self) -> None:
        """Write what the user writes."""
        write_inputs(self.lab, self.host.directory.root, self._inputs)

    def prepare(self) -> CommandOutput:
        """Run ``install prepare``."""
        files = self.lab.directory
        return self.host.run_command(
            "prepare", "--push-secret", str(files / PUSH_SECRET), "--ca", str(files / CERTIFICATES)
        )

    def start_bootstrap(self, *arguments: str) -> None:
        """Start ``install bootstrap``, and boot the machines of the control plane."""
        self.host.start(*arguments)
        self._wait_until(self.host.directory.ca_certificate.exists, "the CA of the installation")
        for name in sorted(self.lab.plan.control_plane):
            user_data = self.host.create_pointer_config(MASTER)
            machine = self.lab.install_machine(name, user_data, self.host.port)
            self._start_machine(name, machine.start)

    # The installer

    def start_cluster(self) -> None:
        """Start the cluster when the first machine of the control plane has its image."""
        self._wait_until(self.lab.is_first_boot_done, "the first boot of a machine")
        self.lab.start_cluster()
        self.controllers.create_manifests()
        self._apply_manifests()
        kubeconfig = self.host.directory.kubeconfig
        kubeconfig.parent.mkdir(mode=0o700, exist_ok=True)
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_bytes(self.lab.server.admin_kubeconfig.read_bytes())
        self.controllers.start_replica()

    def _apply_manifests(self) -> None:
        """Create the objects of the manifests, as the installer does on the bootstrap host."""
        objects: list[Json] = []
        for path in sorted(self.host.directory.manifests.glob("*.yaml")):
            objects += documents.load_documents(path.read_bytes(), where=path.name)
        objects.sort(key=lambda manifest: manifest["kind"] not in _APPLIED_FIRST)
        objects.sort(key=lambda manifest: manifest["kind"] != "Namespace")
        self.lab.create_objects(objects)

    def join_workers(self) -> None:
        """Start the cluster's config server, and boot the workers with its user data."""
        self.lab.create_objects(build_settings_access(InstallOptions()))
        self.server.start()
        for name in self.lab.plan.nodes:
            if name not in self.lab.plan.control_plane:
                user_data = self.server.create_pointer_config()
                machine = self.lab.install_machine(name, user_data, self.server.port)
                self._start_machine(name, machine.start)

    def show_cluster(self) -> None:
        """Show the pools and nodes of the cluster live, until the end."""
        self._watch = StatusWatch(self.lab.server.admin_kubeconfig, self._stream)
        self._watch.start()

    def finish(self) -> None:
        """Let the table show the last state."""
        if self._watch is not None:
            self._watch.finish()

    # Waiting

    def wait_for_control_plane(self) -> None:
        """Wait until all machines of the control plane report their image."""
        names = self.lab.plan.control_plane
        self._wait_until(lambda: self._are_done(names), "the nodes of the control plane")

    def wait_for_workers(self) -> None:
        """Wait until all workers report their image."""
        names = set(self.lab.plan.nodes) - self.lab.plan.control_plane
        self._wait_until(lambda: self._are_done(names), "the workers")

    def wait_for_handover(self) -> None:
        """Wait until the bootstrap host has ended and no node knows it."""
        self._wait_until(lambda: self.host.find_exit_code() == 0, "the end of install bootstrap")
        self._wait_until(
            lambda: not any(node.has_bootstrap_registry for node in self.list_nodes()),
            "the removal of the bootstrap registry from the nodes",
        )
        self._wait_until(self._are_pools_updated, "the rollouts")

    def _wait_until(self, reached: Callable[[], bool], what: str) -> None:
        while not reached():
            self._show_activity()
            if failure := self._find_failure():
                raise HostError(f"cannot install: {failure}", remedy=f"see {self.host.log}")
            if time.monotonic() > self._deadline:
                raise HostError(
                    f"cannot install: waited {self._limit_s:g} s for {what}",
                    remedy=f"see {self.host.log} and {self.controllers.find_log()}",
                )
            time.sleep(_POLL_S)

    def _find_failure(self) -> str:
        """Return why the installation cannot end well; empty while it can."""
        code = self.host.find_exit_code()
        if code:
            failure = self.host.read_status().get("failure")
            reason = failure.get("reason") if isinstance(failure, dict) else None
            return str(reason or f"install bootstrap ended with exit code {code}")
        return "; ".join(f"{name}: {why}" for name, why in self._failures.items())

    def _show_activity(self) -> None:
        """Print what the bootstrap host does, as long as there is no table."""
        status = self.host.read_status()
        title, activity = (str(status.get(name) or "") for name in ("title", "activity"))
        if self._watch is None and (title, activity) != self._activity:
            lines = format_activity(title, activity, is_new=title != self._activity[0])
            self._activity = title, activity
            for line in lines:
                print("\n".join(wrap_line(line, self._stream)), file=self._stream, flush=True)

    # State

    def list_nodes(self) -> list[InstalledNode]:
        """Return all machines that were installed."""
        return [self._observe(name) for name in list(self.lab.machines)]

    def list_rendered(self) -> tuple[str, ...]:
        """Return the names of the rendered configs of all pools, of all times."""
        items = self.lab.client.list(MACHINECONFIGS).items
        names = (_read_name(config) for config in items)
        return tuple(sorted(name for name in names if name.startswith("rendered-")))

    def list_installed_configs(self) -> tuple[str, ...]:
        """Return the names of the rendered configs that the bootstrap host wrote."""
        paths = self.host.directory.machine_configs.glob("rendered-*.yaml")
        return tuple(sorted(path.stem for path in paths))

    def list_builds(self) -> tuple[str, ...]:
        """Return the names of all MachineOSBuilds."""
        return tuple(sorted(_read_name(x) for x in self.lab.client.list(MACHINEOSBUILDS).items))

    def find_installed_digest(self) -> str:
        """Return the digest of the control plane's image, from the status of the installation."""
        pools = self.host.read_status().get("pools")
        pool = pools.get(MASTER) if isinstance(pools, dict) else None
        return str(pool.get("image", "")).rpartition("@")[2] if isinstance(pool, dict) else ""

    def _observe(self, name: str) -> InstalledNode:
        machine = self.lab.machines[name]
        booted = machine.booted_deployment if machine.is_on else None
        notes, is_ready = self._read_node(name)
        files = (MIRROR_FILE, RECORD_FILE)
        return InstalledNode(
            name,
            machine.boot_count,
            booted.digest if booted else "",
            notes.get(key.CURRENT_OS_IMAGE, ""),
            notes.get(key.STATE, ""),
            is_ready,
            any((machine.root / file[1:]).exists() for file in files),
            count_updates(machine.root),
        )

    def _read_node(self, name: str) -> tuple[dict[str, str], bool]:
        """Return the annotations of a Node, and whether it is Ready."""
        with suppress(ClusterError, AttributeError):
            node = self.lab.client.get(NODES, name)
            metadata, status = node.get("metadata"), node.get("status")
            notes = metadata.get("annotations") if isinstance(metadata, dict) else None
            conditions = status.get("conditions") if isinstance(status, dict) else None
            is_ready = any(
                (condition.get("type"), condition.get("status")) == ("Ready", "True")
                for condition in conditions or []
            )
            return dict(notes or {}), is_ready
        return {}, False

    def _are_done(self, names: set[str] | frozenset[str]) -> bool:
        observations = [self._observe(name) for name in names if name in self.lab.machines]
        return len(observations) == len(names) and all(
            observation.is_ready
            and observation.state == "Done"
            and bool(observation.image)
            and observation.reported_image.endswith(observation.image)
            for observation in observations
        )

    def _are_pools_updated(self) -> bool:
        return all(self._list_updated())

    def _list_updated(self) -> Iterator[bool]:
        counts = {
            MASTER: len(self.lab.plan.control_plane),
            WORKER: len(self.lab.plan.nodes) - len(self.lab.plan.control_plane),
        }
        for pool, count in counts.items():
            current = MachineConfigPool.from_json(self.lab.client.get(MACHINECONFIGPOOLS, pool))
            yield current.status.get("updatedMachineCount") == count

    # Machines

    def _start_machine(self, name: str, start: Callable[[], None]) -> None:
        """Start a machine in a thread: its Ignition waits until its config is served."""

        def run() -> None:
            try:
                start()
            except HostError as error:
                self._failures[name] = str(error)

        thread = threading.Thread(target=run, name=f"boot-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """Stop the table, the controllers, both config servers and the bootstrap host."""
        if self._watch is not None:
            self._watch.stop()
        self.controllers.stop()
        self.server.stop()
        self.host.stop()


def format_activity(title: str, activity: str, *, is_new: bool) -> list[str]:
    """Format what the bootstrap host does: the step once, and below it what it does now."""
    # Images are known by the first digits of their digest.
    shown = _DIGEST.sub(r"\1…", activity)
    return [*([f"  {title}"] if is_new and title else []), *([f"    {shown}"] if shown else [])]


def count_updates(root: Path) -> int:
    """Count the updates in the ledger of a machine; 0 without one."""
    try:
        document = parse_json((root / LEDGER_PATH[1:]).read_bytes())
    except (OSError, ValueError):
        return 0
    history = document.get("history") if isinstance(document, dict) else None
    return len(history) if isinstance(history, list) else 0


def _read_name(document: Json) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
