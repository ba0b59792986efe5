"""``treenail firstboot``: move a new machine to its OS image before it joins its cluster."""

import argparse
import logging
import os
import signal
import sys
import threading

from treenail import clocks, errors
from treenail import log as journal
from treenail.cli.node import local_machine, run_probes
from treenail.cli.node.backend import BackendChoice, choose_backend, create_operating_system
from treenail.daemon import agent_settings, firstboot, firstboot_verifier
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.daemon.configuration import drift, image_content
from treenail.daemon.local.status_file import StatusFile
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.machine import Machine
from treenail.host.ostree import backend_settings, deployments
from treenail.host.system.kernel import HostKernel

log = logging.getLogger(__name__)

EXIT_STOPPED = 1


def main(arguments: argparse.Namespace) -> int:
    """Return 0 if the machine may join, 1 after SIGTERM, which systemd sends on a reboot.

    systemd restarts the command after an error (Restart=on-failure).
    """
    root = root_directory.Root(arguments.root or "/")
    # Before the settings: a start that fails on them counts too.
    is_restart = firstboot.record_start(atomic_files.HostFiles(root))
    settings = local_machine.load_agent_settings(arguments)
    if "JOURNAL_STREAM" in os.environ:
        # The unit connects standard error to the journal and the console, so that a person who
        # installs the machine sees why it does not join yet.
        journal.configure_stream_logging(sys.stderr, level=settings.log_level)
    else:
        journal.configure_logging(
            root.resolve_path(journal.JOURNAL_SOCKET), level=settings.log_level, stream=sys.stderr
        )
    limits = backend_settings.TransactionLimits(settings.limits.stage_s, settings.limits.stall_s)
    machine = Machine(root, clock=clocks.SystemClock(), limits=limits)
    if not machine.kernel.is_ostree_booted():
        log.info("%s is not booted from OSTree; nothing to do", root.prefix)
        return 0
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with machine.ledger.hold_lock():
        can_join = firstboot.FirstBootRunner(
            machine.files,
            _create_interfaces(machine, settings),
            image=settings.firstboot.image,
            pull_secret=settings.pull_secret,
            stop=stop,
            is_restart=is_restart,
        ).run()
    return 0 if can_join else EXIT_STOPPED


def _create_interfaces(
    machine: Machine, settings: agent_settings.AgentSettings
) -> firstboot.FirstBootInterfaces:
    choice = choose_backend(settings.backend, machine.root)
    backend = create_operating_system(choice, machine)
    return firstboot.FirstBootInterfaces(
        os=backend,
        power=machine.logind,
        # Without a count of soft reboots: only full reboots happen before the machine has joined.
        kernel=HostKernel(machine.root),
        credentials=PullSecrets(machine.root, machine.files, settings),
        preflight=run_probes.create_preflight(machine, backend, settings.preflight, choice.backend),
        services=machine.systemd,
        verifier=_create_verifier(machine, backend, settings),
        clock=machine.clock,
        status=_create_status_file(machine, choice),
    )


def _create_verifier(
    machine: Machine, backend: deployments.OSBackend, settings: agent_settings.AgentSettings
) -> firstboot_verifier.FirstBootVerifier:
    return firstboot_verifier.FirstBootVerifier(
        machine.files,
        image_content.DeploymentImages(machine, backend),
        local_machine.create_configuration(machine, is_running=True),
        drift.DriftCheck(machine, machine.systemd),
        policy=settings.drift,
        has_files_in_image=settings.image_files is agent_settings.ImageFiles.BAKED,
    )


def _create_status_file(machine: Machine, choice: BackendChoice) -> StatusFile:
    def write_status(content: bytes) -> None:
        try:
            machine.files.write_file(local_machine.STATUS_PATH, content, mode=0o644)
        except errors.FileError as error:
            log.debug("cannot write the status: %s", error)

    # The Node does not exist yet.
    status = StatusFile(write=write_status, notifier=machine.notifier, clock=machine.clock, node="")
    status.show_backend(str(choice.backend), choice.reason)
    return status
