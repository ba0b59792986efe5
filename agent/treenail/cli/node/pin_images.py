"""``treenail run --pinned-images``: pull and pin images once, in a unit that the agent starts."""

import argparse
import sys
from contextlib import closing

from treenail import log
from treenail.cli.node import local_machine
from treenail.daemon.cluster import node_identity, pinned_images
from treenail.kube import api_client
from treenail.kube.transport import native


def main(arguments: argparse.Namespace) -> int:
    """Return 1 if a set is not complete: systemd then starts the unit again."""
    settings = local_machine.load_agent_settings(arguments)
    log.configure_stream_logging(sys.stderr, level=settings.log_level)
    with local_machine.open_machine(settings.root) as machine:
        access = node_identity.read_access(settings, machine.root)
        if access.connection is None or not access.identity.name:
            raise node_identity.make_unnamed_error(access.identity)
        with closing(native.HttpTransport(access.connection, machine.clock)) as transport:
            # An apply removes what its field manager owns and omits: the agent has another one.
            client = api_client.Client(transport, field_manager="treenail-pinned-images")
            job = pinned_images.PinnedImagesJob(machine, client, access.identity.name)
            return 0 if job.run() else 1
