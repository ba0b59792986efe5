"""A machine's first boot: it moves to its operating system before it joins its cluster."""

import json
import logging
from dataclasses import dataclass
from typing import Protocol

from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.config.wanted import read_wanted_state
from treenail.daemon.reconcile import prestage
from treenail.daemon.reconcile.busy_wait import wait_while_busy
from treenail.daemon.reconcile.interfaces import (
    KernelInfo,
    OSBackend,
    Power,
    PreflightCheck,
    RegistryCredentials,
)
from treenail.daemon.reconcile.observe import summarize_deployments
from treenail.daemon.reconcile.pull import pull_image
from treenail.errors import BusyError, HostError, TreenailError
from treenail.host.filesystem.files import HostFiles
from treenail.host.ostree.deployments import TransactionProgress, WatchVerdict
from treenail.kube.backoff import Backoff
from treenail.update import firstboot
from treenail.update.firstboot import (
    FirstBootProgress,
    FirstBootReady,
    FirstBootStage,
    FirstBootTarget,
    decide_first_boot,
)

log = logging.getLogger(__name__)

ENCAPSULATED_CONFIG = "/etc/ignition-machine-config-encapsulated.json"
ENCAPSULATED_BACKUP = f"{ENCAPSULATED_CONFIG}.bak"
STATE_FILE = "/var/lib/treenail/firstboot.json"
DONE_FILE = "/var/lib/treenail/firstboot.done"
BEGAN_FILE = "/run/treenail/firstboot.began"
_LIMIT = 64 * 1024 * 1024
_RETRY_FIRST_S, _RETRY_MAX_S = 5.0, 60.0


class DefaultTargetStarter(Protocol):
    """The service manager."""

    def start_default_target(self) -> None:
        """Have begun whatever the boot was to start and does not run; returns at once."""


class StopEvent(Protocol):
    """Whether the program was told to stop."""

    def wait(self, timeout: float) -> bool: ...
    def is_set(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class FirstBootInterfaces:
    """Everything that is asked and acted on."""

    os: OSBackend
    power: Power
    kernel: KernelInfo
    credentials: RegistryCredentials
    preflight: PreflightCheck
    services: DefaultTargetStarter
    clock: Clock


def record_start(files: HostFiles) -> bool:
    """Whether another process began before in this boot, and died; to be asked first of all.

    Raises `FileError`.
    """
    before = files.has_entry(BEGAN_FILE)
    files.write_file(BEGAN_FILE, b"", mode=0o600)
    return before


class FirstBootRunner:
    """Repeatable at any point: what was staged is lost with the power, and staged again."""

    def __init__(
        self,
        files: HostFiles,
        interfaces: FirstBootInterfaces,
        *,
        image: str,
        pull_secret: str,
        stop: StopEvent,
        is_restart: bool = False,
    ) -> None:
        """``image`` is the settings' own wish; ``pull_secret`` is where the config's is put.

        ``is_restart``: another process died before in this boot, and what waited for it with it.
        """
        self._is_restart = is_restart
        self._files = files
        self._interfaces = interfaces
        self._image = image
        self._pull_secret = pull_secret
        self._stop = stop

    def run(self) -> bool:
        """Whether the machine may join; False when it was told to stop, as a reboot does.

        What fails, as the network may not be there yet, is tried again, in the end every minute
        and as long as it takes: a machine that is not what it was made to be must not join.
        """
        told = ""
        backoff = Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
        while not self._stop.is_set():
            try:
                if self.reconcile_once():
                    return True
                log.info("waiting for the reboot")
            except TreenailError as error:
                text = f"{error}; {error.remedy}" if error.remedy else str(error)
                if text != told:
                    log.warning("not ready to join: %s", text)
                told = text
            self._stop.wait(backoff.next_pause_s())
        return False

    def reconcile_once(self) -> bool:
        """Do what there is to do; whether nothing is left. Raises `TreenailError`."""
        if self._files.has_entry(DONE_FILE):
            return True
        machine, asked = self._interfaces, self._read_request()
        if asked == FirstBootTarget():
            self._finish_first_boot("nothing is asked for before it joins")
            return True
        boot_id, begun = machine.kernel.read_boot_id(), self._read_state()
        found = summarize_deployments(
            machine.os.read_deployments(), machine.kernel.read_command_line()
        )
        fips = machine.kernel.is_fips_enabled()
        match decide_first_boot(asked, found.running, begun, fips=fips, boot_id=boot_id):
            case FirstBootReady(reason=reason):
                self._finish_first_boot(reason)
                return True
            case FirstBootStage() as move:
                final = bool(found.staged_id) and not found.is_locked
                if not final or found.staged_id != begun.staged_id:
                    self._stage_os(move, asked)
                # Else it was killed once the next boot was to be into it.
                self._reboot_into_staged(begun.reboot_count + (begun.boot_id != boot_id), boot_id)
                return False

    def _read_request(self) -> FirstBootTarget:
        content = self._files.read_file(ENCAPSULATED_CONFIG, limit=_LIMIT)
        config = None
        if content is not None:
            document = documents.load_document(content, where=ENCAPSULATED_CONFIG)
            config = MachineConfig.from_json(document)
        return FirstBootTarget(config, self._image)

    def _read_state(self) -> FirstBootProgress:
        content = self._files.read_file(STATE_FILE, limit=_LIMIT)
        try:
            return firstboot.from_json(json.loads(content or b"null"))
        except ValueError:
            return FirstBootProgress()

    def _stage_os(self, move: FirstBootStage, asked: FirstBootTarget) -> None:
        machine = self._interfaces
        self._install_login(asked)
        for problem in machine.credentials.install_secrets():
            log.warning("%s", problem)

        def attempt() -> bool:
            machine.preflight.check_image(move.change.image)
            log.info("staging %s", move.change.image or "kernel arguments and packages")
            machine.os.stage_deployment(
                prestage.build_deployment_change(move.change), watch=self._check_progress
            )
            return not self._stop.is_set()

        try:
            pull_image(machine.credentials, move.change.image, attempt)
        except BusyError as error:
            wait_while_busy(error, machine.os, self._check_progress)
            raise

    def _reboot_into_staged(self, reboots: int, boot_id: str) -> None:
        machine = self._interfaces
        staged = machine.os.read_deployments().staged
        if staged is None:
            raise HostError("what was staged for the first boot is gone")
        begun = FirstBootProgress(reboots, boot_id, staged.id)
        self._files.write_file(
            STATE_FILE, json.dumps(firstboot.to_json(begun)).encode(), mode=0o600
        )
        log.info("rebooting into %s", staged.image or staged.id)
        machine.os.finalize_staged(staged.id)
        machine.power.reboot_machine()

    def _install_login(self, asked: FirstBootTarget) -> None:
        """A pull secret that the config has and the disk has not is put there."""
        if asked.config is None or self._files.has_entry(self._pull_secret):
            return
        file = read_wanted_state(asked.config).files.get(self._pull_secret)
        if file is not None:
            self._files.write_file(self._pull_secret, file.contents.decode_bytes(), mode=0o600)

    def _finish_first_boot(self, reason: str) -> None:
        """For good, and in this order: the mark is what the next boot goes by."""
        if self._is_restart:
            # The kubelet failed with the process before. Started now, it waits for this one to
            # end; after the mark it might be too late, for with that nothing begins again.
            self._interfaces.services.start_default_target()
        self._files.write_file(DONE_FILE, b"", mode=0o600)
        content = self._files.read_file(ENCAPSULATED_CONFIG, limit=_LIMIT)
        if content is not None:
            self._files.write_file(ENCAPSULATED_BACKUP, content, mode=0o600)
            self._files.remove_file(ENCAPSULATED_CONFIG)
        self._files.remove_file(STATE_FILE)
        self._interfaces.os.release_daemon()
        log.info("the machine may join its cluster: %s", reason)

    def _check_progress(self, progress: TransactionProgress) -> WatchVerdict:
        log.debug("%s %s", progress.text, progress.percent)
        return WatchVerdict.DETACH if self._stop.is_set() else WatchVerdict.CONTINUE
