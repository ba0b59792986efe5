"""Collect what a pre-flight check needs of the machine and the registry.

That includes other update agents of the machine: Zincati, and the timers of rpm-ostree and bootc.
"""

import logging
import re
from dataclasses import replace

from treenail import errors, observations
from treenail.daemon.checks.signature_policy import find_image_rule
from treenail.daemon.cluster.pull_secrets import AUTH_FILE
from treenail.host.container.registry import SkopeoClient
from treenail.host.filesystem import atomic_files, disk, path_stat, root_directory
from treenail.host.machine import Machine
from treenail.host.ostree.deployments import OSBackend
from treenail.host.system import disk_space as spaces
from treenail.host.system import state_file
from treenail.host.systemd.systemd import Systemd
from treenail.update.checks import preflight, preflight_reason
from treenail.update.checks.signature_policy import SignatureRule
from treenail.update.state import ledger_record as records

# A serialized GVariant: the driver that was named with register-driver, and its unit.
_DRIVER_FILE = "/run/rpm-ostree/update-driver.gv"
_UNIT = re.compile(rb"[A-Za-z0-9@:_.\\-]+\.(?:service|timer)")
_RPM_OSTREED = "/etc/rpm-ostreed.conf"
_AUTOMATIC_TIMER = "rpm-ostreed-automatic.timer"
_POLICY = re.compile(r"^\s*AutomaticUpdatePolicy\s*=\s*(\S+)", re.MULTILINE)
_STAGING_POLICIES = ("stage", "apply")
KNOWN_AGENTS = ("zincati.service", "bootc-fetch-apply-updates.timer", _AUTOMATIC_TIMER)
_LIMIT = 64 * 1024


def find_active_agents(files: atomic_files.HostFiles, systemd: Systemd) -> tuple[str, ...]:
    """Return the active units that update this machine; empty when systemd does not answer."""
    names = dict.fromkeys((*_read_registered_driver(files), *KNOWN_AGENTS))
    try:
        active = [unit.name for unit in systemd.list_units(*names) if unit.active_state == "active"]
    except errors.HostError:
        return ()
    return tuple(
        name for name in active if name != _AUTOMATIC_TIMER or _has_automatic_staging(files)
    )


def _read_registered_driver(files: atomic_files.HostFiles) -> tuple[str, ...]:
    return tuple(name.decode("ascii") for name in _UNIT.findall(_read_file(files, _DRIVER_FILE)))


def _has_automatic_staging(files: atomic_files.HostFiles) -> bool:
    """Return whether the timer stages updates; by default it does not (rpm-ostreed.conf(5))."""
    policy = _POLICY.findall(_read_file(files, _RPM_OSTREED).decode("utf-8", "replace"))
    return bool(policy) and policy[-1] in _STAGING_POLICIES


def _read_file(files: atomic_files.HostFiles, path: str) -> bytes:
    try:
        return files.read_file(path, limit=_LIMIT) or b""
    except errors.FileError:
        return b""


log = logging.getLogger(__name__)

CHECKED_PATHS = ("/boot", "/sysroot", "/var")
AGENT_UNIT = "/usr/lib/systemd/system/treenail.service"
_PROBE_FILE = f"{state_file.STATE_DIRECTORY}/preflight"


def has_agent_unit(tree: root_directory.Root) -> bool:
    """Return whether the tree of a deployment contains the agent's unit; raises `FileError`."""
    return (
        path_stat.stat_paths(tree, disk.Disk(), (AGENT_UNIT,))[AGENT_UNIT].kind
        != observations.EntryKind.NOTHING
    )


class PreflightChecker:
    """Finds what would make an update fail, and changes nothing."""

    def __init__(
        self,
        machine: Machine,
        os: OSBackend,
        registry: SkopeoClient,
        *,
        only_warn: frozenset[preflight_reason.PreflightReason] = frozenset(),
        has_image_store: bool = False,
    ) -> None:
        """``has_image_store``: the back end keeps an image in podman's storage until it deploys."""
        self._machine = machine
        self._os = os
        self._registry = registry
        self._only_warn = only_warn
        self._has_image_store = has_image_store
        self._warned: frozenset[preflight.PreflightFinding] = frozenset()
        self._inspections: dict[str, observations.ImageInspection] = {}

    def check_image(self, image: str) -> None:
        """Raise `PreflightError` when something would make an update to the image fail.

        A finding that does not block is logged once.
        """
        self._report_findings(self.collect_conditions(image))

    def check_machine(self, image: str) -> None:
        """Check again when the image is already on this machine, without registry and policy."""
        self._report_findings(
            self._collect_machine_conditions(
                image, self._inspections.get(image), has_image_store=False
            )
        )

    def check_staged_image(self, staged_id: str, image: str) -> None:
        """Raise `PreflightError` when the staged image lacks the agent that the booted one has."""
        if not has_agent_unit(self._machine.root):
            # It is installed outside the image, and survives the change of the image.
            return
        try:
            with self._os.open_staged_tree(staged_id, (AGENT_UNIT,)) as tree:
                lacks_agent = not has_agent_unit(tree)
        except errors.HostError as error:
            log.warning("cannot look for the agent in %s, continuing: %s", image, error)
            return
        facts = preflight.PreflightFacts(
            now=self._machine.clock.now(), image=image, lacks_agent=lacks_agent
        )
        problems = preflight.find_preflight_problems(facts, only_warn=self._only_warn)
        self._report_problems(
            tuple(
                problem
                for problem in problems
                if problem.reason is preflight_reason.PreflightReason.AGENT_MISSING
            )
        )

    def _report_findings(self, conditions: preflight.PreflightFacts) -> None:
        self._report_problems(
            preflight.find_preflight_problems(conditions, only_warn=self._only_warn)
        )

    def _report_problems(self, problems: tuple[preflight.PreflightFinding, ...]) -> None:
        for problem in problems:
            if not problem.is_blocking and problem not in self._warned:
                log.warning("%s; %s", problem, problem.remedy)
        self._warned = frozenset(problems)
        if error := preflight.make_preflight_error(problems):
            raise error

    def collect_conditions(self, image: str) -> preflight.PreflightFacts:
        """Collect the facts for an update to the image; of the machine alone when it is empty."""
        signature_rule = (
            find_image_rule(self._machine.files, image, is_stored=self._has_image_store)
            if image
            else None
        )
        inspection = self._inspect_image(image) if image else None
        if isinstance(inspection, observations.ImageInspection):
            self._inspections = {image: inspection}
        return replace(
            self._collect_machine_conditions(
                image, inspection, has_image_store=self._has_image_store
            ),
            signature_rule=signature_rule,
            missing_keys=self._find_missing_keys(signature_rule),
        )

    def _collect_machine_conditions(
        self,
        image: str,
        inspection: observations.ImageInspection | observations.InspectionProblem | None,
        *,
        has_image_store: bool,
    ) -> preflight.PreflightFacts:
        machine = self._machine
        return preflight.PreflightFacts(
            now=self._machine.clock.now(),
            image=image,
            inspection=inspection,
            needs_storage=has_image_store,
            architecture=machine.kernel.find_architecture(),
            spaces=tuple(
                space for path in CHECKED_PATHS if (space := self._read_space(path)) is not None
            ),
            present_layers=spaces.list_stored_layers(self._machine.root),
            kernel_bytes=spaces.compute_kernel_bytes(self._machine.root),
            freeable_boot_bytes=self._compute_freeable_boot_bytes(),
            drivers=find_active_agents(self._machine.files, machine.systemd),
            inhibitors=self._list_inhibitors(),
            is_clock_synchronized=machine.timedate.is_synchronized(),
            ledger_problem=self._probe_ledger(),
        )

    def _inspect_image(
        self, image: str
    ) -> observations.ImageInspection | observations.InspectionProblem | None:
        path = self._machine.root.resolve_path(AUTH_FILE)
        auth_file = str(path) if path.exists() else ""
        inspection = self._registry.inspect_image(image, auth_file=auth_file)
        if inspection is None:
            log.info("skopeo is not installed; the registry is not checked before the pull")
        return inspection

    def _find_missing_keys(self, rule: SignatureRule | str | None) -> tuple[str, ...]:
        keys = rule.keys if isinstance(rule, SignatureRule) else ()
        return tuple(key for key in keys if key.startswith("/") and not self._is_present(key))

    def _is_present(self, path: str) -> bool:
        try:
            return self._machine.root.resolve_path(path).exists()
        except errors.FileError:
            return False

    def _read_space(
        self, path: str
    ) -> observations.FilesystemSpace | preflight.UnreadableFilesystem | None:
        try:
            return spaces.read_filesystem_space(self._machine.root, path)
        except errors.FileError as error:
            return preflight.UnreadableFilesystem(path, str(error))

    def _compute_freeable_boot_bytes(self) -> int:
        most = spaces.compute_freeable_boot_bytes(self._machine.root)
        # Read the pinned deployments only when /boot holds kernels that could be freed.
        return (
            spaces.compute_freeable_boot_bytes(
                self._machine.root, retained=self._find_pinned_commits()
            )
            if most
            else 0
        )

    def _find_pinned_commits(self) -> frozenset[str]:
        """Return the commits that users pinned; our own pin is removed in time."""
        try:
            deployments = self._os.read_deployments()
            ours = records.from_json(self._machine.ledger.read_document()).retained
        except errors.HostError as error:
            log.info("cannot read which deployments are pinned: %s", error)
            return frozenset()
        return frozenset(
            deployment.checksum
            for deployment in deployments.in_boot_order
            if deployment.is_pinned and not (ours and deployment.id == ours.id)
        )

    def _list_inhibitors(self) -> tuple[str, ...]:
        try:
            locks = self._machine.logind.list_inhibitors()
        except errors.HostError as error:
            log.info("cannot list the inhibitor locks: %s", error)
            return ()
        return tuple(
            f"{lock.who} (process {lock.pid}): {lock.why}"
            for lock in locks
            if "shutdown" in lock.what.split(":") and lock.mode == "block"
        )

    def _probe_ledger(self) -> str:
        try:
            self._machine.files.write_file(_PROBE_FILE, b"", mode=0o600)
            self._machine.files.remove_file(_PROBE_FILE)
        except errors.FileError as error:
            return str(error)
        return ""
