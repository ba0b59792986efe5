"""``treenail-controller install wait-for``: wait until an installation is complete."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from treenail.cli.controller.duration import parse_duration
from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.cli.output import EXIT_AT_TARGET, EXIT_FAILED, EXIT_INSTALL_FAILED
from treenail.cli.terminal import HelpFormatter, format_examples, print_lines
from treenail.clock import Clock, SystemClock
from treenail.errors import TreenailError

if TYPE_CHECKING:
    from treenail.controllers.install_time.inputs.install_directory import InstallDirectory
    from treenail.controllers.install_time.steps.install_status import InstallStatus

_TARGET = "bootstrap-complete"
_POLL_S = 1.0
_GRACE_S = 10.0
"""Time in which systemd starts a killed process again."""
_NEVER_STARTED_S = 60.0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "wait-for",
        help="wait until an installation is complete, or has failed",
        description="Print what an installation does, until it is complete or has failed. Exit "
        "code 0: it is complete, 1: it is not complete within --timeout, or no process continues "
        "it, 5: it failed, and the message has the reason.",
        epilog=format_examples(
            (
                "wait on the bootstrap host, or where the installer ran",
                f"treenail-controller install wait-for {_TARGET} --dir cluster",
            ),
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "target", choices=(_TARGET,), metavar=_TARGET,
        help="wait until the cluster has everything that the bootstrap host provides",
    )  # fmt: skip
    add_directory_argument(parser)
    parser.add_argument(
        "--kubeconfig", metavar="FILE",
        help="on another machine than the bootstrap host, read the result from the cluster with "
        "this kubeconfig (default: DIR/auth/kubeconfig)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", metavar="TIME", type=parse_duration,
        help="wait for this time at most, such as 45s, 30m or 1h30m (default: no limit)",
    )  # fmt: skip
    parser.set_defaults(run=run_wait_for)


def run_wait_for(arguments: argparse.Namespace) -> int:
    """Wait; return the exit code of the result."""
    from treenail.controllers.install_time.inputs.install_directory import InstallDirectory
    from treenail.controllers.install_time.inputs.install_files import (
        InstallFiles,
        require_directory,
    )
    from treenail.controllers.install_time.prepare.preparation import require_prepared
    from treenail.controllers.install_time.steps.install_state import (
        InstallStateError,
        check_install_state,
        find_lock_holder,
    )
    from treenail.controllers.install_time.steps.install_status import (
        InstallPhase,
        read_install_status,
    )

    require_directory(arguments.directory, "wait for an installation from")
    directory = InstallDirectory(arguments.directory.resolve())
    files, clock = InstallFiles(), SystemClock()
    watch = _InstallWatch(str(directory.root), arguments.timeout, clock)
    kubeconfig = Path(arguments.kubeconfig or directory.kubeconfig)
    while True:
        has_process = find_lock_holder(directory) is not None
        status = read_install_status(directory, files)
        if not has_process and (status is None or status.phase is not InstallPhase.COMPLETE):
            try:
                check_install_state(directory, files)
            except InstallStateError as error:
                return _print_unusable_state(error)
        if status is not None or has_process:
            code = watch.handle_status(status, has_process=has_process)
        elif files.read(kubeconfig) is not None:
            # The machine of the user: the bootstrap host is another one.
            code = watch.handle_cluster(_read_cluster(str(kubeconfig), directory))
        else:
            require_prepared(directory)
            code = watch.handle_absence(str(kubeconfig))
        if code is not None:
            return code
        clock.sleep(_POLL_S)


def _print_unusable_state(error: TreenailError) -> int:
    print_lines([f"the installation cannot continue: {error}", f"  {error.remedy}"])
    return EXIT_INSTALL_FAILED


def _read_cluster(kubeconfig: str, directory: "InstallDirectory") -> str:
    """Return what the cluster still lacks; empty when it needs no bootstrap host."""
    from treenail.cli.controller.connect import create_transport
    from treenail.controllers.install_time.inputs.install_manifests import read_install_manifests
    from treenail.controllers.install_time.inputs.machine_count import (
        find_machine_count,
        read_install_config,
    )
    from treenail.controllers.install_time.steps.cluster_steps import describe_missing_handover
    from treenail.controllers.install_time.steps.node_step import find_missing_nodes, read_registry
    from treenail.errors import ClusterError, UsageError
    from treenail.kube.client import Client

    manifests = read_install_manifests(directory.root)
    machines = find_machine_count(manifests, read_install_config(directory))
    try:
        with closing(create_transport([kubeconfig], "", SystemClock())) as transport:
            client = Client(transport)
            missing = describe_missing_handover(client, None)
            return missing or find_missing_nodes(client, read_registry(client), machines)
    except (ClusterError, UsageError) as error:
        return f"waiting for the API server: {error}"


class _InstallWatch:
    """Prints what changed, and decides when the wait ends."""

    def __init__(self, root: str, timeout_s: float | None, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._began = clock.monotonic()
        self._timeout_s = timeout_s
        self._alone_since: float | None = None
        self._shown = ""

    def handle_status(self, status: "InstallStatus | None", *, has_process: bool) -> int | None:
        """Return the exit code; None to continue."""
        from treenail.controllers.install_time.steps.install_status import InstallPhase

        if status is not None:
            self._print_progress(status)
            if status.phase is InstallPhase.COMPLETE:
                return EXIT_AT_TARGET
            # A process that starts again after a failure has not published that yet.
            if status.phase is InstallPhase.FAILED and not has_process:
                return self._print_failure(status)
        if (code := self._check_time()) is not None:
            return code
        if has_process:
            self._alone_since = None
            return None
        return self._check_absence(_GRACE_S)

    def handle_absence(self, kubeconfig: str) -> int | None:
        """Return the exit code while there is neither a process nor a kubeconfig."""
        start = f"treenail-controller install bootstrap --dir {self._root}"
        self._print_text(f"waiting for a start of: {start}, or for {kubeconfig}")
        code = self._check_time()
        return self._check_absence(_NEVER_STARTED_S) if code is None else code

    def _check_absence(self, limit_s: float) -> int | None:
        now = self._clock.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since < limit_s:
            return None
        start = f"treenail-controller install bootstrap --dir {self._root}"
        print_lines([f"no process installs from {self._root}", f"  start it: {start}"])
        return EXIT_FAILED

    def handle_cluster(self, missing: str) -> int | None:
        """Return the exit code for what the cluster lacks; None to continue."""
        if not missing:
            print_lines(["the cluster needs the bootstrap host no longer"])
            return EXIT_AT_TARGET
        self._print_text(missing)
        return self._check_time()

    def _check_time(self) -> int | None:
        if self._timeout_s is None or self._clock.monotonic() - self._began < self._timeout_s:
            return None
        print_lines([f"not complete within {self._timeout_s:g} s: {self._shown}"])
        return EXIT_FAILED

    def _print_text(self, text: str) -> None:
        if text != self._shown:
            print_lines([text])
            self._shown = text

    def _print_progress(self, status: "InstallStatus") -> None:
        activity = f": {status.activity}" if status.activity else ""
        text = f"{status.title}{activity}" if status.title else str(status.phase)
        self._print_text(text)

    def _print_failure(self, status: "InstallStatus") -> int:
        if (failure := status.failure) is not None:
            lines = [f"the installation failed in step {failure.step}: {failure.reason}"]
            print_lines([*lines, *([f"  {failure.remedy}"] if failure.remedy else [])])
        return EXIT_INSTALL_FAILED
