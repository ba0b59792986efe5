"""First boot: move the machine to its operating system before it joins its cluster."""

import json
import logging
import threading
from dataclasses import dataclass, replace

from treenail import clocks, errors, retry
from treenail.api import documents, machineconfig
from treenail.config import node_paths, wanted_state
from treenail.daemon.checks.preflight import PreflightChecker
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.daemon.firstboot_verifier import FirstBootVerifier
from treenail.daemon.local.status_file import StatusFile
from treenail.daemon.reconcile import observe, os_transaction
from treenail.encoding import json_text
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.ostree.deployments import OSBackend, TransactionProgress, TransactionVerdict
from treenail.host.system.kernel import FIRST_COMMAND_LINE, HostKernel
from treenail.host.systemd import logind, systemd
from treenail.update import firstboot

log = logging.getLogger(__name__)

ENCAPSULATED_CONFIG = node_paths.ENCAPSULATED_CONFIG
ENCAPSULATED_BACKUP = f"{ENCAPSULATED_CONFIG}.bak"
STATE_FILE = "/var/lib/treenail/firstboot.json"
DONE_FILE = "/var/lib/treenail/firstboot.done"
BEGAN_FILE = "/run/treenail/firstboot.began"
_PROVISIONED = ("/etc", "/var")
"""Ignition unmounts, and thus flushes, each further file system that it writes to."""
_LIMIT = 64 * 1024 * 1024
_RETRY_FIRST_S, _RETRY_MAX_S = 5.0, 60.0
_PROGRESS_STEP_PERCENT = 10


@dataclass(frozen=True, slots=True)
class FirstBootInterfaces:
    """Everything that the first boot reads and changes."""

    os: OSBackend
    power: logind.Logind
    kernel: HostKernel
    credentials: PullSecrets
    preflight: PreflightChecker
    services: systemd.Systemd
    verifier: FirstBootVerifier
    clock: clocks.Clock
    status: StatusFile


def record_start(files: HostFiles) -> bool:
    """Record this start; return whether another process started earlier in this boot, and died.

    Call it before everything else. Raises `FileError`.
    """
    has_earlier = files.has_entry(BEGAN_FILE)
    files.write_file(BEGAN_FILE, b"", mode=0o600)
    return has_earlier


class FirstBootRunner:
    """Runs the first boot. It can restart at any point, and stages again after a power cut."""

    def __init__(
        self,
        files: HostFiles,
        interfaces: FirstBootInterfaces,
        *,
        image: str,
        pull_secret: str,
        stop: threading.Event,
        is_restart: bool = False,
    ) -> None:
        """Take the settings' ``image``, and the path for the config's ``pull_secret``.

        ``is_restart``: another process died in this boot, and units that wait for it failed.
        """
        self._is_restart = is_restart
        self._files = files
        self._interfaces = interfaces
        self._image = image
        self._pull_secret = pull_secret
        self._stop = stop
        self._logged_percent = 0
        self._refused_id = ""
        """The staged deployment whose image lacks files of the config."""

    def run(self) -> bool:
        """Return True when the machine may join, False when a signal stopped the program.

        Retries failures forever, with a delay of up to a minute: the network may not be up yet,
        and a machine without its operating system must not join.
        """
        logged = ""
        backoff = retry.Backoff(first_s=_RETRY_FIRST_S, max_s=_RETRY_MAX_S)
        while not self._stop.is_set():
            try:
                if self.reconcile_once():
                    return True
                self._show_activity("waiting for the reboot")
            except errors.TreenailError as error:
                self._interfaces.status.show_first_boot("retrying after a failure", error)
                text = f"{error}; {error.remedy}" if error.remedy else str(error)
                if text != logged:
                    log.warning("first boot failed, retrying: %s", text)
                logged = text
            self._stop.wait(backoff.next_pause_s())
        return False

    def reconcile_once(self) -> bool:
        """Do the next step; return True when nothing is left. Raises `TreenailError`."""
        if self._files.has_entry(DONE_FILE):
            return True
        # Ignition calls no fsync and runs once. What it wrote must be on the disk before a reboot,
        # the removal of the user data or DONE_FILE is.
        self._files.sync_file_systems(_PROVISIONED)
        interfaces, claim = self._interfaces, self._interfaces.verifier.read_claim()
        target = self._read_request(claim)
        if self._image:
            # The booted image is not the one of the annotations: the agent moves there later.
            claim = replace(claim, image="")
        if target == firstboot.FirstBootTarget():
            self._finish_first_boot("its config demands nothing before it joins", claim)
            return True
        boot_id, progress = interfaces.kernel.read_boot_id(), self._read_state()
        if not progress.reboot_count and not self._files.has_entry(FIRST_COMMAND_LINE):
            # Once a config has added arguments, only this tells which ones the machine had before.
            text = " ".join(interfaces.kernel.read_command_line())
            self._files.write_file(FIRST_COMMAND_LINE, text.encode(), mode=0o600)
        deployments = observe.summarize_deployments(
            interfaces.os.read_deployments(), interfaces.kernel, {}
        )
        fips = interfaces.kernel.is_fips_enabled()
        decision = firstboot.decide_first_boot(
            target,
            deployments,
            progress,
            fips=fips,
            boot_id=boot_id,
            architecture=interfaces.kernel.find_architecture(),
            finalization_error=interfaces.os.read_finalization_error()
            if progress.reboot_count >= firstboot.REBOOTS_ALLOWED
            else "",
            is_deployed=progress.staged_id in deployments.other_ids,
        )
        match decision:
            case firstboot.FirstBootReady(reason=reason):
                self._finish_first_boot(reason, claim)
                return True
            case firstboot.FirstBootStage() as stage:
                is_unlocked = bool(deployments.staged_id) and not deployments.is_locked
                if not is_unlocked or deployments.staged_id != progress.staged_id:
                    if not deployments.staged_id or deployments.staged_id != self._refused_id:
                        self._stage_os(stage, target)
                    self._check_staged_image(claim)
                # Else the process was killed after unlocking it: the next boot starts it.
                self._reboot_into_staged(
                    progress.reboot_count + (progress.boot_id != boot_id), boot_id
                )
                return False

    def _read_request(self, claim: firstboot.FirstBootClaim) -> firstboot.FirstBootTarget:
        content = self._files.read_file(ENCAPSULATED_CONFIG, limit=_LIMIT)
        config = None
        if content is not None:
            try:
                document = documents.load_document(content, where=ENCAPSULATED_CONFIG)
                config = machineconfig.MachineConfig.from_json(document)
            except errors.ConfigError as error:
                raise errors.ConfigError(
                    f"cannot read the config that Ignition wrote: {error}",
                    remedy="read the cause with: journalctl -t ignition; then install the machine "
                    "again",
                ) from error
        return firstboot.select_target(config, claim, image=self._image)

    def _read_state(self) -> firstboot.FirstBootProgress:
        content = self._files.read_file(STATE_FILE, limit=_LIMIT)
        try:
            return firstboot.from_json(json_text.parse_json(content or b"null"))
        except ValueError:
            return firstboot.FirstBootProgress()

    def _stage_os(self, stage: firstboot.FirstBootStage, target: firstboot.FirstBootTarget) -> None:
        interfaces = self._interfaces
        self._install_login(target)
        for problem in interfaces.credentials.install_secrets():
            log.warning("%s", problem)

        def attempt() -> None:
            interfaces.preflight.check_image(stage.change.image)
            self._logged_percent = 0
            self._show_activity(f"staging {stage.change.image or 'kernel arguments and packages'}")
            interfaces.os.stage_deployment(stage.change, watch=self._check_progress)

        try:
            os_transaction.pull_with_logins(interfaces.credentials, stage.change.image, attempt)
        except errors.BusyError as error:
            os_transaction.wait_while_busy(error, interfaces.os, self._check_progress)
            raise

    def _check_staged_image(self, claim: firstboot.FirstBootClaim) -> None:
        """Refuse an image without the config's files, and do not stage it again."""
        staged = self._interfaces.os.read_deployments().staged
        self._refused_id = staged.id if staged else ""
        self._interfaces.verifier.check_staged_image(claim, self._refused_id)
        self._refused_id = ""

    def _reboot_into_staged(self, reboots: int, boot_id: str) -> None:
        interfaces = self._interfaces
        staged = interfaces.os.read_deployments().staged
        if staged is None:
            raise errors.HostError(
                "cannot reboot into the staged deployment: it is no longer staged",
                remedy="wait for the next attempt; if it repeats, see: journalctl -u rpm-ostreed",
            )
        progress = firstboot.FirstBootProgress(reboots, boot_id, staged.id)
        self._files.write_file(
            STATE_FILE, json.dumps(firstboot.to_json(progress)).encode(), mode=0o600
        )
        self._show_activity(f"rebooting into {staged.image or staged.id}")
        interfaces.os.finalize_staged(staged.id)
        interfaces.power.reboot_machine()

    def _install_login(self, target: firstboot.FirstBootTarget) -> None:
        """Write the config's pull secret, unless the machine already has one."""
        if target.config is None or self._files.has_entry(self._pull_secret):
            return
        file = wanted_state.read_wanted_state(target.config).files.get(self._pull_secret)
        if file is not None:
            self._files.write_file(self._pull_secret, file.contents.decode_bytes(), mode=0o600)

    def _finish_first_boot(self, reason: str, claim: firstboot.FirstBootClaim) -> None:
        """Verify the machine, and finish durably.

        The order matters: what is not verified stays as Ignition left it, and after DONE_FILE no
        later boot runs the first boot. Until then the agent, which reports to the Node, does not
        start.
        """
        self._interfaces.verifier.verify_machine(claim)
        if self._is_restart:
            # The kubelet's start job failed with the earlier process. Start it again before the
            # mark is written: it waits for this process, and after a crash between the two the
            # unit would not run again (ConditionPathExists).
            self._interfaces.services.start_default_target()
        self._interfaces.verifier.remove_ignition_files()
        content = self._files.read_file(ENCAPSULATED_CONFIG, limit=_LIMIT)
        if content is not None:
            self._files.write_file(ENCAPSULATED_BACKUP, content, mode=0o600)
            self._files.remove_file(ENCAPSULATED_CONFIG)
        # After a kill here the next start finds no target, and verifies the files again.
        self._files.write_file(DONE_FILE, b"", mode=0o600)
        self._files.remove_file(STATE_FILE)
        self._interfaces.os.release_daemon()
        activity = f"finished the first boot, the machine may join: {reason}"
        log.info("%s", activity)
        self._interfaces.status.show_first_boot(activity, is_complete=True)

    def _show_activity(self, activity: str) -> None:
        log.info("%s", activity)
        self._interfaces.status.show_first_boot(activity)

    def _check_progress(self, progress: TransactionProgress) -> TransactionVerdict:
        self._interfaces.status.show_progress(progress)
        percent = progress.percent or 0
        # The console shows the log, and a pull may take minutes.
        if percent >= self._logged_percent + _PROGRESS_STEP_PERCENT:
            self._logged_percent = percent
            log.info("%s: %d %%", progress.text, percent)
        return TransactionVerdict.DETACH if self._stop.is_set() else TransactionVerdict.CONTINUE
