"""The machine and the registry as a pre-flight sees them: probes to `Conditions`."""

import logging
from dataclasses import dataclass, replace
from typing import Protocol

from treenail.clock import Clock
from treenail.daemon.checks.signature_policy import rule_for
from treenail.daemon.cluster.pull_secrets import AUTH
from treenail.errors import FileError, HostError
from treenail.host.container import registry as registries
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.ostree.deployments import Deployments
from treenail.host.system import disk_space as spaces
from treenail.host.system.state_file import DIRECTORY
from treenail.host.systemd.logind import Inhibitor
from treenail.host.systemd.update_agents import Units, active_drivers
from treenail.update.checks.preflight import (
    BOOTABLE,
    Conditions,
    Finding,
    Layer,
    Manifest,
    Reason,
    Space,
    Trouble,
    Unreadable,
    findings,
    refusal,
)
from treenail.update.checks.signature_policy import Rule
from treenail.update.state import record as records

log = logging.getLogger(__name__)

Json = dict[str, object]

PATHS = ("/boot", "/sysroot", "/var")
_PROBE = f"{DIRECTORY}/preflight"


class Registry(Protocol):
    """What a registry says of an image."""

    def inspect(
        self, image: str, *, auth_file: str = ""
    ) -> registries.Inspected | registries.Trouble | None: ...


class Inhibitors(Protocol):
    """Who holds a shutdown up."""

    def inhibitors(self) -> tuple[Inhibitor, ...]: ...


class TimeServer(Protocol):
    """Whether the clock follows one."""

    def synchronized(self) -> bool | None: ...


class Kernel(Protocol):
    """What the running kernel says of itself."""

    def architecture(self) -> str: ...


class OperatingSystem(Protocol):
    """Which deployments there are."""

    def look(self) -> Deployments: ...


class LedgerFile(Protocol):
    """What the agent remembers."""

    def read(self) -> Json | None: ...


@dataclass(frozen=True, slots=True)
class Probes:
    """Whom a pre-flight asks."""

    registry: Registry
    systemd: Units
    logind: Inhibitors
    timedate: TimeServer
    kernel: Kernel
    os: OperatingSystem
    ledger: LedgerFile


class Preflight:
    """Looks at everything that would make an update fail, and changes nothing."""

    def __init__(
        self,
        root: Root,
        files: Files,
        probes: Probes,
        clock: Clock,
        *,
        only_warn: frozenset[Reason] = frozenset(),
        stores: bool = False,
    ) -> None:
        """``stores``: an image waits in podman's storage until it is deployed."""
        self._root = root
        self._files = files
        self._probes = probes
        self._clock = clock
        self._only_warn = only_warn
        self._stores = stores
        self._warned: frozenset[Finding] = frozenset()
        self._known: dict[str, Manifest] = {}

    def clear(self, image: str) -> None:
        """Raise `PreflightError` for all that would make an update to the pull spec fail.

        What is wrong and does not block is logged, once.
        """
        self._judge(self.look(image))

    def still_clear(self, image: str) -> None:
        """As `clear`, once the image is on this machine: neither registry nor policy is asked."""
        self._judge(self._machine(image, self._known.get(image), stores=False))

    def _judge(self, conditions: Conditions) -> None:
        found = findings(conditions, only_warn=self._only_warn)
        for each in found:
            if not each.blocks and each not in self._warned:
                log.warning("%s; %s", each, each.remedy)
        self._warned = frozenset(found)
        if error := refusal(found):
            raise error

    def look(self, image: str) -> Conditions:
        """The conditions for an update to the pull spec; without one, of the machine alone."""
        judged = rule_for(self._files, image, stored=self._stores) if image else None
        manifest = self._manifest(image) if image else None
        if isinstance(manifest, Manifest):
            self._known = {image: manifest}
        return replace(
            self._machine(image, manifest, stores=self._stores),
            rule=judged,
            missing_keys=self._missing_keys(judged),
        )

    def _machine(
        self, image: str, manifest: Manifest | Trouble | None, *, stores: bool
    ) -> Conditions:
        probes = self._probes
        return Conditions(
            now=self._clock.now(),
            image=image,
            manifest=manifest,
            stores=stores,
            architecture=probes.kernel.architecture(),
            spaces=tuple(found for path in PATHS if (found := self._space(path)) is not None),
            held_layers=spaces.held_layers(self._root),
            kernel_bytes=spaces.kernel_bytes(self._root),
            freeable_boot_bytes=self._freeable_boot_bytes(),
            drivers=active_drivers(self._files, probes.systemd),
            inhibitors=self._inhibitors(),
            synchronized=probes.timedate.synchronized(),
            ledger_problem=self._ledger_problem(),
        )

    def _manifest(self, image: str) -> Manifest | Trouble | None:
        auth_file = self._root.path(AUTH)
        found = self._probes.registry.inspect(
            image, auth_file=str(auth_file) if auth_file.exists() else ""
        )
        match found:
            case registries.Trouble(kind, text):
                return Trouble(Reason(kind), text)
            case registries.Inspected():
                layers = tuple(Layer(each.digest, each.size_bytes) for each in found.layers)
                bootable = any(label in found.labels for label in BOOTABLE)
                return Manifest(found.architecture, found.created, layers, bootable)
            case None:
                log.info("there is no skopeo to ask the registry with; the pull will show")
                return None

    def _missing_keys(self, found: Rule | str | None) -> tuple[str, ...]:
        keys = found.keys if isinstance(found, Rule) else ()
        return tuple(key for key in keys if key.startswith("/") and not self._exists(key))

    def _exists(self, path: str) -> bool:
        try:
            return self._root.path(path).exists()
        except FileError:
            return False

    def _space(self, path: str) -> Space | Unreadable | None:
        try:
            found = spaces.file_system(self._root, path)
        except FileError as error:
            return Unreadable(path, str(error))
        if found is None:
            return None
        return Space(
            path,
            found.device,
            found.free_bytes,
            found.size_bytes,
            found.free_files,
            found.files,
            found.read_only,
        )

    def _freeable_boot_bytes(self) -> int:
        most = spaces.freeable_boot_bytes(self._root)
        # Who has nothing to free need not ask what is kept.
        return spaces.freeable_boot_bytes(self._root, kept=self._kept()) if most else 0

    def _kept(self) -> frozenset[str]:
        """The commits of deployments that others have pinned; ours is let go in time."""
        try:
            found = self._probes.os.look()
            ours = records.from_json(self._probes.ledger.read()).retained
        except HostError as error:
            log.info("can't ask which deployments are pinned: %s", error)
            return frozenset()
        return frozenset(
            each.checksum for each in found.all if each.pinned and not (ours and each.id == ours.id)
        )

    def _inhibitors(self) -> tuple[str, ...]:
        try:
            held = self._probes.logind.inhibitors()
        except HostError as error:
            log.info("can't ask who blocks a reboot: %s", error)
            return ()
        return tuple(
            f"{each.who} (process {each.pid}): {each.why}"
            for each in held
            if "shutdown" in each.what.split(":") and each.mode == "block"
        )

    def _ledger_problem(self) -> str:
        try:
            self._files.write(_PROBE, b"", mode=0o600)
            self._files.remove(_PROBE)
        except FileError as error:
            return str(error)
        return ""
