"""``treenail-controller install bootstrap``: install from an install directory on this host.

Each line of its log has the ID of the installation.
"""

import argparse
import logging
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from treenail import clocks, errors, memory, sanitize
from treenail.cli import argument_parser, output, terminal
from treenail.cli.controller.install.arguments import add_directory_argument
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.log import LineFormatter

if TYPE_CHECKING:
    from treenail.installer.bootstrap.bootstrap import BootstrapStage
    from treenail.installer.bootstrap.host_services import ConfigServerSettings
    from treenail.installer.bootstrap.image_steps import ImageStore
    from treenail.installer.directory.install_manifests import InstallManifests
    from treenail.kube.api_client import Client, Transport
    from treenail.sd_notify import SystemdNotifier


log = logging.getLogger(__name__)

_RELEASE_S = 10.0
"""Interval between releases of freed memory: a build of a config of 1 MB frees about 15 MB."""
_SIZE = re.compile(r"([1-9][0-9]{0,5})(Mi|Gi)")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}|[0-9A-Fa-f:.]{1,44})")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "bootstrap",
        help="render, build and serve on the bootstrap host, until the cluster takes over",
        description="Render the pools of an install directory, build the images of the control "
        "plane, serve configs and images to its machines, and hand them over to the new cluster. "
        "Continue where an earlier process stopped. Then serve configs until SIGTERM. Exit code "
        "5: the installation failed.",
        epilog=terminal.format_examples(
            (
                "install, and follow it",
                "treenail-controller install bootstrap --dir cluster --host bootstrap.example",
            ),
            (
                "install as a service",
                "systemctl start treenail-bootstrap",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    add_directory_argument(parser)
    _add_server_arguments(parser)
    _add_limit_arguments(parser)
    parser.add_argument(
        "--kubeconfig", metavar="FILE",
        help="publish to the cluster with this kubeconfig, as soon as it exists (default: "
        "DIR/auth/kubeconfig)",
    )  # fmt: skip
    parser.add_argument(
        "--control-plane-machines", dest="machines", metavar="N", type=argument_parser.parse_count,
        help="be complete when this many machines of the control plane have joined (default: the "
        "replicas in the install-config or in treenail-install.yaml, or else all that have joined "
        "by then)",
    )  # fmt: skip
    parser.add_argument(
        "--stop-when-complete", action="store_true",
        help="end when the installation is complete (default: serve configs until SIGTERM)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    parser.set_defaults(run=run_bootstrap)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", dest="hosts", metavar="HOST", action="append", type=parse_host,
        help="name or IP address by which machines reach this host; the first one is that of the "
        "registry, and no IPv6 address; repeatable (default: the name of this host)",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=":22623",
        help="serve configs at this address (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--registry-listen", metavar="HOST:PORT", default=":22625",
        help="serve the built images at this address, with TLS and a login that may only pull "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--registry-storage-limit", metavar="SIZE", type=parse_size, default=parse_size("10Gi"),
        help="let the images take at most this space, such as 500Mi or 20Gi (default: 10Gi)",
    )  # fmt: skip
    parser.add_argument(
        "--registry-image", metavar="IMAGE", default="docker.io/library/registry:2",
        help="run this image with podman where docker-registry and docker-distribution are not "
        "installed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--storage-driver", choices=("overlay", "vfs"), default="overlay",
        help="storage driver of builds; images of another driver than that of the cluster's "
        "builds are built again there (default: %(default)s)",
    )  # fmt: skip
    for name, text in (
        ("certificate", "certificate chain of the config server, PEM (default: one of the CA)"),
        ("key", "private key of --certificate, PEM"),
        (
            "ca-certificate",
            "CA that signs the certificates of this host, PEM (default: DIR/.treenail/ca.crt)",
        ),
        ("ca-key", "private key of --ca-certificate, PEM"),
    ):
        parser.add_argument(f"--{name}", metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--node-kubeconfig", metavar="FILE", type=Path,
        help="give machines this kubeconfig to join with (default: DIR/auth/kubeconfig-kubelet if "
        "it exists, or that of the rendered config)",
    )  # fmt: skip
    argument_parser.add_image_annotation_argument(parser)


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("build-timeout", "60m", "build of an image"),
        ("push-timeout", "30m", "push of an image"),
        ("first-boot-timeout", "30m", "wait for the API server of the first machine"),
        ("handover-deadline", "60m", "hand-over of the images to their final registry"),
    ):
        parser.add_argument(
            f"--{name}", metavar="TIME", type=argument_parser.parse_duration,
            default=argument_parser.parse_duration(default),
            help=f"time limit of the {text}, such as 45s, 30m or 1h30m (default: {default})",
        )  # fmt: skip


def parse_host(text: str) -> str:
    """Parse a DNS name or an IP address; raise `argparse.ArgumentTypeError`."""
    if not _HOST.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"expected a DNS name or an IP address, found {text!r:.80}"
        )
    return text


def parse_size(text: str) -> int:
    """Return the bytes of a size; raise `argparse.ArgumentTypeError`."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 20Gi, found {text!r:.40}")
    return int(match[1]) * 1024 ** (2 if match[2] == "Mi" else 3)


def run_bootstrap(arguments: argparse.Namespace) -> int:
    """Install; return 5 when the installation failed."""
    for one, other in (("certificate", "key"), ("ca_certificate", "ca_key")):
        if (getattr(arguments, one) is None) != (getattr(arguments, other) is None):
            names = f"--{one.replace('_', '-')} and --{other.replace('_', '-')}"
            raise errors.UsageError(f"expected both {names}, or neither")
    from treenail.installer.directory.install_files import require_directory
    from treenail.installer.directory.install_state import InstallLockedError

    require_directory(arguments.directory, "install from")

    process = BootstrapProcess(arguments)
    process.require_prepared()
    try:
        return process.run()
    except InstallLockedError as error:
        # The installation of the other process has not failed.
        raise errors.UsageError(str(error), remedy=error.remedy) from error
    except errors.TreenailError as error:
        terminal.print_error(arguments.program, error, error.remedy)
        return output.EXIT_INSTALL_FAILED


class BootstrapProcess:
    """The process of the stage."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from treenail.installer.directory.install_files import InstallDirectory, InstallFiles

        self._arguments = arguments
        self._directory = InstallDirectory(arguments.directory.resolve())
        self._files = InstallFiles()
        self._clock = clocks.SystemClock()
        self._has_dead_thread = False
        self._kubeconfig = arguments.kubeconfig or str(self._directory.kubeconfig)

    def require_prepared(self) -> None:
        """Raise `UsageError` for a directory from which no installation can begin."""
        from treenail.installer.directory.prepared_manifests import require_prepared

        require_prepared(self._directory)

    def run(self) -> int:
        """Run until the end or a signal; raise `TreenailError`."""
        from treenail.installer.bootstrap.host_services import StopRequested
        from treenail.installer.directory.install_state import hold_install_lock
        from treenail.memory import limit_allocator
        from treenail.sd_notify import SystemdNotifier

        limit_allocator()
        notifier = SystemdNotifier(os.environ)
        with hold_install_lock(self._directory, self._files):
            level = logging.DEBUG if self._arguments.verbose else logging.INFO
            journal = BootstrapLog(self._directory, self._files, level, os.environ)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, _request_stop)
            ended = threading.Event()
            threading.Thread(target=_release_memory, args=(ended,), daemon=True).start()
            threading.excepthook = self._handle_thread_death
            try:
                self._make_stage(notifier, journal).run(
                    should_stop=self._arguments.stop_when_complete
                )
            except errors.TreenailError as error:
                log.critical("the installation failed: %s", error)
                raise
            except StopRequested as stop:
                log.info("stopped by a signal; the next start continues")
                if self._has_dead_thread:
                    return output.EXIT_FAILED
                return output.EXIT_INTERRUPTED if stop.args == (signal.SIGINT,) else 0
            finally:
                ended.set()
                notifier.notify_stopping()
        return 0

    def _handle_thread_death(self, death: threading.ExceptHookArgs) -> None:
        # Without its thread the server or the registry would serve nothing until a restart.
        name = death.thread.name if death.thread else "a thread"
        log.critical("thread %s died", name, exc_info=death.exc_value)
        self._has_dead_thread = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _make_stage(self, notifier: "SystemdNotifier", journal: "BootstrapLog") -> "BootstrapStage":
        from treenail.api import annotations as key
        from treenail.installer.bootstrap.bootstrap import BootstrapSettings, BootstrapStage
        from treenail.installer.bootstrap.host_services import HostAdapters, HostServices

        arguments = self._arguments
        adapters = HostAdapters(
            notifier,
            ClusterConnection(self._kubeconfig).connect,
            journal.begin_installation,
            self._open_images,
        )
        services = HostServices(
            self._directory,
            self._make_server_settings(),
            self._kubeconfig,
            adapters,
            self._files,
            self._clock,
        )
        settings = BootstrapSettings(
            arguments.build_timeout,
            arguments.push_timeout,
            arguments.first_boot_timeout,
            arguments.handover_deadline,
            key.PREFIX + arguments.image_annotation,
            arguments.machines,
        )
        return BootstrapStage(self._directory, settings, services, self._files, self._clock)

    def _open_images(self, manifests: "InstallManifests") -> "AbstractContextManager[ImageStore]":
        if not manifests.image_configs:
            # The modules of builds and of the registry need 10 MB.
            from treenail.installer.bootstrap.image_steps import StockImages

            return StockImages()
        from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistrySettings
        from treenail.installer.bootstrap.install_images import ImageSettings, InstallImages
        from treenail.installer.images.build_attempt import PoolBuildSettings

        arguments = self._arguments
        registry = BootstrapRegistrySettings(
            host=self._hosts[0],
            listen=arguments.registry_listen,
            storage_limit=arguments.registry_storage_limit,
            ca_certificate=arguments.ca_certificate,
            ca_key=arguments.ca_key,
            image=arguments.registry_image,
        )
        build = PoolBuildSettings(
            arguments.build_timeout, arguments.push_timeout, driver=arguments.storage_driver
        )
        return InstallImages(
            self._directory, manifests, ImageSettings(registry, build), self._files, self._clock
        )

    @property
    def _hosts(self) -> tuple[str, ...]:
        return tuple(self._arguments.hosts or (platform.node(),))

    def _make_server_settings(self) -> "ConfigServerSettings":
        from treenail.installer.bootstrap.host_services import ConfigServerSettings

        arguments = self._arguments
        node_kubeconfig = self._directory.root / "auth" / "kubeconfig-kubelet"
        return ConfigServerSettings(
            hosts=self._hosts,
            listen=arguments.listen,
            certificate=arguments.certificate,
            key=arguments.key,
            ca_certificate=arguments.ca_certificate,
            ca_key=arguments.ca_key,
            node_kubeconfig=arguments.node_kubeconfig
            or (None if self._files.read(node_kubeconfig) is None else node_kubeconfig),
        )


class ClusterConnection:
    """Connects to the cluster with a kubeconfig that may appear and change later."""

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._signature: tuple[int, int, int] | None = None
        self._transport: Transport | None = None

    def connect(self) -> "Client":
        """Return a client; raise `UsageError` while the kubeconfig cannot be used."""
        from treenail.cli.controller.connect import create_transport
        from treenail.kube.api_client import Client

        signature = self._sign_file()
        if self._transport is None or signature != self._signature:
            if self._transport is not None:
                self._transport.close()
                self._transport = None
            self._transport = create_transport([self._kubeconfig], "", clocks.SystemClock())
            self._signature = signature
        return Client(self._transport, field_manager="treenail-install-bootstrap")

    def _sign_file(self) -> tuple[int, int, int]:
        try:
            status = Path(self._kubeconfig).stat()
        except OSError as error:
            raise errors.UsageError(
                f"cannot read {self._kubeconfig}: {error.strerror}",
                remedy="name the kubeconfig of the new cluster: --kubeconfig FILE",
            ) from error
        return status.st_ino, status.st_size, status.st_mtime_ns


def _request_stop(number: int, _: object) -> NoReturn:
    from treenail.installer.bootstrap.host_services import StopRequested

    # The end must not be interrupted.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, signal.SIG_IGN)
    raise StopRequested(signal.Signals(number))


def _release_memory(ended: threading.Event) -> None:
    from treenail.memory import release_freed_memory

    while not ended.wait(_RELEASE_S):
        release_freed_memory()


_SIZE_LIMIT = 16 * memory.MIB
_PRIORITIES = ((50, 2), (40, 3), (30, 4), (20, 6))
"""Of syslog, by the lowest level of logging."""
_REQUESTS = "treenail.provisioning"


class BootstrapLog:
    """Logs to the standard error, and to files that a log bundle contains.

    ``config-server.log`` has the requests of machines alone, ``bootstrap.log`` everything.
    """

    def __init__(
        self,
        directory: InstallDirectory,
        files: InstallFiles,
        level: int,
        environ: Mapping[str, str],
    ) -> None:
        """Begin to log; raise `FileError` when the directory of the logs cannot be made."""
        files.make_directory(directory.logs)
        self._install_id = ""
        stream = logging.StreamHandler(sys.stderr)
        # systemd sets it for a standard error that leads to the journal (systemd.exec(5)).
        is_journal = "JOURNAL_STREAM" in environ
        stream.setFormatter(_JournalFormatter(self) if is_journal else _InstallFormatter(self))
        root = logging.getLogger()
        root.addHandler(stream)
        root.setLevel(level)
        for chatty in ("urllib3", "kubernetes"):
            logging.getLogger(chatty).setLevel(max(level, logging.INFO))
        for name, logger in (("bootstrap.log", ""), ("config-server.log", _REQUESTS)):
            handler = _LogFile(
                directory.logs / name, maxBytes=_SIZE_LIMIT, backupCount=1, delay=True
            )
            handler.setFormatter(_InstallFormatter(self))
            logging.getLogger(logger).addHandler(handler)

    @property
    def install_id(self) -> str:
        """The ID; empty before `begin_installation`."""
        return self._install_id

    def begin_installation(self, install_id: str) -> None:
        """Add the ID to each line from now on."""
        self._install_id = install_id


class _LogFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # of logging
        """Do nothing: on a full disk the standard error still has the line."""


class _InstallFormatter(LineFormatter):
    """A line with time, level and ID."""

    def __init__(self, journal: BootstrapLog) -> None:
        super().__init__()
        self._journal = journal

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of logging
        line = super().formatMessage(record)
        return f"{self._journal.install_id} {line}" if self._journal.install_id else line


class _JournalFormatter(logging.Formatter):
    """A line with its priority (sd-daemon(3)) and the ID; the journal adds the time."""

    def __init__(self, journal: BootstrapLog) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        priorities = (priority for level, priority in _PRIORITIES if record.levelno >= level)
        install_id = self._journal.install_id
        begin = f"<{next(priorities, 7)}>{install_id + ' ' if install_id else ''}"
        return "\n".join(
            begin + sanitize.escape_line(line) for line in super().format(record).splitlines()
        )
