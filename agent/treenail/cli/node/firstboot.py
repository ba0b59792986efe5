"""``treenail firstboot``: the machine is what it was made to be before it joins its cluster."""

import argparse
import logging
import signal
import socket
import sys
import threading
from pathlib import Path

from treenail import log as journal
from treenail.cli.node.choose_backend import choose, operating_system
from treenail.cli.node.run_probes import preflight
from treenail.clock import SystemClock
from treenail.daemon.cluster.pull_secrets import Credentials
from treenail.daemon.firstboot import FirstBoot, Machine, began_before
from treenail.daemon.settings.settings import FILE, Given, Settings, load
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.ostree.watch import Limits
from treenail.host.system.kernel import Kernel
from treenail.host.system.state_file import Ledger
from treenail.host.systemd.bus import SystemBus
from treenail.host.systemd.logind import Logind
from treenail.host.systemd.systemd import Systemd

log = logging.getLogger(__name__)

JOURNAL = "/run/systemd/journal/socket"
STOPPED = 1


def main(arguments: argparse.Namespace) -> int:
    """Return 0 when the machine may join; 1 when it was told to stop, as a reboot does.

    Whatever keeps it from beginning is for the next process, which systemd starts.
    """
    root = Root(arguments.root or "/")
    again = began_before(Files(root))
    settings = _settings(arguments)
    journal.setup(root.path(JOURNAL), level=settings.log_level, stream=sys.stderr)
    kernel, clock, files = Kernel(root), SystemClock(), Files(root)
    if not kernel.is_ostree():
        log.info("%s is not booted from OSTree; there is nothing to do", root.prefix)
        return 0
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    bus = SystemBus()
    limits = Limits(settings.limits.stage_s, settings.limits.stall_s)
    choice, systemd = choose(settings.backend, root), Systemd(bus, clock)
    os = operating_system(choice, bus, root, clock, limits)
    machine = Machine(
        os=os,
        power=Logind(bus),
        kernel=kernel,
        credentials=Credentials(root, files, settings),
        preflight=preflight(root, bus, systemd, os, settings.preflight, choice.backend),
        services=systemd,
        clock=clock,
    )
    with Ledger(root).lock():
        joins = FirstBoot(
            files,
            machine,
            image=settings.firstboot.image,
            pull_secret=settings.pull_secret,
            stop=stop,
            again=again,
        ).run()
    return 0 if joins else STOPPED


def _settings(arguments: argparse.Namespace) -> Settings:
    given = Given(root=arguments.root, log_level=logging.DEBUG if arguments.verbose else None)
    root = Root(arguments.root or "/")
    path = Path(arguments.config) if arguments.config else root.path(FILE)
    return load(path, given, host_name=socket.gethostname(), required=arguments.config is not None)
