"""``treenail-controller install wait-for``: wait until an installation is complete."""

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.cli import argument_parser, output, terminal
from treenail.cli.controller.install.arguments import add_directory_argument

if TYPE_CHECKING:
    from treenail.installer.directory.install_files import InstallDirectory
    from treenail.installer.install_steps import InstallStatus

_BOOTSTRAP, _INSTALL = "bootstrap-complete", "install-complete"
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
        epilog=terminal.format_examples(
            (
                "wait on the bootstrap host, or where the installer ran",
                f"treenail-controller install wait-for {_BOOTSTRAP} --dir cluster",
            ),
            (
                "wait for the images of all pools",
                f"treenail-controller install wait-for {_INSTALL} --dir cluster",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "target", choices=(_BOOTSTRAP, _INSTALL), metavar="TARGET",
        help=f"what to wait for; {_BOOTSTRAP}: the cluster has everything that the bootstrap host "
        f"provides; {_INSTALL}: also, each pool in image mode has its image and all its nodes run "
        "it",
    )  # fmt: skip
    add_directory_argument(parser)
    parser.add_argument(
        "--kubeconfig", metavar="FILE",
        help="on another machine than the bootstrap host, read the result from the cluster with "
        "this kubeconfig (default: DIR/auth/kubeconfig)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", metavar="TIME", type=argument_parser.parse_duration,
        help="wait for this time at most, such as 45s, 30m or 1h30m (default: no limit)",
    )  # fmt: skip
    parser.set_defaults(run=run_wait_for)


def run_wait_for(arguments: argparse.Namespace) -> int:
    """Wait; return the exit code of the result."""
    from treenail.installer.directory.install_files import require_directory

    require_directory(arguments.directory, "wait for an installation from")
    clock = clocks.SystemClock()
    monitor = _InstallMonitor(str(arguments.directory.resolve()), arguments.timeout, clock)
    code = _wait_for_bootstrap(arguments, monitor, clock)
    if code or arguments.target == _BOOTSTRAP:
        return code
    return _wait_for_pools(arguments, monitor, clock)


def _wait_for_bootstrap(
    arguments: argparse.Namespace, monitor: "_InstallMonitor", clock: clocks.Clock
) -> int:
    from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
    from treenail.installer.directory.install_state import (
        InstallStateError,
        check_install_state,
        find_lock_holder,
    )
    from treenail.installer.directory.prepared_manifests import require_prepared
    from treenail.installer.install_steps import InstallPhase, read_install_status

    directory = InstallDirectory(arguments.directory.resolve())
    files = InstallFiles()
    kubeconfig = _find_kubeconfig(arguments)
    while True:
        has_process = find_lock_holder(directory) is not None
        status = read_install_status(directory, files)
        if not has_process and (status is None or status.phase is not InstallPhase.COMPLETE):
            try:
                check_install_state(directory, files)
            except InstallStateError as error:
                return _print_unusable_state(error)
        if status is not None or has_process:
            code = monitor.handle_status(status, has_process=has_process)
        elif files.read(kubeconfig) is not None:
            # The machine of the user: the bootstrap host is another one.
            code = monitor.handle_cluster(_read_cluster(str(kubeconfig), directory))
        else:
            require_prepared(directory)
            code = monitor.handle_absence(str(kubeconfig))
        if code is not None:
            return code
        clock.sleep(_POLL_S)


def _wait_for_pools(
    arguments: argparse.Namespace, monitor: "_InstallMonitor", clock: clocks.Clock
) -> int:
    kubeconfig = _find_kubeconfig(arguments)
    while True:
        code = monitor.handle_pools(*_read_pools(str(kubeconfig), clock))
        if code is not None:
            return code
        clock.sleep(_POLL_S)


def _find_kubeconfig(arguments: argparse.Namespace) -> Path:
    from treenail.installer.directory.install_files import InstallDirectory

    directory = InstallDirectory(arguments.directory.resolve())
    return Path(arguments.kubeconfig or directory.kubeconfig)


def _read_pools(kubeconfig: str, clock: clocks.Clock) -> tuple[str, str]:
    """Return what pools still lack, and why the images of pools cannot be built."""
    from treenail.cli.controller.connect import create_transport
    from treenail.controllers.handover.handover_objects import parse_objects
    from treenail.errors import ClusterError, ConfigError, NotFoundError, UsageError
    from treenail.kube.api_client import Client
    from treenail.kube.resources import MACHINECONFIGPOOLS, MACHINEOSBUILDS, MACHINEOSCONFIGS

    try:
        with closing(create_transport([kubeconfig], "", clock)) as transport:
            client = Client(transport)
            progress = parse_objects(
                client.list(MACHINECONFIGPOOLS).items,
                client.list(MACHINEOSCONFIGS).items,
                client.list(MACHINEOSBUILDS).items,
            )
    except NotFoundError as error:
        return f"waiting for the controllers, which bring the kind: {error}", ""
    except (ClusterError, UsageError, ConfigError) as error:
        return f"waiting for the API server: {error}", ""
    return "; ".join(progress.missing), "; ".join(progress.failed)


def _print_unusable_state(error: errors.TreenailError) -> int:
    terminal.print_lines([f"the installation cannot continue: {error}", f"  {error.remedy}"])
    return output.EXIT_INSTALL_FAILED


def _read_cluster(kubeconfig: str, directory: "InstallDirectory") -> str:
    """Return what the cluster still lacks; empty when it needs no bootstrap host."""
    from treenail.cli.controller.connect import create_transport
    from treenail.errors import ClusterError, UsageError
    from treenail.installer.bootstrap.cluster_steps import (
        describe_missing_handover,
        find_missing_nodes,
        read_registry,
    )
    from treenail.installer.directory.install_config import find_machine_count
    from treenail.installer.directory.install_files import read_config_content
    from treenail.installer.directory.install_manifests import read_install_manifests
    from treenail.kube.api_client import Client

    manifests = read_install_manifests(directory.root)
    machines = find_machine_count(manifests, read_config_content(directory))
    try:
        with closing(create_transport([kubeconfig], "", clocks.SystemClock())) as transport:
            client = Client(transport)
            missing = describe_missing_handover(client, None)
            return missing or find_missing_nodes(client, read_registry(client), machines)
    except (ClusterError, UsageError) as error:
        return f"waiting for the API server: {error}"


class _InstallMonitor:
    """Prints what changed, and decides when the wait ends."""

    def __init__(self, root: str, timeout_s: float | None, clock: clocks.Clock) -> None:
        self._root = root
        self._clock = clock
        self._began = clock.monotonic()
        self._timeout_s = timeout_s
        self._alone_since: float | None = None
        self._shown = ""
        self._failure = ""
        self._failed_since = 0.0

    def handle_status(self, status: "InstallStatus | None", *, has_process: bool) -> int | None:
        """Return the exit code; None to continue."""
        from treenail.installer.install_steps import InstallPhase

        if status is not None:
            self._print_progress(status)
            if status.phase is InstallPhase.COMPLETE:
                return output.EXIT_AT_TARGET
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
        terminal.print_lines([f"no process installs from {self._root}", f"  start it: {start}"])
        return output.EXIT_FAILED

    def handle_cluster(self, missing: str) -> int | None:
        """Return the exit code for what the cluster lacks; None to continue."""
        if not missing:
            terminal.print_lines(["the cluster needs the bootstrap host no longer"])
            return output.EXIT_AT_TARGET
        self._print_text(missing)
        return self._check_time()

    def handle_pools(self, missing: str, failure: str) -> int | None:
        """Return the exit code for what the pools lack; None to continue."""
        if not missing and not failure:
            terminal.print_lines(["all pools in image mode have their image"])
            return output.EXIT_AT_TARGET
        now = self._clock.monotonic()
        if failure != self._failure:
            self._failure, self._failed_since = failure, now
        # A Secret may reach the cluster after the object that names it.
        if failure and now - self._failed_since >= _GRACE_S:
            terminal.print_lines([f"the installation failed: {failure}"])
            return output.EXIT_INSTALL_FAILED
        self._print_text("; ".join(filter(None, (missing, failure))))
        return self._check_time()

    def _check_time(self) -> int | None:
        if self._timeout_s is None or self._clock.monotonic() - self._began < self._timeout_s:
            return None
        terminal.print_lines([f"not complete within {self._timeout_s:g} s: {self._shown}"])
        return output.EXIT_FAILED

    def _print_text(self, text: str) -> None:
        if text != self._shown:
            terminal.print_lines([text])
            self._shown = text

    def _print_progress(self, status: "InstallStatus") -> None:
        activity = f": {status.activity}" if status.activity else ""
        text = f"{status.title}{activity}" if status.title else str(status.phase)
        self._print_text(text)

    def _print_failure(self, status: "InstallStatus") -> int:
        if (failure := status.failure) is not None:
            lines = [f"the installation failed in step {failure.step}: {failure.reason}"]
            terminal.print_lines([*lines, *([f"  {failure.remedy}"] if failure.remedy else [])])
        return output.EXIT_INSTALL_FAILED
