"""Files of an install directory: their paths, and writes that are atomic and durable."""

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from treenail import errors, memory

INSTALL_CONFIG = "install-config.yaml"
"""Install configuration of the OpenShift installer; may have the field ``imageMode``."""
OWN_INSTALL_CONFIG = "treenail-install.yaml"
"""Configuration of an installation without the OpenShift installer."""


@dataclass(frozen=True, slots=True)
class InstallDirectory:
    """An install directory; computes paths and reads nothing.

    ``machine-pools``, ``machine-configs`` and ``controller-config`` are those of the Machine Config
    Operator's bootstrap (bootstrap.go).
    """

    root: Path

    @property
    def manifests(self) -> Path:
        """Manifests of the user and of the stage ``prepare``."""
        return self.root / "manifests"

    @property
    def openshift(self) -> Path:
        """More manifests, written by the OpenShift installer."""
        return self.root / "openshift"

    @property
    def machine_pools(self) -> Path:
        """Pools with the names of their rendered configs, in spec and status."""
        return self.root / "machine-pools"

    @property
    def machine_configs(self) -> Path:
        """Rendered configs."""
        return self.root / "machine-configs"

    @property
    def controller_config(self) -> Path:
        """The ControllerConfig."""
        return self.root / "controller-config"

    @property
    def private(self) -> Path:
        """Files of treenail itself; only root may read them."""
        return self.root / ".treenail"

    @property
    def state(self) -> Path:
        """Steps of the stage ``bootstrap``, each written before it begins."""
        return self.private / "install.json"

    @property
    def status(self) -> Path:
        """Current state of the installation, for programs that wait."""
        return self.private / "status.json"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the cluster's administrator, as the OpenShift installer writes it."""
        return self.root / "auth" / "kubeconfig"

    @property
    def registry(self) -> Path:
        """Storage, certificate and logins of the registry on the bootstrap host."""
        return self.private / "registry"

    @property
    def registry_address(self) -> Path:
        """``HOST:PORT`` of the registry, from when machines may have it."""
        return self.registry / "address"

    @property
    def ca_certificate(self) -> Path:
        """The CA that signs certificates of the bootstrap host, unless the user names one."""
        return self.private / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """Key of `ca_certificate`."""
        return self.private / "ca.key"

    @property
    def builds(self) -> Path:
        """Working files of builds, and the images that an interrupted one has pulled."""
        return self.private / "builds"

    @property
    def cluster_objects(self) -> Path:
        """Objects that the cluster adopts: MachineOSBuilds and their reports."""
        return self.private / "cluster-objects"

    @property
    def logs(self) -> Path:
        """Logs of the registry, of the config server and of each attempt of a build."""
        return self.private / "logs"

    @property
    def registry_access_log(self) -> Path:
        """Output of the registry's process that machines reach, with a line for each request."""
        return self.logs / "registry-pull.log"

    @property
    def images(self) -> Path:
        """OCI directories of built images, by pool."""
        return self.private / "images"

    def get_build_logs(self, pool: str, attempt: int) -> Path:
        """Return the directory with the Containerfile, output and report of one attempt."""
        return self.logs / "builds" / pool / f"attempt-{attempt}"


_PREFIX = ".treenail-new-"
_READ_LIMIT = 64 * memory.MIB
CONFIG_LIMIT = 4 * memory.MIB
"""Size limit of a file that a user wrote."""
_REMEDIES = {
    errno.ENOSPC: "free some space: df -h {directory}",
    errno.EDQUOT: "free some space: df -h {directory}",
    errno.EROFS: "mount the file system for writing, or choose another directory: --dir DIR",
    errno.EACCES: "run the command as the owner of {directory}",
    errno.EPERM: "run the command as the owner of {directory}",
    errno.EIO: "look for disk errors: journalctl -k",
}


_NO_DIRECTORY = {errno.ENOENT: "it does not exist", errno.ENOTDIR: "it is not a directory"}


def require_directory(path: Path, action: str) -> None:
    """Raise `UsageError` unless an install directory exists and this user may list it.

    ``action`` begins the message, such as ``install from``.
    """
    try:
        os.scandir(path).close()
    except OSError as error:
        cause = _NO_DIRECTORY.get(error.errno or 0, error.strerror)
        remedy = _REMEDIES.get(error.errno or 0, "").format(directory=path)
        raise errors.UsageError(
            f"cannot {action} {path}: {cause}",
            remedy=remedy or "name the install directory: --dir DIR",
        ) from error


class NotAFileError(Exception):
    """A path names a pipe, a socket or a device."""


def read_regular_file(path: Path, limit: int) -> tuple[bytes, int]:
    """Return content and size of a file; the content has at most one byte more than the limit.

    Raises `OSError`, of which `IsADirectoryError` for a directory, and `NotAFileError`. A pipe
    without a writer does not block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFileError
        content = stream.read(limit + 1)
    return content, max(status.st_size, len(content))


class InstallFiles:
    """Reads and replaces files; every `OSError` becomes a `FileError` with a remedy.

    When a method returns, its change is on the disk. After an error, SIGKILL or a power cut each
    file is the old one or the new one.
    """

    def read(self, path: Path, *, limit: int = _READ_LIMIT) -> bytes | None:
        """Return the content; None when the file does not exist."""
        try:
            content, _ = read_regular_file(path, limit)
        except FileNotFoundError:
            return None
        except (NotAFileError, ValueError) as error:
            raise errors.FileError(
                f"cannot read {path}: it is not a regular file", remedy=f"check it: ls -ld '{path}'"
            ) from error
        except OSError as error:
            raise _make_error("read", path, error) from error
        if len(content) > limit:
            raise errors.FileError(
                f"cannot read {path}: it has more than {memory.format_bytes(limit)}",
                remedy="remove what does not belong there",
            )
        return content

    def write(self, path: Path, content: bytes, *, mode: int = 0o600) -> bool:
        """Replace a file; return whether its content changed. Missing directories get mode 0700."""
        self.make_directory(path.parent)
        try:
            if path.stat().st_mode & 0o7777 == mode and path.read_bytes() == content:
                self.sync_file(path)
                return False
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _make_error("read", path, error) from error
        # One process writes at a time, so that a file of a killed one has the same name.
        temporary = path.parent / f"{_PREFIX}{path.name}"
        try:
            self._write_new(temporary, content, mode)
            self._replace_file(temporary, path)
            self._sync_path(path.parent)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise _make_error("write", path, error) from error
        return True

    def make_directory(self, path: Path, *, mode: int = 0o700) -> None:
        """Make a directory and its parents; one that exists keeps its mode."""
        if path.is_dir():
            # A killed process may have made it without an fsync. Who may not read the directory
            # above did not make it either.
            with suppress(OSError):
                self._sync_path(path.parent)
            return
        self.make_directory(path.parent)
        try:
            path.mkdir(mode=mode)
            self._sync_path(path.parent)
        except FileExistsError as error:
            if not path.is_dir():
                raise _make_error("make directory", path, error) from error
        except OSError as error:
            raise _make_error("make directory", path, error) from error

    def remove(self, path: Path) -> bool:
        """Remove a file; return whether it existed."""
        try:
            path.unlink()
            self._sync_path(path.parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _make_error("remove", path, error) from error
        return True

    def sync_file(self, path: Path) -> None:
        """Flush a file and its name: a killed process may have written it without an fsync.

        Raises `FileError`.
        """
        try:
            self._sync_path(path)
            self._sync_path(path.parent)
        except OSError as error:
            raise _make_error("flush", path, error) from error

    def sync_tree(self, root: Path) -> None:
        """Flush a directory that another program wrote, with everything below it.

        Files that vanish meanwhile are left out.
        """
        try:
            for directory, _, names in os.walk(root, topdown=False, onerror=_raise_error):
                for path in (*(Path(directory, name) for name in names), Path(directory)):
                    with suppress(FileNotFoundError):
                        self._sync_path(path)
            self._sync_path(root.parent)
        except OSError as error:
            raise _make_error("flush", root, error) from error

    def list_names(self, directory: Path) -> tuple[str, ...]:
        """Return the names in a directory without temporary files; none when it does not exist."""
        try:
            names = sorted(path.name for path in directory.iterdir())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise _make_error("list", directory, error) from error
        return tuple(name for name in names if not name.startswith(_PREFIX))

    def _write_new(self, path: Path, content: bytes, mode: int) -> None:
        with suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # Not the mode of open(2), which the umask restricts.
            os.fchmod(descriptor, mode)
            self._sync_descriptor(descriptor)

    def _replace_file(self, temporary: Path, path: Path) -> None:
        temporary.replace(path)

    def _sync_path(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._sync_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def _sync_descriptor(self, descriptor: int) -> None:
        os.fsync(descriptor)


def _raise_error(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_error(verb: str, path: Path, error: OSError) -> errors.FileError:
    remedy = _REMEDIES.get(error.errno or 0, "").format(directory=path.parent)
    return errors.FileError(f"cannot {verb} {path}: {error.strerror or error}", remedy=remedy)


def read_config_content(directory: InstallDirectory) -> bytes | None:
    """Return the content of the install configuration; None without one. Raises `FileError`."""
    for name in (INSTALL_CONFIG, OWN_INSTALL_CONFIG):
        content = InstallFiles().read(directory.root / name)
        if content is not None:
            return content
    return None
