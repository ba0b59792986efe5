"""Which SELinux label the machine's policy has for a path; the only user of libselinux."""

import ctypes
import logging
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path

from treenail.host.filesystem.root import Root

log = logging.getLogger(__name__)

_LIBRARY = "libselinux.so.1"
_ENFORCE_FILE = "/sys/fs/selinux/enforce"
_MOUNTINFO = "/proc/self/mountinfo"
_SELABEL_CTX_FILE = 0  # SELABEL_CTX_FILE
_SELABEL_OPT_PATH = 3  # SELABEL_OPT_PATH
_CUSTOMIZABLE_TYPES = "customizable_types"
_TYPE_FIELD = 2  # user:role:type:range
_CACHE_LIMIT = 20_000


class _SelabelOption(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_char_p))


class SelinuxPolicy:
    """What ``restorecon`` would say of paths below a root, as the policy of this machine.

    A path is asked for as it is within the root. For one thread.

    The patterns of a policy take 4 MiB while they are in use (6,200 patterns, libselinux 3.4), so
    that they are read when an answer is not known yet and `release_memory` gives the memory back. Answers are
    kept until the policy's files change.
    """

    def __init__(
        self,
        root: Root,
        library: ctypes.CDLL,
        contexts: Path,
        *,
        is_labelled: Callable[[int], bool] | None = None,
    ) -> None:
        """``contexts`` is a file_contexts; ``is_labelled`` tells which devices have labels."""
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
        """The label for a path within the root, and what ``mode`` says stands there.

        Empty when the policy leaves such a path alone, or can't be read.
        """
        if self._loaded_mtimes != (stamp := self._read_mtimes()):
            self.release_memory()
            self._handle = None
            self._labels.clear()
            self._customizable_types = _read_words(
                self._contexts.parent.parent / _CUSTOMIZABLE_TYPES
            )
            self._loaded_mtimes = stamp
        key = (path, stat.S_IFMT(mode))
        if key not in self._labels:
            if len(self._labels) >= _CACHE_LIMIT:
                self._labels.clear()
            self._labels[key] = self._look_up(*key)
        return self._labels[key]

    def decide_label(self, place: str, status: os.stat_result, present: bytes) -> bytes:
        """The label for what stands at a place below the root, and is labelled ``present`` now.

        That is ``present`` unless ``restorecon`` would change it: it compares types only, as users
        and ranges say who wrote a file, and leaves alone the types that people give by hand. Both
        as extended attributes are, ending with a NUL. Empty when there is no label to be had.
        """
        if status.st_dev not in self._labelled_devices:
            self._labelled_devices[status.st_dev] = self._is_labelled(status.st_dev)
        if not self._labelled_devices[status.st_dev]:
            return present
        default = self.find_default_label(place.removeprefix(self._prefix) or "/", status.st_mode)
        if not default or _get_type(present) in {_get_type(default), *self._customizable_types}:
            return present
        return default + b"\0"

    def release_memory(self) -> None:
        """Give back the memory that looking things up took; the next look takes it again."""
        self._labelled_devices.clear()
        if self._handle:
            self._library.selabel_close(self._handle)
            self._handle = None
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))

    def _look_up(self, path: str, kind: int) -> bytes:
        if self._handle is None:
            self._handle = self._open_handle()
        found = ctypes.c_char_p()
        if not self._handle or self._library.selabel_lookup_raw(
            self._handle, ctypes.byref(found), os.fsencode(path), kind
        ):
            return b""
        label = found.value or b""
        self._library.freecon(found)
        return label

    def _open_handle(self) -> int:
        """The handle; 0 when the policy can't be read."""
        option = _SelabelOption(_SELABEL_OPT_PATH, os.fsencode(self._contexts))
        handle: int | None = self._library.selabel_open(_SELABEL_CTX_FILE, ctypes.byref(option), 1)
        if not handle:
            error = os.strerror(ctypes.get_errno())
            log.warning("new files have no label of the policy: %s: %s", self._contexts, error)
        return handle or 0

    def _read_mtimes(self) -> list[int]:
        """Changes when somebody installs a policy, or adds a pattern of their own."""
        return [_read_mtime(f"{self._contexts}{suffix}") for suffix in ("", ".bin", ".local")]


def load_policy(root: Root) -> SelinuxPolicy | None:
    """The policy of this machine; None when SELinux is disabled, or libselinux is not there."""
    library = load_if_enabled()
    if library is None:
        return None
    return SelinuxPolicy(root, library, Path(os.fsdecode(library.selinux_file_context_path())))


@cache
def load_if_enabled() -> ctypes.CDLL | None:
    """libselinux, where SELinux is enabled; where it is not, that is said once."""
    # The library asks for the same file; without it, it need not be loaded.
    if not Path(_ENFORCE_FILE).exists():
        log.debug("SELinux is disabled: labels are left to the kernel")
        return None
    try:
        library = load_library()
    except OSError as error:
        log.warning("SELinux labels are left to the kernel: %s", error)
        return None
    if library.is_selinux_enabled() != 1:
        log.debug("no SELinux policy is loaded: labels are left to the kernel")
        return None
    return library


def load_library() -> ctypes.CDLL:
    """The library; raises `OSError` where it is not installed."""
    return _declare_signatures(ctypes.CDLL(_LIBRARY, use_errno=True))


def is_labelled_device(device: int) -> bool:
    """Whether labels can be set on this device, as mounted; so it is taken when it is not listed.

    They can't where one was given with the mount, as on vfat, or where the kernel gives them.
    """
    name = f"{os.major(device)}:{os.minor(device)}"
    with Path(_MOUNTINFO).open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == name:
                return "seclabel" in fields[-1].split(",")
    return True


def _declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """No function here takes a callback: the agent may not have memory that is made executable."""
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
