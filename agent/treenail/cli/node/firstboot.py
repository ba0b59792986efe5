"""``treenail firstboot``: move a new machine to its OS image before it joins its cluster."""

import argparse
import logging
import os
import signal
import sys
import threading

from treenail import log as journal
from treenail.cli.node.backend import (
    STATUS_PATH,
    BackendChoice,
    choose_backend,
    create_operating_system,
)
from treenail.cli.node.local_machine import (
    create_inspector_and_runner,
    create_unit_states,
    load_agent_settings,
)
from treenail.cli.node.run_probes import create_preflight
from treenail.clocks import SystemClock
from treenail.daemon.agent_settings import AgentSettings, ImageFiles
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.daemon.configuration.drift import DriftCheck
from treenail.daemon.configuration.image_content import DeploymentImages
from treenail.daemon.configuration.machine import NodeConfiguration
from treenail.daemon.firstboot import FirstBootInterfaces, FirstBootRunner, record_start
from treenail.daemon.firstboot_verifier import FirstBootVerifier
from treenail.daemon.interfaces import OSBackend
from treenail.daemon.local.status_file import StatusFile
from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.ostree.backends import TransactionLimits
from treenail.host.system.kernel import HostKernel

log = logging.getLogger(__name__)

EXIT_STOPPED = 1


def main(arguments: argparse.Namespace) -> int:
    """Return 0 if the machine may join, 1 after SIGTERM, which systemd sends on a reboot.

    systemd restarts the command after an error (Restart=on-failure).
    """
    root = Root(arguments.root or "/")
    # Before the settings: a start that fails on them counts too.
    is_restart = record_start(HostFiles(root))
    settings = load_agent_settings(arguments)
    if "JOURNAL_STREAM" in os.environ:
        # The unit connects standard error to the journal and the console, so that a person who
        # installs the machine sees why it does not join yet.
        journal.configure_stream_logging(sys.stderr, level=settings.log_level)
    else:
        journal.configure_logging(
            root.resolve_path(journal.JOURNAL_SOCKET), level=settings.log_level, stream=sys.stderr
        )
    limits = TransactionLimits(settings.limits.stage_s, settings.limits.stall_s)
    machine = Machine(root, clock=SystemClock(), limits=limits)
    if not machine.kernel.is_ostree_booted():
        log.info("%s is not booted from OSTree; nothing to do", root.prefix)
        return 0
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with machine.ledger.hold_lock():
        can_join = FirstBootRunner(
            machine.files,
            _create_interfaces(machine, settings),
            image=settings.firstboot.image,
            pull_secret=settings.pull_secret,
            stop=stop,
            is_restart=is_restart,
        ).run()
    return 0 if can_join else EXIT_STOPPED


def _create_interfaces(machine: Machine, settings: AgentSettings) -> FirstBootInterfaces:
    choice = choose_backend(settings.backend, machine.root)
    backend = create_operating_system(choice, machine)
    return FirstBootInterfaces(
        os=backend,
        power=machine.logind,
        # Without a count of soft reboots: only full reboots happen before the machine has joined.
        kernel=HostKernel(machine.root),
        credentials=PullSecrets(machine.root, machine.files, settings),
        preflight=create_preflight(machine, backend, settings.preflight, choice.backend),
        services=machine.systemd,
        verifier=_create_verifier(machine, backend, settings),
        clock=machine.clock,
        status=_create_status_file(machine, choice),
    )


def _create_verifier(
    machine: Machine, backend: OSBackend, settings: AgentSettings
) -> FirstBootVerifier:
    return FirstBootVerifier(
        machine.files,
        DeploymentImages(machine, backend),
        NodeConfiguration(*create_inspector_and_runner(machine, is_running=True)),
        DriftCheck(machine, create_unit_states(machine, is_running=True)),
        policy=settings.drift.policy,
        has_files_in_image=settings.image_files is ImageFiles.BAKED,
    )


def _create_status_file(machine: Machine, choice: BackendChoice) -> StatusFile:
    def write_status(content: bytes) -> None:
        try:
            machine.files.write_file(STATUS_PATH, content, mode=0o644)
        except FileError as error:
            log.debug("cannot write the status: %s", error)

    # The Node does not exist yet.
    status = StatusFile(write=write_status, notifier=machine.notifier, clock=machine.clock, node="")
    status.show_backend(str(choice.backend), choice.reason)
    return status
