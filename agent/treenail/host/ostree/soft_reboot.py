"""Soft reboots into another deployment: ostree mounts it where systemd looks for the next root.

It refuses a deployment with another kernel, initramfs or other kernel arguments than those that
run, so that asking it is how to learn whether a soft reboot is possible. See
ostree-admin-prepare-soft-reboot(1), of ostree 2025.3 and later, and systemd-soft-reboot.service(8).
"""

import logging

from treenail.errors import TransactionError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.commit import PROGRAM
from treenail.host.ostree.jobs import Jobs

log = logging.getLogger(__name__)

UNIT = "treenail-soft-reboot.service"
_PREPARED = "/run/ostree/nextroot-booted"


class SoftReboots:
    """Prepares them, by commands in transient units, for they mount in the host's name space.

    Raises `HostError` alone; to be used by one thread.
    """

    def __init__(self, jobs: Jobs, root: Root) -> None:
        self._jobs = jobs
        self._root = root

    def unlock(self) -> None:
        """Have the next shutdown finalize what is staged; nothing reboots."""
        self._run("unlock what is staged", "lock-finalization", "--unlock")

    def prepare(self) -> bool:
        """Have a soft reboot lead into what is staged; False when it can't."""
        try:
            self._run("prepare the soft reboot", "prepare-soft-reboot", "0")
        except TransactionError as error:
            log.info("the whole machine reboots: %s", error)
            return False
        return True

    def clear(self) -> None:
        """Have no soft reboot lead into another deployment; harmless when none would."""
        if self._root.path(_PREPARED).exists():
            self._run("clear the soft reboot", "prepare-soft-reboot", "--reset")

    def _run(self, what: str, *arguments: str) -> None:
        argv = (str(self._root.path(PROGRAM)), "admin", *arguments)
        self._jobs.carry_out(UNIT, what, argv)
