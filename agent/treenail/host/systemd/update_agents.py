"""Other update agents of this machine, such as Zincati and the timers of rpm-ostree and bootc."""

import re

from treenail.errors import FileError, HostError
from treenail.host.filesystem.files import HostFiles
from treenail.host.systemd.systemd import Systemd

# A serialized GVariant: the driver that was named with register-driver, and its unit.
_DRIVER_FILE = "/run/rpm-ostree/update-driver.gv"
_UNIT = re.compile(rb"[A-Za-z0-9@:_.\\-]+\.(?:service|timer)")
_RPM_OSTREED = "/etc/rpm-ostreed.conf"
_AUTOMATIC_TIMER = "rpm-ostreed-automatic.timer"
_POLICY = re.compile(r"^\s*AutomaticUpdatePolicy\s*=\s*(\S+)", re.MULTILINE)
_STAGING_POLICIES = ("stage", "apply")
KNOWN_AGENTS = ("zincati.service", "bootc-fetch-apply-updates.timer", _AUTOMATIC_TIMER)
_LIMIT = 64 * 1024


def find_active_agents(files: HostFiles, systemd: Systemd) -> tuple[str, ...]:
    """Return the active units that update this machine; empty when systemd does not answer."""
    names = dict.fromkeys((*_read_registered_driver(files), *KNOWN_AGENTS))
    try:
        active = [each.name for each in systemd.list_units(*names) if each.active_state == "active"]
    except HostError:
        return ()
    return tuple(
        each for each in active if each != _AUTOMATIC_TIMER or _has_automatic_staging(files)
    )


def _read_registered_driver(files: HostFiles) -> tuple[str, ...]:
    return tuple(each.decode("ascii") for each in _UNIT.findall(_read_file(files, _DRIVER_FILE)))


def _has_automatic_staging(files: HostFiles) -> bool:
    """Return whether the timer stages updates; by default it does not (rpm-ostreed.conf(5))."""
    policy = _POLICY.findall(_read_file(files, _RPM_OSTREED).decode("utf-8", "replace"))
    return bool(policy) and policy[-1] in _STAGING_POLICIES


def _read_file(files: HostFiles, path: str) -> bytes:
    try:
        return files.read_file(path, limit=_LIMIT) or b""
    except FileError:
        return b""
