"""Soft reboots into another deployment: ostree mounts it where systemd looks for the next root.

It refuses a deployment with another kernel, initramfs or other kernel arguments than those that
run, so that asking it is how to learn whether a soft reboot is possible. See
ostree-admin-prepare-soft-reboot(1), of ostree 2025.3 and later, and systemd-soft-reboot.service(8).
"""

import logging

from treenail.errors import TransactionError
from treenail.host.filesystem.root import Root
from treenail.host.ostree.commit import OSTREE_PROGRAM
from treenail.host.ostree.jobs import JobRunner

log = logging.getLogger(__name__)

SOFT_REBOOT_UNIT = "treenail-soft-reboot.service"
_NEXT_ROOT = "/run/ostree/nextroot-booted"


class OstreeSoftReboot:
    """Prepares them, by commands in transient units, for they mount in the host's name space.

    Raises `HostError` alone; to be used by one thread.
    """

    def __init__(self, jobs: JobRunner, root: Root) -> None:
        self._jobs = jobs
        self._root = root

    def unlock_staged(self) -> None:
        """Have the next shutdown finalize what is staged; nothing reboots."""
        self._run_ostree_admin("unlock what is staged", "lock-finalization", "--unlock")

    def prepare_soft_reboot(self) -> bool:
        """Have a soft reboot lead into what is staged; False when it can't."""
        try:
            self._run_ostree_admin("prepare the soft reboot", "prepare-soft-reboot", "0")
        except TransactionError as error:
            log.info("the whole machine reboots: %s", error)
            return False
        return True

    def clear_soft_reboot(self) -> None:
        """Have no soft reboot lead into another deployment; harmless when none would."""
        if self._root.resolve_path(_NEXT_ROOT).exists():
            self._run_ostree_admin("clear the soft reboot", "prepare-soft-reboot", "--reset")

    def _run_ostree_admin(self, description: str, *arguments: str) -> None:
        argv = (str(self._root.resolve_path(OSTREE_PROGRAM)), "admin", *arguments)
        self._jobs.run_job(SOFT_REBOOT_UNIT, "ostree", description, argv)
