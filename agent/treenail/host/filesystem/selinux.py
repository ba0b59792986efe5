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
_ENFORCE = "/sys/fs/selinux/enforce"
_MOUNTS = "/proc/self/mountinfo"
_BY_FILE = 0  # SELABEL_CTX_FILE
_OPT_PATH = 3  # SELABEL_OPT_PATH
_CUSTOMIZABLE = "customizable_types"
_TYPE = 2  # user:role:type:range
_ANSWERS = 20_000


class _Option(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_char_p))


class Policy:
    """What ``restorecon`` would say of paths below a root, as the policy of this machine.

    A path is asked for as it is within the root. For one thread.

    The patterns of a policy take 4 MiB while they are in use (6,200 patterns, libselinux 3.4), so
    that they are read when an answer is not known yet and `rest` gives the memory back. Answers are
    kept until the policy's files change.
    """

    def __init__(
        self,
        root: Root,
        library: ctypes.CDLL,
        contexts: Path,
        *,
        labelled: Callable[[int], bool] | None = None,
    ) -> None:
        """``contexts`` is a file_contexts; ``labelled`` tells which devices have labels."""
        self._prefix = os.fspath(root.prefix).removesuffix("/")
        self._library = _declared(library)
        self._contexts = contexts
        self._labelled = labelled or labelled_device
        self._handle: int | None = None
        self._answers: dict[tuple[str, int], bytes] = {}
        self._by_hand: frozenset[bytes] = frozenset()
        self._devices: dict[int, bool] = {}
        self._read: list[int] = []

    def default(self, path: str, mode: int) -> bytes:
        """The label for a path within the root, and what ``mode`` says stands there.

        Empty when the policy leaves such a path alone, or can't be read.
        """
        if self._read != (stamp := self._stamp()):
            self.rest()
            self._handle = None
            self._answers.clear()
            self._by_hand = _words(self._contexts.parent.parent / _CUSTOMIZABLE)
            self._read = stamp
        key = (path, stat.S_IFMT(mode))
        if key not in self._answers:
            if len(self._answers) >= _ANSWERS:
                self._answers.clear()
            self._answers[key] = self._look_up(*key)
        return self._answers[key]

    def fitting(self, place: str, status: os.stat_result, present: bytes) -> bytes:
        """The label for what stands at a place below the root, and is labelled ``present`` now.

        That is ``present`` unless ``restorecon`` would change it: it compares types only, as users
        and ranges say who wrote a file, and leaves alone the types that people give by hand. Both
        as extended attributes are, ending with a NUL. Empty when there is no label to be had.
        """
        if status.st_dev not in self._devices:
            self._devices[status.st_dev] = self._labelled(status.st_dev)
        if not self._devices[status.st_dev]:
            return present
        default = self.default(place.removeprefix(self._prefix) or "/", status.st_mode)
        if not default or _type(present) in {_type(default), *self._by_hand}:
            return present
        return default + b"\0"

    def rest(self) -> None:
        """Give back the memory that looking things up took; the next look takes it again."""
        self._devices.clear()
        if self._handle:
            self._library.selabel_close(self._handle)
            self._handle = None
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))

    def _look_up(self, path: str, kind: int) -> bytes:
        if self._handle is None:
            self._handle = self._opened()
        found = ctypes.c_char_p()
        if not self._handle or self._library.selabel_lookup_raw(
            self._handle, ctypes.byref(found), os.fsencode(path), kind
        ):
            return b""
        label = found.value or b""
        self._library.freecon(found)
        return label

    def _opened(self) -> int:
        """The handle; 0 when the policy can't be read."""
        option = _Option(_OPT_PATH, os.fsencode(self._contexts))
        handle: int | None = self._library.selabel_open(_BY_FILE, ctypes.byref(option), 1)
        if not handle:
            error = os.strerror(ctypes.get_errno())
            log.warning("new files have no label of the policy: %s: %s", self._contexts, error)
        return handle or 0

    def _stamp(self) -> list[int]:
        """Changes when somebody installs a policy, or adds a pattern of their own."""
        return [_changed_at(f"{self._contexts}{suffix}") for suffix in ("", ".bin", ".local")]


def policy(root: Root) -> Policy | None:
    """The policy of this machine; None when SELinux is disabled, or libselinux is not there."""
    library = enabled()
    if library is None:
        return None
    return Policy(root, library, Path(os.fsdecode(library.selinux_file_context_path())))


@cache
def enabled() -> ctypes.CDLL | None:
    """libselinux, where SELinux is enabled; where it is not, that is said once."""
    # The library asks for the same file; without it, it need not be loaded.
    if not Path(_ENFORCE).exists():
        log.debug("SELinux is disabled: labels are left to the kernel")
        return None
    try:
        library = libselinux()
    except OSError as error:
        log.warning("SELinux labels are left to the kernel: %s", error)
        return None
    if library.is_selinux_enabled() != 1:
        log.debug("no SELinux policy is loaded: labels are left to the kernel")
        return None
    return library


def libselinux() -> ctypes.CDLL:
    """The library; raises `OSError` where it is not installed."""
    return _declared(ctypes.CDLL(_LIBRARY, use_errno=True))


def labelled_device(device: int) -> bool:
    """Whether labels can be set on this device, as mounted; so it is taken when it is not listed.

    They can't where one was given with the mount, as on vfat, or where the kernel gives them.
    """
    name = f"{os.major(device)}:{os.minor(device)}"
    with Path(_MOUNTS).open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == name:
                return "seclabel" in fields[-1].split(",")
    return True


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
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


def _type(label: bytes) -> bytes:
    fields = label.rstrip(b"\0").split(b":")
    return fields[_TYPE] if len(fields) > _TYPE else b""


def _words(path: Path) -> frozenset[bytes]:
    try:
        return frozenset(path.read_bytes().split())
    except OSError:
        return frozenset()


def _changed_at(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
