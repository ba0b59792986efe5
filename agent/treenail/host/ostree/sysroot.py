"""Deployments as ostree stores them: metadata, origin files, trees, the lock of a staged one.

The lock is in a serialized GVariant. GLib would take 5 MiB in the resting agent, so the part of the
format that this needs is here (https://docs.gtk.org/glib/gvariant-format.html). Values are not
trusted: a damaged one reads as None.
"""

import ast
import logging
from collections.abc import Iterator

from treenail import errors, process
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.ostree import deployments

log = logging.getLogger(__name__)

OSTREE_PROGRAM = "/usr/bin/ostree"
_TIMEOUT_S = 20.0
_ORIGIN_LIMIT = 256 * 1024
_CACHE_LIMIT = 16
# Groups of an origin file that only rpm-ostree understands.
# With one of them bootc reports the deployment as incompatible.
_RPM_OSTREE_GROUPS = {"rpmostree", "packages", "overrides", "modules"}
_DEPLOYMENTS = "/sysroot/ostree/deploy"
_STAGED = "/run/ostree/staged-deployment"
_FORMER_LOCK = "/run/ostree/staged-deployment-locked"
_MAX_BYTES = 16 << 20
_REMEDY = "see: ostree admin status"
_ALIGNMENT = 8
"""Of a variant, and so of a dictionary entry with one."""


class OstreeMetadata:
    """Metadata of commits and deployments. It raises nothing: unknown values are empty."""

    def __init__(self, programs: process.ProgramRunner, root: root_directory.Root) -> None:
        self._programs = programs
        self._root = root
        self._files = atomic_files.HostFiles(root)
        self._labels: dict[str, dict[str, str]] = {}

    def read_labels(self, checksum: str) -> dict[str, str]:
        """Return the labels of the image that the commit was imported from."""
        # Cache without expiry: a commit is named by its checksum and never changes.
        if checksum not in self._labels:
            if len(self._labels) >= _CACHE_LIMIT:
                self._labels.clear()
            self._labels[checksum] = self._read_commit_labels(checksum)
        return self._labels[checksum]

    def find_local_changes(self, origin: str) -> tuple[str, ...]:
        """Return the settings of the origin file that bootc does not support.

        Each one is a group and a line, such as ``packages requested=…``.
        """
        try:
            content = (
                self._files.read_file(f"/sysroot{origin}", limit=_ORIGIN_LIMIT) if origin else b""
            )
        except errors.FileError:
            return ()
        section, changes = "", list[str]()
        for line in map(str.strip, (content or b"").decode("utf-8", "replace").splitlines()):
            if line.startswith("["):
                section = line.strip("[]")
            elif line and section in _RPM_OSTREE_GROUPS:
                changes.append(f"{section} {line.rstrip(';')}")
        return tuple(changes)

    def _read_commit_labels(self, checksum: str) -> dict[str, str]:
        program = str(self._root.resolve_path(OSTREE_PROGRAM))
        option = f"--print-metadata-key={deployments.IMAGE_CONFIG_KEY}"
        command = [program, "show", option, checksum]
        try:
            output = self._programs.run_command(command, timeout_s=_TIMEOUT_S).decode()
            # ostree prints GVariant's text format, whose string literals Python can parse.
            return deployments.parse_config_labels(
                json_text.parse_json(ast.literal_eval(output.strip()))
            )
        except (errors.CommandError, ValueError, SyntaxError, TypeError) as error:
            log.debug("cannot read the labels of %s: %s", checksum, error)
            return {}


def find_boolean(content: bytes, key: str) -> bool | None:
    """Return the ``b`` at the key of a serialized ``a{sv}``, in the byte order of this machine.

    None without the key, or when its first value has another type.
    """
    wanted = key.encode() + b"\0"
    for entry in _split_array(content):
        size = _get_offset_size(len(entry))
        end = _read_offset(entry, len(entry) - size, size)
        if end > len(entry) - size or entry[:end] != wanted:
            continue
        # A variant is its value, a null character and the type of the value.
        value = entry[_align(end) : len(entry) - size]
        return value[0] != 0 if len(value) == 3 and value[1:] == b"\0b" else None
    return None


def _split_array(content: bytes) -> Iterator[bytes]:
    """Yield the elements of an array of dictionary entries, as its offsets say."""
    size = _get_offset_size(len(content))
    if not content:
        return
    offsets = _read_offset(content, len(content) - size, size)
    if offsets > len(content) or (len(content) - offsets) % size:
        return
    start = 0
    for offset in range(offsets, len(content), size):
        end = _read_offset(content, offset, size)
        if _align(start) <= end <= offsets:
            yield content[_align(start) : end]
        start = end


def _get_offset_size(length: int) -> int:
    """Return the size of the offsets in a container of this length."""
    return next(size for size in (1, 2, 4, 8) if length < 1 << 8 * size)


def _read_offset(content: bytes, offset: int, size: int) -> int:
    return int.from_bytes(content[max(offset, 0) : offset + size], "little")


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def is_staged_locked(root: root_directory.Root) -> bool:
    """Return whether the staged deployment is locked; False without a staged deployment.

    Since 2023.8 libostree records the lock in the ``a{sv}`` of the staged deployment, before that
    in a file of its own, and it obeys both (ostree-sysroot-deploy.c). rpm-ostreed up to 2026.2
    looks for the file alone, so that its ``Deployments`` do not show a lock of today.

    Raises HostError when the record exists and cannot be read.
    """
    if root.resolve_path(_FORMER_LOCK).exists():
        return True
    try:
        with root.resolve_path(_STAGED).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise errors.HostError(f"cannot read {_STAGED}: {error.strerror}", remedy=_REMEDY) from None
    if len(content) > _MAX_BYTES:
        raise errors.HostError(
            f"cannot read {_STAGED}: it is over {_MAX_BYTES >> 20} MiB", remedy=_REMEDY
        )
    return find_boolean(content, "locked") is True


def open_deployment_tree(
    root: root_directory.Root, deployment: deployments.OstreeDeployment
) -> root_directory.Root:
    """Return the tree of a deployment of rpm-ostree that was never booted.

    Its /etc is /usr/etc, because ostree merges the /etc of the host at the shutdown. Raises
    `HostError` without the tree.
    """
    # The ID of rpm-ostreed is OSNAME-CHECKSUM.SERIAL.
    name, _, serial = deployment.id.partition(f"-{deployment.checksum}.")
    path = f"{_DEPLOYMENTS}/{name}/deploy/{deployment.checksum}.{serial}"
    tree = root.resolve_path(path)
    if not serial or not (tree / "usr").is_dir():
        raise errors.HostError(
            f"cannot read the content of {deployment.image or deployment.id}: its deployment has "
            f"no tree at {path}",
            remedy="see: ostree admin status",
        )
    return root_directory.Root(tree, has_usr_etc=True)
