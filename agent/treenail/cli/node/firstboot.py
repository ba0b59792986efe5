"""``treenail firstboot``: the machine is what it was made to be before it joins its cluster."""

import argparse
import logging
import signal
import socket
import sys
import threading
from pathlib import Path

from treenail import log as journal
from treenail.cli.node.choose_backend import choose_backend, create_operating_system
from treenail.cli.node.run_probes import create_preflight
from treenail.clock import SystemClock
from treenail.daemon.cluster.pull_secrets import PullSecrets
from treenail.daemon.firstboot import FirstBootInterfaces, FirstBootRunner, record_start
from treenail.daemon.settings.settings import (
    SETTINGS_FILE,
    AgentSettings,
    PartialSettings,
    load_settings,
)
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.machine import Machine
from treenail.host.ostree.watch import TransactionLimits
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import Ledger
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.systemd import Systemd

log = logging.getLogger(__name__)

JOURNAL_SOCKET = "/run/systemd/journal/socket"
EXIT_STOPPED = 1


def main(arguments: argparse.Namespace) -> int:
    """Return 0 when the machine may join; 1 when it was told to stop, as a reboot does.

    Whatever keeps it from beginning is for the next process, which systemd starts.
    """
    root = Root(arguments.root or "/")
    again = record_start(HostFiles(root))
    settings = _load_settings(arguments)
    journal.configure_logging(
        root.resolve_path(JOURNAL_SOCKET), level=settings.log_level, stream=sys.stderr
    )
    kernel, clock, files = HostKernel(root), SystemClock(), HostFiles(root)
    if not kernel.is_ostree_booted():
        log.info("%s is not booted from OSTree; there is nothing to do", root.prefix)
        return 0
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    bus = SystemBus()
    limits = TransactionLimits(settings.limits.stage_s, settings.limits.stall_s)
    choice, systemd = choose_backend(settings.backend, root), Systemd(bus, clock)
    os = create_operating_system(choice, Machine(root, clock=clock, bus=bus, limits=limits))
    machine = FirstBootInterfaces(
        os=os,
        power=Logind(bus),
        kernel=kernel,
        credentials=PullSecrets(root, files, settings),
        preflight=create_preflight(root, bus, systemd, os, settings.preflight, choice.backend),
        services=systemd,
        clock=clock,
    )
    with Ledger(root).hold_lock():
        joins = FirstBootRunner(
            files,
            machine,
            image=settings.firstboot.image,
            pull_secret=settings.pull_secret,
            stop=stop,
            is_restart=again,
        ).run()
    return 0 if joins else EXIT_STOPPED


def _load_settings(arguments: argparse.Namespace) -> AgentSettings:
    given = PartialSettings(
        root=arguments.root, log_level=logging.DEBUG if arguments.verbose else None
    )
    root = Root(arguments.root or "/")
    path = Path(arguments.config) if arguments.config else root.resolve_path(SETTINGS_FILE)
    return load_settings(
        path, given, host_name=socket.gethostname(), is_required=arguments.config is not None
    )
