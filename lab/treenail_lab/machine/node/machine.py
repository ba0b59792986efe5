"""One node of the lab: a root directory, its services, and an agent that runs on it.

::

    with Machine("node-a", directory, images_file, image=image_a, agent=command) as machine:
        machine.agent.wait(lambda unit: unit.ready, 10)
        machine.power_cut()

Everything above the edge of the operating system is real: a D-Bus daemon, processes, sockets,
signals. A reboot ends the processes, finalizes what was staged, empties /run and begins again with
another boot id; a soft one keeps both. All methods may be called from any thread and return when
the deed is done.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from treenail.errors import HostError
from treenail_lab import images
from treenail_lab.images import Image
from treenail_lab.machine import rootfs, settings
from treenail_lab.machine.container import skopeo
from treenail_lab.machine.container.cri_socket import Runtime
from treenail_lab.machine.node import other_clients
from treenail_lab.machine.node.agent_unit import AgentUnit
from treenail_lab.machine.node.daemons import Daemons, check_length, environment
from treenail_lab.machine.ostree.sysroot import Deployment, Sysroot, boot_options, deployment_of
from treenail_lab.machine.programs import commands
from treenail_lab.machine.settings import Settings
from treenail_lab.machine.systemd.journal import Entry, Journal

KUBELET = "kubelet.service"
KUBELET_CONFIG = "var/lib/kubelet/config.json"
_POWER_LIMIT_S = 60.0


class Machine:
    """A machine that was installed from ``image`` and is off until `start`.

    ``agent`` is the command of its agent; ``kubelet_config`` the cluster's pull secret as the
    kubelet has it. The directory stays when the machine is stopped, and can be started again.
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
        behaviour: Settings | None = None,
    ) -> None:
        self.name = name
        self.root = directory / "root"
        self.agent_log = directory / "agent.log"
        self.boot_count = 0
        self.failed_boots = 0
        self.kubelet_runs = False
        self.at_boot: Callable[[Deployment], None] = lambda _: None
        """Called in each boot before anything runs, to make the system a bad one."""
        self._images_file = images_file
        self._settings_file = directory / "settings.json"
        self._agent_command = list(agent)
        self._on = False
        self._power = threading.RLock()
        self._giving_up = threading.Event()
        self._booted = threading.Condition()
        check_length(self.root)
        directory.mkdir(parents=True, exist_ok=True)
        rootfs.install(self.root, image)
        if kubelet_config:
            place = self.root / KUBELET_CONFIG
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(kubelet_config, encoding="utf-8")
            place.chmod(0o600)
        settings.save(behaviour or Settings(), self._settings_file)
        self._journal = Journal(self.root)
        self._runtime = Runtime(self.root)
        on_path = skopeo.install(directory, self.root, images_file)
        commands.install(self.root, images_file, self._settings_file)
        self._daemons = Daemons(
            directory, self.root, images_file, self._settings_file, asked=self._asked
        )
        self._agent = AgentUnit(
            agent,
            self.root,
            environment={
                **environment(directory),
                "PATH": f"{on_path}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                **(agent_environment or {}),
                "DBUS_SYSTEM_BUS_ADDRESS": self.address,
            },
            output=self.agent_log,
            journal=self._journal,
            behaviour=self.behaviour,
        )

    # What it is

    @property
    def address(self) -> str:
        """The address of its system bus."""
        return self._daemons.address

    @property
    def on(self) -> bool:
        return self._on

    @property
    def boot_id(self) -> str:
        return rootfs.boot_id(self.root)

    @property
    def booted(self) -> Deployment | None:
        return Sysroot(self.root).booted()

    @property
    def staged(self) -> Deployment | None:
        return Sysroot(self.root).staged()

    @property
    def staged_locked(self) -> bool:
        return Sysroot(self.root).locked()

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """All deployments, a staged one first."""
        return Sysroot(self.root).everything()

    @property
    def agent(self) -> AgentUnit:
        """The agent's service: ``state``, ``ready``, ``status``, ``pid``, ``starts``, ``wait``."""
        return self._agent

    def behaviour(self) -> Settings:
        """The settings in force."""
        return settings.load(self._settings_file)

    def journal(self, match: Mapping[str, str] | None = None) -> list[Entry]:
        """The journal's entries of all boots that have these fields, oldest first."""
        return self._journal.entries(match)

    def wait_for_boot(self, count: int, limit_s: float) -> bool:
        """Wait until the machine has booted so many times; says whether it has."""
        with self._booted:
            return self._booted.wait_for(lambda: self.boot_count >= count, limit_s)

    # Power

    def start(self) -> None:
        """Switch it on; the services run and the agent was started when this returns."""
        with self._locked():
            self._giving_up.clear()
            if not self._on:
                self._boot()

    def stop(self) -> None:
        """Shut it down in order; no process of it is left when this returns."""
        self._giving_up.set()
        with self._locked():
            if self._on:
                self._shut_down()

    def reboot(self, *, soft: bool = False) -> None:
        """Reboot in order, as ``systemctl reboot`` or ``systemctl soft-reboot`` would."""
        with self._locked():
            self._shut_down()
            self._boot_again(soft=soft)

    def power_cut(self) -> None:
        """Take the power away in the middle of whatever it does, and give it back."""
        with self._locked():
            self._on = False
            self._runtime.stop()
            self._agent.power_off()
            self._daemons.stop(hard=True)
            self._journal.stop()
            self._boot_again()

    def __enter__(self) -> "Machine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The agent and the services

    def start_agent(self) -> None:
        self._agent.start()

    def stop_agent(self) -> None:
        """Stop the agent as systemctl would; a boot starts it again."""
        self._agent.stop()

    def kill_agent(self, number: int = signal.SIGKILL) -> None:
        """Send the agent a signal; if it dies of it, it is restarted."""
        self._agent.kill(number)

    def restart_service(self, name: str, *, number: int = signal.SIGTERM) -> None:
        """Restart ``rpm-ostreed``, in the middle of a transaction too; SIGKILL is a crash."""
        if name != "rpm-ostreed":
            raise ValueError(f"only rpm-ostreed can be restarted, not {name!r}")
        self._daemons.stop_rpmostreed(number)
        self._daemons.start_rpmostreed()

    @contextmanager
    def hung(self, name: str) -> Iterator[None]:
        """While inside, ``rpm-ostreed``, ``systemd``, ``bus`` or ``agent`` answers nothing."""
        pid = self._agent.pid if name == "agent" else self._daemons.pid(name)
        if not pid:
            raise HostError(f"{name} does not run on {self.name}")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if pid in (self._agent.pid, *map(self._daemons.pid, ("rpm-ostreed", "systemd", "bus"))):
                os.kill(pid, signal.SIGCONT)

    # Faults and other people

    def change(self, **values: object) -> None:
        """Change how the machine behaves, from now on: see `Settings` for the names."""
        settings.save(replace(self.behaviour(), **values), self._settings_file)  # type: ignore[arg-type]

    def stage_foreign(self, image: Image, *, locked: bool = False) -> None:
        """Stage ``image`` behind rpm-ostreed's back, as bootc or an administrator may."""
        sysroot = Sysroot(self.root)
        base = sysroot.base()
        if base is None:
            raise HostError(f"{self.name} has no deployment")
        refspec = f"ostree-unverified-registry:{image.pull_spec}"
        serial = sysroot.next_serial(image.commit)
        deployment = deployment_of(image, refspec, base.kernel_arguments, serial)
        sysroot.stage(deployment, locked=locked)

    @contextmanager
    def transaction_held(self) -> Iterator[None]:
        """While inside, somebody else's transaction runs; for ten minutes at most."""
        self.change(refresh_md_s=600.0)
        other_clients.begin_refresh(self.address)
        try:
            yield
        finally:
            self.change(refresh_md_s=0.0)

    @contextmanager
    def sysroot_locked(self) -> Iterator[None]:
        """While inside, bootc or ostree holds the sysroot: rpm-ostree can begin nothing."""
        lock = Sysroot(self.root).lock()
        if lock is None:
            raise HostError(f"a transaction holds the sysroot of {self.name}")
        try:
            yield
        finally:
            os.close(lock)

    def inhibit_shutdown(
        self, who: str, why: str, *, mode: str = "block"
    ) -> AbstractContextManager[None]:
        """Somebody else's inhibitor lock for shutdown, held inside the ``with``."""
        return other_clients.shutdown_inhibited(self.address, who=who, why=why, mode=mode)

    # How it goes up and down

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._power.acquire(timeout=_POWER_LIMIT_S):
            raise HostError(f"{self.name} neither booted nor shut down in {_POWER_LIMIT_S:g} s")
        try:
            yield
        finally:
            self._power.release()

    def _boot_again(self, *, soft: bool = False) -> None:
        # A stop ends the time between two boots, and the next boot does not come.
        if not self._giving_up.wait(0.0 if soft else self.behaviour().boot_s):
            self._boot(soft=soft)

    def _boot(self, *, soft: bool = False) -> None:
        if soft:
            booted = rootfs.soft_boot(self.root)
        else:
            booted = rootfs.boot(self.root, self._first_that_boots())
        self.at_boot(booted)
        self._journal.start()
        self._log("kernel", f"Command line: {boot_options(booted)}")
        try:
            self._daemons.start()
            self._runtime.start()
            self.kubelet_runs = other_clients.unit_runs(self.address, KUBELET)
        except HostError:
            self._daemons.stop(hard=True)
            self._journal.stop()
            raise
        self._on = True
        with self._booted:
            self.boot_count += 1
            self._booted.notify_all()
        if self._agent_command:
            self._agent.start()

    def _shut_down(self) -> None:
        self._on = False
        self._agent.stop()
        self._runtime.stop()
        self._daemons.stop_rpmostreed(signal.SIGTERM)
        self._finalize()
        self._daemons.stop(hard=False)
        self._journal.stop()

    def _first_that_boots(self) -> int:
        """The boot loader's choice: what dies when it boots is tried some times, and then left."""
        deployments = Sysroot(self.root).written()
        catalogue = images.load(self._images_file)
        for number, each in enumerate(deployments):
            image = catalogue.of(each.digest)
            if image is None or "boot" not in image.faults:
                return number
            self.failed_boots += self.behaviour().boot_tries
        raise HostError(f"{self.name} has no deployment that boots")

    def _finalize(self) -> None:
        """What ostree-finalize-staged.service does while the machine goes down."""
        sysroot = Sysroot(self.root)
        staged = sysroot.staged()
        if staged is None:
            return
        if sysroot.locked():
            text = "Not finalizing; found /run/ostree/staged-deployment-locked"
            self._log("ostree", text)
            return
        image = images.load(self._images_file).of(staged.digest)
        failure = self.behaviour().finalization_error
        failure = failure or (image.faults.get("finalize", "") if image else "")
        if failure:
            self._log("ostree", f"error: {failure}", priority=3)
            return
        sysroot.finalize()
        self._log("ostree", f"Finalized deployment {staged.checksum}.{staged.serial}")

    def _log(self, identifier: str, message: str, *, priority: int = 6) -> None:
        fields = {
            "PRIORITY": str(priority),
            "SYSLOG_IDENTIFIER": identifier,
            "MESSAGE": message,
        }
        self._journal.write(fields)

    def _asked(self, line: str) -> None:
        """Do what systemd or logind tells; runs in the thread that listens to them."""
        match line.split():
            case ["reboot" | "soft-reboot" as how]:
                self._reboot_if_still(self.boot_count, soft=how == "soft-reboot")
            case ["unit", verb, name] if name == KUBELET:
                self.kubelet_runs = verb != "stop"
            case ["unit", "restart" | "stop", "rpm-ostreed.service"]:
                self._daemons.stop_rpmostreed(signal.SIGTERM)
            case _:
                return

    def _reboot_if_still(self, count: int, *, soft: bool) -> None:
        with self._locked():
            # The power may have been cut, or the machine stopped, since the reboot was asked for.
            if self._on and self.boot_count == count:
                self._shut_down()
                self._boot_again(soft=soft)
