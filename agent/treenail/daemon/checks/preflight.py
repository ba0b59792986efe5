"""The machine and the registry as a pre-flight sees them: probes to `PreflightFacts`."""

import logging
from dataclasses import dataclass, replace
from typing import Protocol

from treenail.clock import Clock
from treenail.daemon.checks.signature_policy import find_image_rule
from treenail.daemon.cluster.pull_secrets import AUTH_FILE
from treenail.errors import FileError, HostError
from treenail.host.container import registry as registries
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import DeploymentStatus
from treenail.host.system import disk_space as spaces
from treenail.host.system.state_file import STATE_DIRECTORY
from treenail.host.systemd.logind import InhibitorLock
from treenail.host.systemd.update_agents import UnitLister, find_active_agents
from treenail.update.checks.preflight import (
    BOOTABLE_LABELS,
    FilesystemSpace,
    ImageLayer,
    ImageManifest,
    PreflightFacts,
    PreflightFinding,
    PreflightReason,
    RegistryProblem,
    UnreadableFilesystem,
    find_preflight_problems,
    make_preflight_error,
)
from treenail.update.checks.signature_policy import SignatureRule
from treenail.update.state import record as records

log = logging.getLogger(__name__)

Json = dict[str, object]

CHECKED_PATHS = ("/boot", "/sysroot", "/var")
_PROBE_FILE = f"{STATE_DIRECTORY}/preflight"


class ImageInspector(Protocol):
    """What a registry says of an image."""

    def inspect_image(
        self, image: str, *, auth_file: str = ""
    ) -> registries.ImageInspection | registries.InspectionProblem | None: ...


class InhibitorSource(Protocol):
    """Who holds a shutdown up."""

    def list_inhibitors(self) -> tuple[InhibitorLock, ...]: ...


class TimeSynchronization(Protocol):
    """Whether the clock follows one."""

    def is_synchronized(self) -> bool | None: ...


class ArchitectureSource(Protocol):
    """What the running kernel says of itself."""

    def find_architecture(self) -> str: ...


class DeploymentSource(Protocol):
    """Which deployments there are."""

    def read_deployments(self) -> DeploymentStatus: ...


class LedgerSource(Protocol):
    """What the agent remembers."""

    def read_document(self) -> Json | None: ...


@dataclass(frozen=True, slots=True)
class PreflightProbes:
    """Whom a pre-flight asks."""

    registry: ImageInspector
    systemd: UnitLister
    logind: InhibitorSource
    timedate: TimeSynchronization
    kernel: ArchitectureSource
    os: DeploymentSource
    ledger: LedgerSource


class PreflightChecker:
    """Looks at everything that would make an update fail, and changes nothing."""

    def __init__(
        self,
        root: Root,
        files: HostFiles,
        probes: PreflightProbes,
        clock: Clock,
        *,
        only_warn: frozenset[PreflightReason] = frozenset(),
        has_image_store: bool = False,
    ) -> None:
        """``has_image_store``: an image waits in podman's storage until it is deployed."""
        self._root = root
        self._files = files
        self._probes = probes
        self._clock = clock
        self._only_warn = only_warn
        self._has_image_store = has_image_store
        self._warned: frozenset[PreflightFinding] = frozenset()
        self._manifests: dict[str, ImageManifest] = {}

    def check_image(self, image: str) -> None:
        """Raise `PreflightError` for all that would make an update to the pull spec fail.

        What is wrong and does not block is logged, once.
        """
        self._report_findings(self.collect_conditions(image))

    def check_machine(self, image: str) -> None:
        """As `check_image`, once the image is on this machine: neither registry nor policy is asked."""
        self._report_findings(
            self._collect_machine_conditions(
                image, self._manifests.get(image), has_image_store=False
            )
        )

    def _report_findings(self, conditions: PreflightFacts) -> None:
        found = find_preflight_problems(conditions, only_warn=self._only_warn)
        for each in found:
            if not each.is_blocking and each not in self._warned:
                log.warning("%s; %s", each, each.remedy)
        self._warned = frozenset(found)
        if error := make_preflight_error(found):
            raise error

    def collect_conditions(self, image: str) -> PreflightFacts:
        """The conditions for an update to the pull spec; without one, of the machine alone."""
        judged = (
            find_image_rule(self._files, image, is_stored=self._has_image_store) if image else None
        )
        manifest = self._fetch_manifest(image) if image else None
        if isinstance(manifest, ImageManifest):
            self._manifests = {image: manifest}
        return replace(
            self._collect_machine_conditions(
                image, manifest, has_image_store=self._has_image_store
            ),
            signature_rule=judged,
            missing_keys=self._find_missing_keys(judged),
        )

    def _collect_machine_conditions(
        self, image: str, manifest: ImageManifest | RegistryProblem | None, *, has_image_store: bool
    ) -> PreflightFacts:
        probes = self._probes
        return PreflightFacts(
            now=self._clock.now(),
            image=image,
            manifest=manifest,
            needs_storage=has_image_store,
            architecture=probes.kernel.find_architecture(),
            spaces=tuple(
                found for path in CHECKED_PATHS if (found := self._read_space(path)) is not None
            ),
            present_layers=spaces.list_stored_layers(self._root),
            kernel_bytes=spaces.compute_kernel_bytes(self._root),
            freeable_boot_bytes=self._compute_freeable_boot_bytes(),
            drivers=find_active_agents(self._files, probes.systemd),
            inhibitors=self._list_inhibitors(),
            is_clock_synchronized=probes.timedate.is_synchronized(),
            ledger_problem=self._probe_ledger(),
        )

    def _fetch_manifest(self, image: str) -> ImageManifest | RegistryProblem | None:
        auth_file = self._root.resolve_path(AUTH_FILE)
        found = self._probes.registry.inspect_image(
            image, auth_file=str(auth_file) if auth_file.exists() else ""
        )
        match found:
            case registries.InspectionProblem(kind, text):
                return RegistryProblem(PreflightReason(kind), text)
            case registries.ImageInspection():
                layers = tuple(ImageLayer(each.digest, each.size_bytes) for each in found.layers)
                bootable = any(label in found.labels for label in BOOTABLE_LABELS)
                return ImageManifest(found.architecture, found.created, layers, bootable)
            case None:
                log.info("there is no skopeo to ask the registry with; the pull will show")
                return None

    def _find_missing_keys(self, found: SignatureRule | str | None) -> tuple[str, ...]:
        keys = found.keys if isinstance(found, SignatureRule) else ()
        return tuple(key for key in keys if key.startswith("/") and not self._is_present(key))

    def _is_present(self, path: str) -> bool:
        try:
            return self._root.resolve_path(path).exists()
        except FileError:
            return False

    def _read_space(self, path: str) -> FilesystemSpace | UnreadableFilesystem | None:
        try:
            found = spaces.read_file_system(self._root, path)
        except FileError as error:
            return UnreadableFilesystem(path, str(error))
        if found is None:
            return None
        return FilesystemSpace(
            path,
            found.device,
            found.free_bytes,
            found.size_bytes,
            found.free_files,
            found.files,
            found.is_read_only,
        )

    def _compute_freeable_boot_bytes(self) -> int:
        most = spaces.compute_freeable_boot_bytes(self._root)
        # Who has nothing to free need not ask what is kept.
        return (
            spaces.compute_freeable_boot_bytes(self._root, retained=self._find_pinned_commits())
            if most
            else 0
        )

    def _find_pinned_commits(self) -> frozenset[str]:
        """The commits of deployments that others have pinned; ours is let go in time."""
        try:
            found = self._probes.os.read_deployments()
            ours = records.from_json(self._probes.ledger.read_document()).retained
        except HostError as error:
            log.info("can't ask which deployments are pinned: %s", error)
            return frozenset()
        return frozenset(
            each.checksum
            for each in found.in_boot_order
            if each.is_pinned and not (ours and each.id == ours.id)
        )

    def _list_inhibitors(self) -> tuple[str, ...]:
        try:
            held = self._probes.logind.list_inhibitors()
        except HostError as error:
            log.info("can't ask who blocks a reboot: %s", error)
            return ()
        return tuple(
            f"{each.who} (process {each.pid}): {each.why}"
            for each in held
            if "shutdown" in each.what.split(":") and each.mode == "block"
        )

    def _probe_ledger(self) -> str:
        try:
            self._files.write_file(_PROBE_FILE, b"", mode=0o600)
            self._files.remove_file(_PROBE_FILE)
        except FileError as error:
            return str(error)
        return ""
