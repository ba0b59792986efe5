"""One node of the lab: a root directory, its services, and an agent that runs on it.

::

    with LabMachine("node-a", directory, images_file, image=image_a, agent=command) as machine:
        machine.agent.wait_until(lambda unit: unit.is_ready, 10)
        machine.cut_power()

The D-Bus daemon, processes, sockets and signals are real. A reboot ends the processes, finalizes
the staged deployment, empties /run and gives a new boot id. A soft reboot keeps /run and the boot
id. All methods may be called from any thread and return when their work is done.

The socket of the container runtime accepts connections and closes them unanswered. Other clients of
the machine's bus are a transaction, an inhibitor lock and a query.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from gi.repository import Gio, GLib

from treenail.errors import HostError
from treenail.host.ostree.admin import FINALIZE_UNIT
from treenail_lab import images
from treenail_lab.images import Image
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.bus.objects import call_method, scoped_connection
from treenail_lab.machine.container import skopeo
from treenail_lab.machine.node.agent_unit import AgentUnit
from treenail_lab.machine.node.daemons import MachineDaemons, build_environment, check_socket_length
from treenail_lab.machine.ostree.sysroot import (
    Sysroot,
    SysrootDeployment,
    build_boot_options,
    make_deployment,
)
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd.journal import EmulatedJournal, JournalEntry
from treenail_lab.machine.systemd.unit_log import find_unit_log

RUNTIME_UNIT = "crio.service"
_SOCKET = "run/crio/crio.sock"


class CriSocket:
    """The listener that CRI-O has for the kubelet, between `start` and `stop`."""

    def __init__(self, root: Path) -> None:
        self._path = root / _SOCKET
        self._listener: socket.socket | None = None

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            listener.listen()
        except OSError as error:
            listener.close()
            raise HostError(f"cannot listen on {self._path}: {error.strerror}") from error
        self._listener = listener
        threading.Thread(
            target=_accept_connections, args=(listener,), name="cri-socket", daemon=True
        ).start()

    def stop(self) -> None:
        if self._listener is not None:
            # close() alone leaves the thread in accept(); shutdown() makes it return.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)


def _accept_connections(listener: socket.socket) -> None:
    # Connections that are not accepted fill the backlog, and then connect() blocks (unix(7)).
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()


_RPM_OSTREE = "org.projectatomic.rpmostree1"
_OS_PATH = "/org/projectatomic/rpmostree1/fedora_coreos"
_SYSTEMD1 = "org.freedesktop.systemd1"
_LOGIN1 = "org.freedesktop.login1"
_CALL_TIMEOUT_MS = 10_000


def start_metadata_refresh(address: str) -> None:
    """Start an ``rpm-ostree refresh-md`` and disconnect; the transaction goes on."""
    options = {"initiating-command-line": GLib.Variant("s", "rpm-ostree refresh-md")}
    with scoped_connection(address) as bus:
        (peer_address,) = call_method(
            bus,
            (_RPM_OSTREE, _OS_PATH, f"{_RPM_OSTREE}.OS", "RefreshMd"),
            GLib.Variant("(a{sv})", (options,)),
        )
        with scoped_connection(peer_address, bus=False) as peer:
            call_method(peer, (None, "/", f"{_RPM_OSTREE}.Transaction", "Start"))


@contextmanager
def inhibit_shutdown(address: str, *, who: str, why: str, mode: str) -> Iterator[None]:
    """Hold an inhibitor lock for shutdown while inside."""
    with scoped_connection(address) as bus:
        _, fds = bus.call_with_unix_fd_list_sync(
            _LOGIN1,
            "/org/freedesktop/login1",
            f"{_LOGIN1}.Manager",
            "Inhibit",
            GLib.Variant("(ssss)", ("shutdown", who, why, mode)),
            None,
            Gio.DBusCallFlags.NONE,
            _CALL_TIMEOUT_MS,
            None,
            None,
        )
        # Gio.UnixFDList would keep a copy of the descriptor open until it is collected.
        (lock,) = fds.steal_fds()
        try:
            yield
        finally:
            os.close(lock)


def is_unit_active(address: str, name: str) -> bool:
    """Return whether the unit is active."""
    with scoped_connection(address) as bus:
        (rows,) = call_method(
            bus,
            (_SYSTEMD1, "/org/freedesktop/systemd1", f"{_SYSTEMD1}.Manager", "ListUnitsByNames"),
            GLib.Variant("(as)", ([name],)),
        )
    return any(row[3] == "active" for row in rows)


KUBELET_UNIT = "kubelet.service"
KUBELET_CONFIG = "var/lib/kubelet/config.json"
_POWER_TIMEOUT_S = 60.0


class LabMachine:
    """A machine that was installed from ``image`` and is off until `start`.

    ``agent`` is the command of its agent, ``kubelet_config`` the pull secret of its kubelet. The
    directory stays when the machine is stopped; the machine can be started again.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        images_file: Path,
        *,
        image: Image,
        agent: Sequence[str] = (),
        agent_environment: Mapping[str, str] | None = None,
        kubelet_config: str = "",
        machine_settings: MachineSettings | None = None,
    ) -> None:
        """The layers of an ``image`` of a real registry are beside the file of images."""
        self.name = name
        self.root = directory / "root"
        self.agent_log = directory / "agent.log"
        self.boot_count = 0
        self.failed_boot_count = 0
        self.is_kubelet_running = False
        self.on_boot: Callable[[SysrootDeployment], None] = lambda _: None
        """Called in each boot before anything runs; tests break the system with it."""
        self._images_file = images_file
        self._settings_file = directory / "settings.json"
        self._agent_command = list(agent)
        self._is_on = False
        self._power_lock = threading.RLock()
        self._stop_event = threading.Event()
        self._boot_condition = threading.Condition()
        check_socket_length(self.root)
        directory.mkdir(parents=True, exist_ok=True)
        rootfs.install_root(self.root, image, images_file.parent)
        if kubelet_config:
            place = self.root / KUBELET_CONFIG
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(kubelet_config, encoding="utf-8")
            place.chmod(0o600)
        settings.save_settings(machine_settings or MachineSettings(), self._settings_file)
        self._journal = EmulatedJournal(self.root)
        self._runtime = CriSocket(self.root)
        on_path = skopeo.install_skopeo(directory, self.root, images_file)
        commands.install_programs(self.root, images_file, self._settings_file, on_path=on_path)
        self._daemons = MachineDaemons(
            directory, self.root, images_file, self._settings_file, on_request=self._serve_request
        )
        self._agent = AgentUnit(
            agent,
            self.root,
            environment={
                **build_environment(directory),
                **(agent_environment or {}),
                "DBUS_SYSTEM_BUS_ADDRESS": self.address,
            },
            output=self.agent_log,
            journal=self._journal,
            read_settings=self.read_settings,
        )

    # State

    @property
    def address(self) -> str:
        """Return the address of its system bus."""
        return self._daemons.address

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def boot_id(self) -> str:
        return rootfs.read_boot_id(self.root)

    @property
    def booted_deployment(self) -> SysrootDeployment | None:
        return Sysroot(self.root).find_booted()

    @property
    def staged_deployment(self) -> SysrootDeployment | None:
        return Sysroot(self.root).read_staged()

    @property
    def is_staged_locked(self) -> bool:
        return Sysroot(self.root).is_staged_locked()

    @property
    def deployments(self) -> tuple[SysrootDeployment, ...]:
        """Return all deployments, the staged one first."""
        return Sysroot(self.root).list_deployments()

    @property
    def agent(self) -> AgentUnit:
        """Return the agent's service."""
        return self._agent

    def read_settings(self) -> MachineSettings:
        """Read the current settings."""
        return settings.load_settings(self._settings_file)

    def read_journal(self, match: Mapping[str, str] | None = None) -> list[JournalEntry]:
        """Return the journal entries of all boots that have these fields, oldest first."""
        return self._journal.read_entries(match)

    def wait_for_boot(self, count: int, limit_s: float) -> bool:
        """Wait until the machine has booted ``count`` times; return whether it has."""
        with self._boot_condition:
            return self._boot_condition.wait_for(lambda: self.boot_count >= count, limit_s)

    # Power

    def start(self) -> None:
        """Power on; the services run and the agent was started when this returns."""
        with self._hold_power():
            self._stop_event.clear()
            if not self._is_on:
                self._boot()

    def stop(self) -> None:
        """Shut down cleanly; no process of the machine is left when this returns."""
        self._stop_event.set()
        with self._hold_power():
            if self._is_on:
                self._shut_down()

    def reboot(self, *, soft: bool = False) -> None:
        """Reboot as ``systemctl reboot`` or ``systemctl soft-reboot`` does."""
        with self._hold_power():
            self._shut_down()
            self._boot_again(soft=soft)

    def cut_power(self) -> None:
        """Cut the power and restore it, whatever the machine is doing."""
        with self._hold_power():
            self._is_on = False
            self._runtime.stop()
            self._agent.power_off()
            self._daemons.stop(hard=True)
            self._journal.stop()
            self._boot_again()

    def __enter__(self) -> "LabMachine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The agent and the services

    def start_agent(self) -> None:
        self._agent.start()

    def stop_agent(self) -> None:
        """Stop the agent as systemctl does; a boot starts it again."""
        self._agent.stop()

    def kill_agent(self, signal_number: int = signal.SIGKILL) -> None:
        """Send the agent a signal; a killed agent is restarted."""
        self._agent.kill(signal_number)

    def restart_service(self, name: str, *, signal_number: int = signal.SIGTERM) -> None:
        """Restart ``rpm-ostreed``, also during a transaction; with SIGKILL as after a crash."""
        if name != "rpm-ostreed":
            raise ValueError(f"cannot restart {name!r}: only rpm-ostreed")
        self._daemons.stop_rpmostreed(signal_number)
        self._daemons.start_rpmostreed()

    @contextmanager
    def hang_daemon(self, name: str) -> Iterator[None]:
        """Suspend ``rpm-ostreed``, ``systemd``, ``bus`` or ``agent`` with SIGSTOP while inside."""
        pid = self._agent.pid if name == "agent" else self._daemons.find_pid(name)
        if not pid:
            raise HostError(f"cannot suspend {name}: it does not run on {self.name}")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if pid in (
                self._agent.pid,
                *map(self._daemons.find_pid, ("rpm-ostreed", "systemd", "bus")),
            ):
                os.kill(pid, signal.SIGCONT)

    # Faults and other clients

    def change_settings(self, **values: object) -> None:
        """Change settings of the machine; names are those of `MachineSettings`."""
        settings.save_settings(replace(self.read_settings(), **values), self._settings_file)  # type: ignore[arg-type]

    def stage_foreign_image(self, image: Image, *, locked: bool = False) -> None:
        """Stage ``image`` without rpm-ostree, as bootc or an administrator may."""
        sysroot = Sysroot(self.root)
        base = sysroot.find_base()
        if base is None:
            raise HostError(f"cannot stage on {self.name}: no deployment")
        refspec = f"ostree-unverified-registry:{image.pull_spec}"
        serial = sysroot.compute_next_serial(image.commit)
        deployment = make_deployment(image, refspec, base.kernel_arguments, serial)
        sysroot.stage_deployment(deployment, locked=locked)

    @contextmanager
    def hold_transaction(self) -> Iterator[None]:
        """Run a transaction of another client while inside, at most ten minutes."""
        self.change_settings(refresh_md_s=600.0)
        start_metadata_refresh(self.address)
        try:
            yield
        finally:
            self.change_settings(refresh_md_s=0.0)

    @contextmanager
    def lock_sysroot(self) -> Iterator[None]:
        """Hold the sysroot lock while inside, as bootc and ostree do: rpm-ostree is busy."""
        lock = Sysroot(self.root).acquire_lock()
        if lock is None:
            raise HostError(f"cannot lock the sysroot of {self.name}: a transaction holds it")
        try:
            yield
        finally:
            os.close(lock)

    def inhibit_shutdown(
        self, who: str, why: str, *, mode: str = "block"
    ) -> AbstractContextManager[None]:
        """Hold a shutdown inhibitor lock of another program while inside."""
        return inhibit_shutdown(self.address, who=who, why=why, mode=mode)

    # Boot and shutdown

    @contextmanager
    def _hold_power(self) -> Iterator[None]:
        if not self._power_lock.acquire(timeout=_POWER_TIMEOUT_S):
            raise HostError(
                f"cannot change the power of {self.name}: a boot or shutdown still runs "
                f"after {_POWER_TIMEOUT_S:g} s"
            )
        try:
            yield
        finally:
            self._power_lock.release()

    def _boot_again(self, *, soft: bool = False) -> None:
        # A stop ends the wait between two boots, and then there is no next boot.
        if not self._stop_event.wait(0.0 if soft else self.read_settings().boot_s):
            self._boot(soft=soft)

    def _boot(self, *, soft: bool = False) -> None:
        if soft:
            booted = rootfs.soft_boot_root(self.root)
        else:
            booted = rootfs.boot_root(self.root, self._find_bootable())
        self.on_boot(booted)
        self._journal.start()
        self._log_message("kernel", f"Command line: {build_boot_options(booted)}")
        try:
            self._daemons.start()
            self._runtime.start()
            self.is_kubelet_running = is_unit_active(self.address, KUBELET_UNIT)
        except HostError:
            self._daemons.stop(hard=True)
            self._journal.stop()
            raise
        self._is_on = True
        with self._boot_condition:
            self.boot_count += 1
            self._boot_condition.notify_all()
        if self._agent_command:
            self._agent.start()

    def _shut_down(self) -> None:
        self._is_on = False
        self._agent.stop()
        self._runtime.stop()
        self._daemons.stop_rpmostreed(signal.SIGTERM)
        self._finalize_staged()
        self._daemons.stop(hard=False)
        self._journal.stop()

    def _find_bootable(self) -> int:
        """Return the number of the first deployment that boots; count the tries of those before."""
        deployments = Sysroot(self.root).read_written()
        catalogue = images.load_catalogue(self._images_file)
        for number, deployment in enumerate(deployments):
            image = catalogue.find_by_digest(deployment.digest)
            if image is None or "boot" not in image.faults:
                return number
            self.failed_boot_count += self.read_settings().boot_tries
        raise HostError(f"cannot boot {self.name}: no deployment boots")

    def _finalize_staged(self) -> None:
        """Finalize the staged deployment, as ostree-finalize-staged.service does at shutdown."""
        sysroot = Sysroot(self.root)
        staged = sysroot.read_staged()
        if staged is None:
            return
        if sysroot.is_staged_locked():
            text = "Not finalizing; deployment is locked for finalization"
            self._log_message("ostree", text)
            return
        image = images.load_catalogue(self._images_file).find_by_digest(staged.digest)
        failure = self.read_settings().finalization_error
        failure = failure or (image.faults.get("finalize", "") if image else "")
        report = find_unit_log(self.root, FINALIZE_UNIT)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(f"error: {failure}\n" if failure else "", encoding="utf-8")
        if failure:
            self._log_message("ostree", f"error: {failure}", priority=3)
            return
        sysroot.finalize_staged()
        self._log_message("ostree", f"Finalized deployment {staged.checksum}.{staged.serial}")

    def _log_message(self, identifier: str, message: str, *, priority: int = 6) -> None:
        fields = {
            "PRIORITY": str(priority),
            "SYSLOG_IDENTIFIER": identifier,
            "MESSAGE": message,
        }
        self._journal.write_entry(fields)

    def _serve_request(self, line: str) -> None:
        """Execute a request of systemd or logind, in the thread that reads their output."""
        match line.split():
            case ["reboot" | "soft-reboot" as how]:
                self._reboot_if_current(self.boot_count, soft=how == "soft-reboot")
            case ["unit", verb, name] if name == KUBELET_UNIT:
                self.is_kubelet_running = verb != "stop"
            case ["unit", "restart" | "stop", "rpm-ostreed.service"]:
                self._daemons.stop_rpmostreed(signal.SIGTERM)
            case _:
                return

    def _reboot_if_current(self, count: int, *, soft: bool) -> None:
        with self._hold_power():
            # Power cut or stopped since the reboot was requested: do not reboot again.
            if self._is_on and self.boot_count == count:
                self._shut_down()
                self._boot_again(soft=soft)
