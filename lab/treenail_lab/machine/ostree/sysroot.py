"""The deployments of a machine on disk, as libostree stores them in /ostree and /run/ostree.

A staged deployment is below /run until a clean shutdown finalizes it, so a power cut loses it. So
is the lock file that prevents the finalization. The lock of the sysroot itself is an open file
description lock, as libostree takes it.
"""

import fcntl
import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from treenail_lab.images import Image
from treenail_lab.machine.ostree.steps import TransactionWork
from treenail_lab.machine.ostree.trees import DeploymentTrees


def lock_exclusively(descriptor: int, *, wait: bool) -> None:
    """Lock the file until the descriptor is closed; raise `BlockingIOError` without ``wait``."""
    # struct flock: type, whence, start, length, PID; the kernel rejects any PID but 0.
    whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, whole_file)


STATEROOT = "fedora-coreos"


@dataclass(frozen=True, slots=True)
class SysrootDeployment:
    """One bootable tree: a commit, its origin and its kernel arguments.

    With layered ``packages`` or ``removals`` the commit is a local one, and ``base`` is the commit
    of the image.
    """

    checksum: str
    serial: int
    refspec: str
    digest: str
    version: str
    timestamp: int
    kernel_arguments: tuple[str, ...]
    manifest: str = ""
    configuration: str = ""
    layers: tuple[str, ...] = ()
    custom_origin: tuple[str, str] | None = None
    pinned: bool = False
    osname: str = STATEROOT
    packages: tuple[str, ...] = ()
    removals: tuple[str, ...] = ()
    base: str = ""
    files: tuple[tuple[str, str], ...] = ()
    """Path and text of each file of the image beside those that every image has."""
    links: tuple[tuple[str, str], ...] = ()
    """The same of symbolic links, with their targets."""
    content: str = ""
    """Name of the unpacked image of a real registry; see `UnpackedImages`."""

    @property
    def id(self) -> str:
        return f"{self.osname}-{self.checksum}.{self.serial}"

    @property
    def boot_argument(self) -> str:
        """Return the kernel argument that names the deployment to boot."""
        return f"ostree=/ostree/deploy/{self.osname}/deploy/{self.checksum}.{self.serial}"


def make_deployment(
    image: Image, refspec: str, kernel_arguments: tuple[str, ...], serial: int = 0
) -> SysrootDeployment:
    """Make a deployment of ``image`` with the origin ``refspec``."""
    return SysrootDeployment(
        checksum=image.commit,
        serial=serial,
        refspec=refspec,
        digest=image.digest,
        version=image.version,
        timestamp=image.timestamp,
        kernel_arguments=kernel_arguments,
        manifest=image.render_manifest(),
        configuration=image.render_configuration(),
        layers=tuple(layer.digest for layer in image.layers),
        files=tuple(image.files.items()),
        links=tuple(image.links.items()),
        content=image.content,
    )


def layer_packages(
    deployment: SysrootDeployment, packages: tuple[str, ...], removals: tuple[str, ...]
) -> SysrootDeployment:
    """Return the deployment with these layered packages and removals."""
    base = deployment.base or deployment.checksum
    checksum = base
    if packages or removals:
        layered = json.dumps([base, sorted(packages), sorted(removals)])
        checksum = hashlib.sha256(layered.encode()).hexdigest()
    return replace(
        deployment,
        checksum=checksum,
        base=base if checksum != base else "",
        packages=packages,
        removals=removals,
    )


class Sysroot:
    """The deployments below one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.trees = DeploymentTrees(root)
        self._deploy = root / "sysroot/ostree/deploy"
        self._list = root / "sysroot/ostree/deployments.json"
        self._layers = root / "sysroot/ostree/layers"
        self._cmdline = root / "proc/cmdline"
        self._staged = root / "run/ostree/staged-deployment.json"
        self._lock = root / "run/ostree/staged-deployment.lock"
        self._libostree_state = root / "run/ostree/staged-deployment"
        self._booted = root / "run/ostree-booted"
        self._next = root / "run/ostree/nextroot-booted"
        for directory in (self._deploy, self._layers):
            directory.mkdir(parents=True, exist_ok=True)

    def find_blob(self, digest: str) -> Path:
        """Return the path of a downloaded layer of a real registry."""
        return self._deploy.parent / "blobs" / digest.removeprefix("sha256:")

    def acquire_lock(self) -> int | None:
        """Acquire the sysroot lock of rpm-ostree, bootc and ostree; None while it is held.

        Closing the descriptor releases it, as does the end of the process.
        """
        descriptor = os.open(self._deploy.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            lock_exclusively(descriptor, wait=False)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @property
    def watched_directory(self) -> Path:
        """Return the directory whose mtime changes with every change of the deployments."""
        return self._deploy

    def read_written(self) -> tuple[SysrootDeployment, ...]:
        """Return the finalized deployments in boot order."""
        if not self._list.exists():
            return ()
        return tuple(map(_parse_deployment, json.loads(self._list.read_text(encoding="utf-8"))))

    def read_staged(self) -> SysrootDeployment | None:
        """Return the deployment that the next clean shutdown finalizes."""
        if not self._staged.exists():
            return None
        return _parse_deployment(json.loads(self._staged.read_text(encoding="utf-8")))

    def is_staged_locked(self) -> bool:
        """Return whether the staged deployment is locked against finalization."""
        return self._lock.exists()

    def find_booted(self) -> SysrootDeployment | None:
        """Return the booted deployment: that of the kernel, or of the last soft reboot."""
        soft_booted_id = self._booted.read_text(encoding="utf-8") if self._booted.exists() else ""
        if soft_booted_id:
            return next(
                (
                    deployment
                    for deployment in self.read_written()
                    if deployment.id == soft_booted_id
                ),
                None,
            )
        if not self._cmdline.exists():
            return None
        arguments = self._cmdline.read_text(encoding="utf-8").split()
        return next((d for d in self.read_written() if d.boot_argument in arguments), None)

    def find_live(self) -> SysrootDeployment | None:
        """Return the deployment whose /etc is at /etc: the last one that was booted."""
        name = self.trees.read_live()
        return next(
            (deployment for deployment in self.read_written() if deployment.id == name), None
        )

    def list_deployments(self) -> tuple[SysrootDeployment, ...]:
        """Return all deployments, the staged one first."""
        staged = self.read_staged()
        return (staged, *self.read_written()) if staged is not None else self.read_written()

    def find_base(self) -> SysrootDeployment | None:
        """Return the base of a new deployment: the pending one, else the booted one."""
        return next(iter(self.list_deployments()), None)

    def compute_next_serial(self, checksum: str) -> int:
        """Return the serial of another deployment of ``checksum``."""
        taken = [d.serial for d in self.list_deployments() if d.checksum == checksum]
        return max(taken) + 1 if taken else 0

    def stage_deployment(self, deployment: SysrootDeployment, *, locked: bool) -> None:
        """Stage ``deployment``, in place of another one."""
        self._staged.parent.mkdir(parents=True, exist_ok=True)
        self.trees.write_tree(deployment)
        self._write_locked(locked=locked)
        _write_json(self._staged, asdict(deployment))
        self.notify_watchers()

    def stage_in_steps(self, deployment: SysrootDeployment, *, locked: bool) -> TransactionWork:
        """Stage as a step of a transaction; in the lab it takes no time."""
        self.stage_deployment(deployment, locked=locked)
        yield from ()

    def unlock_staged(self) -> bool:
        """Allow the shutdown to finalize the staged deployment; return whether it was locked."""
        was_locked = self.is_staged_locked()
        if was_locked:
            self._write_locked(locked=False)
        self.notify_watchers()
        return was_locked

    def drop_staged(self) -> bool:
        """Drop the staged deployment; return whether there was one."""
        had = self._staged.exists()
        self.trees.prune_trees(self.read_written())
        for path in (self._staged, self._lock, self._libostree_state):
            path.unlink(missing_ok=True)
        self.notify_watchers()
        return had

    def write_deployments(self, deployments: tuple[SysrootDeployment, ...]) -> None:
        """Replace the finalized deployments, in boot order."""
        _write_json(self._list, [asdict(deployment) for deployment in deployments])
        staged = self.read_staged()
        self.trees.prune_trees((*deployments, *((staged,) if staged else ())))
        self.notify_watchers()

    def finalize_staged(self) -> SysrootDeployment | None:
        """Put an unlocked staged deployment first, as a clean shutdown does.

        The booted one becomes the rollback and pinned ones stay; the others are removed.
        """
        staged = self.read_staged()
        if staged is None or self.is_staged_locked():
            return None
        booted = self.find_booted()
        kept = tuple(d for d in self.read_written() if d == booted or d.pinned)
        self.write_deployments((staged, *kept))
        self.drop_staged()
        return staged

    def boot_deployment(self, number: int = 0) -> SysrootDeployment:
        """Boot deployment ``number``, as the boot loader does: the first unless it falls back."""
        chosen = self.read_written()[number]
        self._cmdline.parent.mkdir(parents=True, exist_ok=True)
        self._cmdline.write_text(build_boot_options(chosen) + "\n", encoding="utf-8")
        return chosen

    def prepare_soft_reboot(self, deployment: SysrootDeployment | None) -> None:
        """Prepare a soft reboot into the deployment; None removes the preparation."""
        if deployment is None:
            self._next.unlink(missing_ok=True)
        else:
            self._next.write_text(deployment.id, encoding="utf-8")

    def soft_boot_deployment(self) -> SysrootDeployment:
        """Boot the prepared or the booted deployment on the running kernel."""
        prepared = self._next.read_text(encoding="utf-8") if self._next.exists() else ""
        self._next.unlink(missing_ok=True)
        chosen = next(
            (deployment for deployment in self.read_written() if deployment.id == prepared),
            self.find_booted(),
        )
        if chosen is None:
            raise ValueError("cannot reboot softly: no deployment is booted")
        self._booted.write_text(chosen.id, encoding="utf-8")
        return chosen

    def _write_locked(self, *, locked: bool) -> None:
        # Programs of the lab that stage nothing start faster without gi.
        from gi.repository import GLib

        if locked:
            self._lock.touch()
        else:
            self._lock.unlink(missing_ok=True)
        # The key of libostree 2023.8 and later; it has others, which nothing reads here.
        state = GLib.Variant("a{sv}", {"locked": GLib.Variant("b", locked)})
        self._libostree_state.write_bytes(state.get_data_as_bytes().get_data())

    def list_layers(self) -> frozenset[str]:
        """Return the digests of the imported layers."""
        return frozenset(f"sha256:{path.name}" for path in self._layers.iterdir())

    def import_layer(self, digest: str) -> None:
        """Record an imported layer, which stays also when the pull fails later."""
        (self._layers / digest.removeprefix("sha256:")).touch()

    def prune_layers(self) -> int:
        """Remove the layers that no deployment needs; return how many."""
        needed = {digest for deployment in self.list_deployments() for digest in deployment.layers}
        unused = self.list_layers() - needed
        for digest in unused:
            (self._layers / digest.removeprefix("sha256:")).unlink()
        return len(unused)

    def set_pinned(self, deployment: SysrootDeployment, *, pinned: bool) -> None:
        """Pin or unpin ``deployment``."""
        self.write_deployments(
            tuple(replace(d, pinned=pinned) if d == deployment else d for d in self.read_written())
        )

    def notify_watchers(self) -> None:
        """Update the mtime that watchers observe."""
        os.utime(self._deploy)


def build_boot_options(deployment: SysrootDeployment) -> str:
    """Return the kernel command line of ``deployment``."""
    return " ".join((*deployment.kernel_arguments, deployment.boot_argument))


def _parse_deployment(document: dict[str, Any]) -> SysrootDeployment:
    lists = ("kernel_arguments", "layers", "packages", "removals", "custom_origin")
    values: dict[str, Any] = {
        key: tuple(value) if key in lists and value is not None else value
        for key, value in document.items()
    }
    for name in ("files", "links"):
        values[name] = tuple(map(tuple, values.get(name, ())))
    return SysrootDeployment(**values)


def _write_json(path: Path, document: object) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
