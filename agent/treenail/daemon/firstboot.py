"""A machine's first boot: it moves to its operating system before it joins its cluster."""

import json
import logging
from dataclasses import dataclass
from typing import Protocol

from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.config.wanted import wanted
from treenail.daemon.reconcile import prestage
from treenail.daemon.reconcile.busy_wait import wait_out
from treenail.daemon.reconcile.interfaces import (
    Credentials,
    Kernel,
    OperatingSystem,
    Power,
    Preflight,
)
from treenail.daemon.reconcile.observe import deployed
from treenail.daemon.reconcile.pull import pull
from treenail.errors import BusyError, HostError, TreenailError
from treenail.host.filesystem.files import Files
from treenail.host.ostree.deployments import Progress, Verdict
from treenail.kube.backoff import Backoff
from treenail.update import firstboot
from treenail.update.firstboot import Asked, Begun, Move, Ready, decide

log = logging.getLogger(__name__)

ENCAPSULATED = "/etc/ignition-machine-config-encapsulated.json"
ASIDE = f"{ENCAPSULATED}.bak"
STATE = "/var/lib/treenail/firstboot.json"
DONE = "/var/lib/treenail/firstboot.done"
BEGAN = "/run/treenail/firstboot.began"
_LIMIT = 64 * 1024 * 1024
_RETRY_FIRST_S, _RETRY_MOST_S = 5.0, 60.0


class Services(Protocol):
    """The service manager."""

    def start_default(self) -> None:
        """Have begun whatever the boot was to start and does not run; returns at once."""


class Stop(Protocol):
    """Whether the program was told to stop."""

    def wait(self, timeout: float) -> bool: ...
    def is_set(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that is asked and acted on."""

    os: OperatingSystem
    power: Power
    kernel: Kernel
    credentials: Credentials
    preflight: Preflight
    services: Services
    clock: Clock


def began_before(files: Files) -> bool:
    """Whether another process began before in this boot, and died; to be asked first of all.

    Raises `FileError`.
    """
    before = files.is_there(BEGAN)
    files.write(BEGAN, b"", mode=0o600)
    return before


class FirstBoot:
    """Repeatable at any point: what was staged is lost with the power, and staged again."""

    def __init__(
        self,
        files: Files,
        machine: Machine,
        *,
        image: str,
        pull_secret: str,
        stop: Stop,
        again: bool = False,
    ) -> None:
        """``image`` is the settings' own wish; ``pull_secret`` is where the config's is put.

        ``again``: another process died before in this boot, and what waited for it with it.
        """
        self._again = again
        self._files = files
        self._machine = machine
        self._image = image
        self._pull_secret = pull_secret
        self._stop = stop

    def run(self) -> bool:
        """Whether the machine may join; False when it was told to stop, as a reboot does.

        What fails, as the network may not be there yet, is tried again, in the end every minute
        and as long as it takes: a machine that is not what it was made to be must not join.
        """
        told = ""
        backoff = Backoff(first_s=_RETRY_FIRST_S, most_s=_RETRY_MOST_S)
        while not self._stop.is_set():
            try:
                if self.turn():
                    return True
                log.info("waiting for the reboot")
            except TreenailError as error:
                text = f"{error}; {error.remedy}" if error.remedy else str(error)
                if text != told:
                    log.warning("not ready to join: %s", text)
                told = text
            self._stop.wait(backoff.pause_s())
        return False

    def turn(self) -> bool:
        """Do what there is to do; whether nothing is left. Raises `TreenailError`."""
        if self._files.is_there(DONE):
            return True
        machine, asked = self._machine, self._asked()
        if asked == Asked():
            self._finish("nothing is asked for before it joins")
            return True
        boot_id, begun = machine.kernel.boot_id(), self._begun()
        found = deployed(machine.os.look(), machine.kernel.command_line())
        fips = machine.kernel.fips_enabled()
        match decide(asked, found.running, begun, fips=fips, boot_id=boot_id):
            case Ready(reason=reason):
                self._finish(reason)
                return True
            case Move() as move:
                final = bool(found.staged_id) and not found.locked
                if not final or found.staged_id != begun.staged_id:
                    self._stage(move, asked)
                # Else it was killed once the next boot was to be into it.
                self._reboot(begun.reboots + (begun.boot_id != boot_id), boot_id)
                return False

    def _asked(self) -> Asked:
        content = self._files.read(ENCAPSULATED, limit=_LIMIT)
        config = None
        if content is not None:
            document = documents.load(content, where=ENCAPSULATED)
            config = MachineConfig.from_json(document)
        return Asked(config, self._image)

    def _begun(self) -> Begun:
        content = self._files.read(STATE, limit=_LIMIT)
        try:
            return firstboot.from_json(json.loads(content or b"null"))
        except ValueError:
            return Begun()

    def _stage(self, move: Move, asked: Asked) -> None:
        machine = self._machine
        self._have_login(asked)
        for problem in machine.credentials.refresh():
            log.warning("%s", problem)

        def attempt() -> bool:
            machine.preflight.clear(move.change.image)
            log.info("staging %s", move.change.image or "kernel arguments and packages")
            machine.os.stage(prestage.change(move.change), watch=self._watch)
            return not self._stop.is_set()

        try:
            pull(machine.credentials, move.change.image, attempt)
        except BusyError as error:
            wait_out(error, machine.os, self._watch)
            raise

    def _reboot(self, reboots: int, boot_id: str) -> None:
        machine = self._machine
        staged = machine.os.look().staged
        if staged is None:
            raise HostError("what was staged for the first boot is gone")
        begun = Begun(reboots, boot_id, staged.id)
        self._files.write(STATE, json.dumps(firstboot.to_json(begun)).encode(), mode=0o600)
        log.info("rebooting into %s", staged.image or staged.id)
        machine.os.finalize(staged.id)
        machine.power.reboot()

    def _have_login(self, asked: Asked) -> None:
        """A pull secret that the config has and the disk has not is put there."""
        if asked.config is None or self._files.is_there(self._pull_secret):
            return
        file = wanted(asked.config).files.get(self._pull_secret)
        if file is not None:
            self._files.write(self._pull_secret, file.contents.decode(), mode=0o600)

    def _finish(self, reason: str) -> None:
        """For good, and in this order: the mark is what the next boot goes by."""
        if self._again:
            # The kubelet failed with the process before. Started now, it waits for this one to
            # end; after the mark it might be too late, for with that nothing begins again.
            self._machine.services.start_default()
        self._files.write(DONE, b"", mode=0o600)
        content = self._files.read(ENCAPSULATED, limit=_LIMIT)
        if content is not None:
            self._files.write(ASIDE, content, mode=0o600)
            self._files.remove(ENCAPSULATED)
        self._files.remove(STATE)
        self._machine.os.release()
        log.info("the machine may join its cluster: %s", reason)

    def _watch(self, progress: Progress) -> Verdict:
        log.debug("%s %s", progress.text, progress.percent)
        return Verdict.LEAVE if self._stop.is_set() else Verdict.GO_ON
