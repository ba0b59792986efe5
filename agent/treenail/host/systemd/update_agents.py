"""Other programs that update this machine's operating system."""

import re
from typing import Protocol

from treenail.errors import FileError, HostError
from treenail.host.filesystem.files import Files
from treenail.host.systemd.systemd import Unit

# rpm-ostree's record of who called RegisterClient as the driver, a serialized GVariant.
_DRIVER = "/run/rpm-ostree/update-driver.gv"
_UNIT = re.compile(rb"[A-Za-z0-9@:_.\\-]+\.(?:service|timer)")
_RPM_OSTREED = "/etc/rpm-ostreed.conf"
_AUTOMATIC = "rpm-ostreed-automatic.timer"
_POLICY = re.compile(r"^\s*AutomaticUpdatePolicy\s*=\s*(\S+)", re.MULTILINE)
_CHANGES = ("stage", "apply")
_KNOWN = ("zincati.service", "bootc-fetch-apply-updates.timer", _AUTOMATIC)
_LIMIT = 64 * 1024


class Units(Protocol):
    """What systemd knows of units."""

    def units(self, *names: str) -> tuple[Unit, ...]: ...


def active_drivers(files: Files, systemd: Units) -> tuple[str, ...]:
    """The units that are active and update this machine; what can't be asked is left out."""
    names = dict.fromkeys((*_registered(files), *_KNOWN))
    try:
        active = [each.name for each in systemd.units(*names) if each.active == "active"]
    except HostError:
        return ()
    return tuple(each for each in active if each != _AUTOMATIC or _stages(files))


def _registered(files: Files) -> tuple[str, ...]:
    return tuple(each.decode("ascii") for each in _UNIT.findall(_read(files, _DRIVER)))


def _stages(files: Files) -> bool:
    """Whether the timer does more than to look: not by itself, says rpm-ostreed.conf(5)."""
    policy = _POLICY.findall(_read(files, _RPM_OSTREED).decode("utf-8", "replace"))
    return bool(policy) and policy[-1] in _CHANGES


def _read(files: Files, path: str) -> bytes:
    try:
        return files.read(path, limit=_LIMIT) or b""
    except FileError:
        return b""
