"""The D-Bus side of a running machine: the bus, systemd and logind, and rpm-ostreed on demand.

`RpmOstreeHost` is the smallest machine: a bus with rpm-ostreed alone.
"""

import os
import select
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from gi.repository import GLib

from treenail.errors import HostError, UsageError
from treenail_lab import images
from treenail_lab.images import Image, ImageCatalogue
from treenail_lab.lifetime.fork_server import LabProcess, build_client_command
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path
from treenail_lab.lifetime.owner import owner
from treenail_lab.lifetime.reaper import kill_marked
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.bus.daemon import SOCKET_PATH_MAX, PrivateBus
from treenail_lab.machine.bus.objects import bus_method, call_method, scoped_connection
from treenail_lab.machine.ostree.sysroot import Sysroot
from treenail_lab.machine.settings import MachineSettings

RPM_OSTREE_NAME = "org.projectatomic.rpmostree1"
_MARK = "TREENAIL_LAB_MACHINE"
_READY_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 3.0


def build_rpmostreed_command(
    root: Path, catalogue: Path, settings: Path, pid_file: Path
) -> list[str]:
    """Return the command with which the bus activates rpm-ostreed."""
    places = {"--root": root, "--images": catalogue, "--settings": settings, "--pid-file": pid_file}
    words = [str(word) for place in places.items() for word in place]
    return build_client_command([*PYTHON_MODULE, "treenail_lab.machine.rpmostree.daemon", *words])


def build_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a machine's processes: programs, packages, and their marks."""
    return {
        **os.environ,
        **owner.mark_environment(),
        "PYTHONPATH": build_python_path(),
        "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        _MARK: str(directory),
    }


def kill_marked_processes(directory: Path) -> None:
    """Kill every process that a machine started, also those that the bus or the agent started."""
    kill_marked(_MARK, str(directory))


def check_socket_length(root: Path) -> None:
    """Raise `UsageError` if the path of a socket below ``root`` is too long."""
    length = len(os.fsencode(root / "run/rpm-ostree-transaction.sock"))
    if length > SOCKET_PATH_MAX:
        raise UsageError(
            f"cannot make sockets below {root}: their path has {length} bytes, "
            f"and {SOCKET_PATH_MAX} is the limit",
            remedy="name a directory with a shorter path, for example below /tmp",
        )


class MachineDaemons:
    """Everything below the agent; ``on_request`` gets each line that the services print."""

    def __init__(
        self,
        directory: Path,
        root: Path,
        catalogue: Path,
        settings_file: Path,
        *,
        on_request: Callable[[str], None],
    ) -> None:
        self.log = directory / "daemons.log"
        self._directory = directory
        self._root = root
        self._settings = settings_file
        self._pid_file = directory / "rpm-ostreed.pid"
        self._on_request = on_request
        self._services: subprocess.Popen[str] | None = None
        self._bus = PrivateBus(
            directory,
            services={
                RPM_OSTREE_NAME: shlex.join(
                    build_rpmostreed_command(root, catalogue, settings_file, self._pid_file)
                )
            },
            environment=build_environment(directory),
            log=self.log,
        )
        self.address = self._bus.address

    def start(self) -> None:
        """Start all; systemd and logind own their bus names when this returns."""
        self._bus.start()
        module = "treenail_lab.machine.node.services"
        places = ["--root", str(self._root), "--settings", str(self._settings)]
        with self.log.open("ab") as output:
            services = LabProcess(
                [*PYTHON_MODULE, module, *places],
                env={**build_environment(self._directory), "DBUS_SYSTEM_BUS_ADDRESS": self.address},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                # Ctrl-C in the terminal ends the lab, which then stops its machines in order.
                start_new_session=True,
            )
        self._services = services
        ready = threading.Event()
        listener = threading.Thread(
            target=self._read_lines, args=(services, ready), name="services", daemon=True
        )
        listener.start()
        if not ready.wait(_READY_TIMEOUT_S) or services.poll() is not None:
            raise HostError(
                f"cannot start the systemd emulator of {self._root}", remedy=f"see {self.log}"
            )

    def stop(self, *, hard: bool) -> None:
        """Stop all: at once when ``hard``, else with SIGTERM first."""
        number = signal.SIGKILL if hard else signal.SIGTERM
        self.stop_rpmostreed(number)
        services, self._services = self._services, None
        if services is not None:
            services.send_signal(number)
            services.send_signal(signal.SIGCONT)
            try:
                services.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                services.kill()
                services.wait()
        self._bus.stop(hard=hard)
        kill_marked_processes(self._directory)

    def find_pid(self, name: str) -> int:
        """Return the process id of ``rpm-ostreed``, ``systemd`` or ``bus``; 0 if none runs."""
        if name == "bus":
            return self._bus.pid
        if name == "systemd":
            return self._services.pid if self._services is not None else 0
        if name != "rpm-ostreed":
            raise ValueError(f"no daemon {name!r}: bus, systemd or rpm-ostreed")
        try:
            pid = int(self._pid_file.read_text(encoding="ascii"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            # A read fails with ESRCH when the process ends after the file was opened (proc(5)).
            return 0
        # Another process may have the pid by now; only ours has our root as an argument.
        return pid if os.fsencode(self._root) in command.split(b"\0") else 0

    def stop_rpmostreed(self, signal_number: int) -> None:
        """Stop rpm-ostreed, also in the middle of a transaction; it has ended when this returns."""
        pid = self.find_pid("rpm-ostreed")
        if not pid:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            for chosen in (signal_number, signal.SIGKILL):
                signal.pidfd_send_signal(pidfd, chosen)
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                if select.select([pidfd], [], [], _STOP_TIMEOUT_S)[0]:
                    return
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)

    def start_rpmostreed(self) -> None:
        """Start rpm-ostreed if it does not run, by bus activation."""
        with scoped_connection(self.address) as bus:
            call_method(
                bus, bus_method("StartServiceByName"), GLib.Variant("(su)", (RPM_OSTREE_NAME, 0))
            )

    def _read_lines(self, services: subprocess.Popen[str], ready: threading.Event) -> None:
        if services.stdout is None:
            return
        with services.stdout as lines:
            for line in lines:
                if line.strip() == "ready":
                    ready.set()
                else:
                    self._on_request(line.strip())
        # `start` must not wait for services that have ended.
        services.wait()
        ready.set()


class RpmOstreeHost:
    """A root booted from ``booted``, and a bus at ``address`` that activates rpm-ostreed."""

    def __init__(
        self,
        directory: Path,
        *,
        booted: Image,
        images: tuple[Image, ...] = (),
        settings: MachineSettings | None = None,
    ) -> None:
        self.root = directory / "root"
        self._catalogue = directory / "images.json"
        self._settings = directory / "settings.json"
        self._images = ImageCatalogue((booted, *images))
        self._first_settings = settings or MachineSettings()
        self._booted = booted
        command = build_rpmostreed_command(
            self.root, self._catalogue, self._settings, directory / "rpm-ostreed.pid"
        )
        self._bus = PrivateBus(
            directory,
            services={RPM_OSTREE_NAME: shlex.join(command)},
            environment=build_environment(directory),
            log=directory / "daemons.log",
        )
        self.address = self._bus.address

    @property
    def sysroot(self) -> Sysroot:
        """Return the deployments, read from the disk."""
        return Sysroot(self.root)

    def change_settings(self, new: MachineSettings) -> None:
        """Replace the settings."""
        settings.save_settings(new, self._settings)

    def reboot(self) -> None:
        """Finalize and boot as a clean reboot does, and start the bus again."""
        self._bus.stop()
        self.sysroot.finalize_staged()
        rootfs.boot_root(self.root)
        self._bus.start()

    def __enter__(self) -> "RpmOstreeHost":
        check_socket_length(self.root)
        images.save_catalogue(self._images, self._catalogue)
        self.change_settings(self._first_settings)
        rootfs.install_root(self.root, self._booted)
        rootfs.boot_root(self.root)
        self._bus.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.stop()
