"""The deployments of a real sysroot: libostree reads them, the ostree command changes them."""

import os
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from gi.repository import GLib, OSTree

from treenail_lab.machine.ostree.steps import EmitSignal, OperationError, PauseWork
from treenail_lab.machine.ostree.sysroot import SysrootDeployment
from vmlab.guest.names import DIGEST_KEY, STATEROOT
from vmlab.guest.programs import run

_ORIGIN_KEY = "container-image-reference"


class RealSysroot:
    """The interface of `treenail_lab.machine.ostree.sysroot.Sysroot` on a real OSTree sysroot."""

    def __init__(self) -> None:
        self._sysroot: Any = OSTree.Sysroot.new_default()
        self._sysroot.set_mount_namespace_in_use()
        self._sysroot.load(None)

    @property
    def watched_directory(self) -> Path:
        """The directory whose time libostree changes with the deployments."""
        return Path("/ostree/deploy")

    def acquire_lock(self) -> int | None:
        """A descriptor to close later; None while another program changes the deployments.

        Held for a moment only, because the ostree command takes the lock itself.
        """
        taken, free = self._sysroot.try_lock()
        if not (taken and free):
            return None
        self._sysroot.unlock()
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def list_deployments(self) -> tuple[SysrootDeployment, ...]:
        """All deployments in boot order, a staged one first."""
        return tuple(map(self._read, self._loaded()))

    def read_written(self) -> tuple[SysrootDeployment, ...]:
        """The finalized deployments."""
        return tuple(self._read(each) for each in self._loaded() if not each.is_staged())

    def read_staged(self) -> SysrootDeployment | None:
        """The deployment that the next clean shutdown finalizes."""
        self._loaded()
        found = self._sysroot.get_staged_deployment()
        return None if found is None else self._read(found)

    def find_booted(self) -> SysrootDeployment | None:
        """The deployment that runs."""
        self._loaded()
        found = self._sysroot.get_booted_deployment()
        return None if found is None else self._read(found)

    def find_base(self) -> SysrootDeployment | None:
        """Return the base of a new deployment: the pending one, else the booted one."""
        return next(iter(self.list_deployments()), None)

    def is_staged_locked(self) -> bool:
        """Whether the staged deployment is locked against finalization."""
        self._loaded()
        found = self._sysroot.get_staged_deployment()
        return found is not None and bool(found.is_finalization_locked())

    def compute_next_serial(self, checksum: str) -> int:
        """The serial that libostree will give; it is libostree's to choose."""
        taken = [each.serial for each in self.list_deployments() if each.checksum == checksum]
        return max(taken) + 1 if taken else 0

    def stage_in_steps(
        self, deployment: SysrootDeployment, *, locked: bool
    ) -> Generator[EmitSignal | PauseWork, None, None]:
        """Check the tree out and stage it, in place of any other."""
        if deployment.base:
            raise OperationError("this host has no packages to layer")
        with tempfile.NamedTemporaryFile("w", suffix=".origin") as origin:
            origin.write(f"[origin]\n{_ORIGIN_KEY}={deployment.refspec}\n")
            origin.flush()
            arguments = [f"--karg-append={each}" for each in deployment.kernel_arguments]
            lock = ["--lock-finalization"] if locked else []
            yield from run(
                "ostree", "admin", "deploy", f"--os={deployment.osname}", "--stage", *lock,
                f"--origin-file={origin.name}", "--karg-none", *arguments, deployment.checksum,
                failing="Staging deployment: ",
            )  # fmt: skip

    def unlock_staged(self) -> bool:
        """Let the shutdown finalize the staged deployment; False when it was not locked."""
        if not self.is_staged_locked():
            return False
        _ostree("lock-finalization", "--unlock")
        # As rpm-ostree does: other programs compare this time with that of the sysroot they loaded.
        os.utime(self.watched_directory)
        return True

    def drop_staged(self) -> bool:
        """Forget the staged deployment; False when there was none."""
        if self.read_staged() is None:
            return False
        _ostree("undeploy", "0")
        return True

    def write_deployments(self, deployments: tuple[SysrootDeployment, ...]) -> None:
        """Keep these finalized deployments, in this boot order."""
        kept = {each.id for each in deployments}
        for index, each in reversed(tuple(enumerate(self.list_deployments()))):
            if each.id not in kept and each != self.read_staged():
                _ostree("undeploy", str(index))
        now = [each.id for each in self.list_deployments()]
        if deployments and now and now[0] != deployments[0].id:
            _ostree("set-default", str(now.index(deployments[0].id)))

    def prune_layers(self) -> int:
        """How many layers were removed: none, as layers stay for the next image."""
        return 0

    def has(self, ref: str) -> bool:
        """Whether the repository has this ref."""
        return self._commit(ref) != ""

    def metadata(self, commit: str, key: str) -> str:
        """A string of a commit's metadata; empty without the commit or the key."""
        checksum = self._commit(commit)
        if not checksum:
            return ""
        _, variant, _ = self._repository().load_commit(checksum)
        found = variant.get_child_value(0).lookup_value(key, GLib.VariantType.new("s"))
        return str(found.unpack()) if found is not None else ""

    def new(
        self, ref: str, refspec: str, digest: str, kernel_arguments: tuple[str, ...]
    ) -> SysrootDeployment:
        """The deployment to be made of the commit at ``ref``."""
        commit = self._commit(ref)
        return SysrootDeployment(
            checksum=commit,
            serial=self.compute_next_serial(commit),
            refspec=refspec,
            digest=digest,
            version=self.metadata(ref, "version"),
            timestamp=0,
            kernel_arguments=kernel_arguments,
            osname=STATEROOT,
        )

    def _loaded(self) -> Any:
        self._sysroot.load_if_changed(None)
        return self._sysroot.get_deployments()

    def _read(self, found: Any) -> SysrootDeployment:
        origin = found.get_origin()
        checksum = found.get_csum()
        options = (found.get_bootconfig().get("options") or "").split()
        return SysrootDeployment(
            checksum=checksum,
            serial=found.get_deployserial(),
            refspec=origin.get_string("origin", _ORIGIN_KEY) if origin is not None else "",
            digest=self.metadata(checksum, DIGEST_KEY),
            version=self.metadata(checksum, "version"),
            timestamp=0,
            kernel_arguments=tuple(each for each in options if not each.startswith("ostree=")),
            pinned=found.is_pinned(),
            osname=found.get_osname(),
        )

    def _repository(self) -> Any:
        _, repository = self._sysroot.get_repo(None)
        return repository

    def _commit(self, name: str) -> str:
        _, commit = self._repository().resolve_rev(name, allow_noent=True)
        return str(commit or "")


def _ostree(*words: str) -> None:
    done = subprocess.run(["ostree", "admin", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise OperationError(f"ostree admin {words[0]}: {lines[-1]}")
