"""SELinux labels of paths in the policy of the machine; the only user of libselinux."""

import ctypes
import logging
import os
import re
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path

from treenail.host.filesystem.root_directory import Root

log = logging.getLogger(__name__)

_LIBRARY = "libselinux.so.1"
_ENFORCE_FILE = "/sys/fs/selinux/enforce"
_MOUNTINFO = "/proc/self/mountinfo"
# From selinux/label.h.
_SELABEL_CTX_FILE = 0
_SELABEL_OPT_PATH = 3
_CUSTOMIZABLE_TYPES = "customizable_types"
_TYPE_FIELD = 2  # user:role:type:range
_CACHE_LIMIT = 20_000


class _SelabelOption(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_char_p))


class SelinuxPolicy:
    """The labels that ``restorecon`` would set below a root. For one thread.

    Paths are looked up as they are within the root. Loaded patterns take 4 MiB (6,200 patterns,
    libselinux 3.4): a lookup loads them, `release_memory` frees them, and labels stay cached until
    the files of the policy change.
    """

    def __init__(
        self,
        root: Root,
        library: ctypes.CDLL,
        contexts: Path,
        *,
        is_labelled: Callable[[int], bool] | None = None,
    ) -> None:
        """``contexts`` is a file_contexts(5). ``is_labelled`` checks a device."""
        self._prefix = os.fspath(root.prefix).removesuffix("/")
        self._library = _declare_signatures(library)
        self._contexts = contexts
        self._is_labelled = is_labelled or is_labelled_device
        self._handle: int | None = None
        self._labels: dict[tuple[str, int], bytes] = {}
        self._customizable_types: frozenset[bytes] = frozenset()
        self._labelled_devices: dict[int, bool] = {}
        self._loaded_mtimes: list[int] = []

    def find_default_label(self, path: str, mode: int) -> bytes:
        """Return the label of the policy for a path within the root and the kind in ``mode``.

        Empty when the policy has none for the path or cannot be read.
        """
        if self._loaded_mtimes != (mtimes := self._read_mtimes()):
            self.release_memory()
            self._handle = None
            self._labels.clear()
            self._customizable_types = _read_words(
                self._contexts.parent.parent / _CUSTOMIZABLE_TYPES
            )
            self._loaded_mtimes = mtimes
        key = (path, stat.S_IFMT(mode))
        if key not in self._labels:
            if len(self._labels) >= _CACHE_LIMIT:
                self._labels.clear()
            self._labels[key] = self._look_up(*key)
        return self._labels[key]

    def decide_label(self, path: str, status: os.stat_result, present: bytes) -> bytes:
        """Return the label for the entry, which is now labelled ``present``.

        The result is ``present`` unless ``restorecon`` would change it. Both end with a NUL, as the
        extended attribute does. Empty when no label is known.
        """
        # As restorecon(8) without -F: compare types only, because user and range depend on who
        # wrote the file, and keep the types in customizable_types(5), which administrators set.
        if status.st_dev not in self._labelled_devices:
            self._labelled_devices[status.st_dev] = self._is_labelled(status.st_dev)
        if not self._labelled_devices[status.st_dev]:
            return present
        default = self.find_default_label(path.removeprefix(self._prefix) or "/", status.st_mode)
        if not default or _get_type(present) in {_get_type(default), *self._customizable_types}:
            return present
        return default + b"\0"

    def release_memory(self) -> None:
        """Unload the patterns; the next lookup of an unknown path loads them again."""
        self._labelled_devices.clear()
        if self._handle:
            self._library.selabel_close(self._handle)
            self._handle = None
            # Without it glibc keeps the freed memory in its arena.
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))

    def _look_up(self, path: str, kind: int) -> bytes:
        if self._handle is None:
            self._handle = self._open_handle()
        context = ctypes.c_char_p()
        if not self._handle or self._library.selabel_lookup_raw(
            self._handle, ctypes.byref(context), os.fsencode(path), kind
        ):
            return b""
        label = context.value or b""
        self._library.freecon(context)
        return label

    def _open_handle(self) -> int:
        """Return the handle of libselinux; 0 when the policy cannot be read."""
        option = _SelabelOption(_SELABEL_OPT_PATH, os.fsencode(self._contexts))
        handle: int | None = self._library.selabel_open(_SELABEL_CTX_FILE, ctypes.byref(option), 1)
        if not handle:
            error = os.strerror(ctypes.get_errno())
            log.warning(
                "cannot read the SELinux policy, the kernel labels new files: %s: %s",
                self._contexts,
                error,
            )
        return handle or 0

    def _read_mtimes(self) -> list[int]:
        # semanage-fcontext(8) writes patterns of the administrator to .local.
        return [_read_mtime(f"{self._contexts}{suffix}") for suffix in ("", ".bin", ".local")]


def load_policy(root: Root) -> SelinuxPolicy | None:
    """Load the policy of this machine; None without SELinux or without libselinux."""
    library = load_if_enabled()
    if library is None:
        return None
    return SelinuxPolicy(root, library, Path(os.fsdecode(library.selinux_file_context_path())))


def load_host_policy(root: Root) -> SelinuxPolicy | None:
    """Load the policy of a host from a container that has the host below a root.

    None without SELinux. Raises `OSError` without libselinux in the container.
    """
    config = root.resolve_path("/etc/selinux/config")
    if not (config.exists() and root.resolve_path(_ENFORCE_FILE).exists()):
        return None
    kind = re.search(r"^SELINUXTYPE=(\S+)", config.read_text("utf-8"), re.MULTILINE)
    contexts = f"/etc/selinux/{kind[1] if kind else 'targeted'}/contexts/files/file_contexts"
    return SelinuxPolicy(root, load_library(), root.resolve_path(contexts))


@cache
def load_if_enabled() -> ctypes.CDLL | None:
    """Load libselinux where SELinux is enabled; elsewhere log that once and return None."""
    # libselinux checks the same file. Without it, spare the library.
    if not Path(_ENFORCE_FILE).exists():
        log.debug("SELinux is disabled; the kernel labels new files")
        return None
    try:
        library = load_library()
    except OSError as error:
        log.warning("cannot load libselinux, the kernel labels new files: %s", error)
        return None
    if library.is_selinux_enabled() != 1:
        log.debug("no SELinux policy is loaded; the kernel labels new files")
        return None
    return library


def load_library() -> ctypes.CDLL:
    """Load libselinux; raise `OSError` where it is not installed."""
    return _declare_signatures(ctypes.CDLL(_LIBRARY, use_errno=True))


def is_labelled_device(device: int) -> bool:
    """Return whether labels can be set on the mounted device; True when it is not listed."""
    # The kernel lists seclabel for such file systems. vfat, mounted with context=, is none.
    name = f"{os.major(device)}:{os.minor(device)}"
    with Path(_MOUNTINFO).open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == name:
                return "seclabel" in fields[-1].split(",")
    return True


def _declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    # Declare no function that takes a callback: ctypes makes callbacks in executable memory, which
    # MemoryDenyWriteExecute= of the agent's unit forbids.
    handle, text = ctypes.c_void_p, ctypes.c_char_p
    library.selinux_file_context_path.restype = text
    library.selabel_open.restype = handle
    library.selabel_open.argtypes = (ctypes.c_uint, handle, ctypes.c_uint)
    library.selabel_lookup_raw.argtypes = (handle, handle, text, ctypes.c_int)
    library.selabel_close.argtypes = (handle,)
    library.selabel_close.restype = None
    library.freecon.argtypes = (text,)
    library.freecon.restype = None
    return library


def _get_type(label: bytes) -> bytes:
    fields = label.rstrip(b"\0").split(b":")
    return fields[_TYPE_FIELD] if len(fields) > _TYPE_FIELD else b""


def _read_words(path: Path) -> frozenset[bytes]:
    try:
        return frozenset(path.read_bytes().split())
    except OSError:
        return frozenset()


def _read_mtime(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
