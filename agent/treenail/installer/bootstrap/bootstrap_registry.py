"""The registry on the bootstrap host, which has the control plane's images until the hand-over.

Two processes on one storage directory: a read-only one that nodes reach, with the login for pulls,
and a writable one on loopback, with the login for pushes. The login for pushes never leaves this
host. htpasswd gives every login every permission, so each process has a file with its own login
alone. The state is below ``.treenail`` of the install directory and survives a restart: blobs,
certificate, logins and the CA.
"""

import contextlib
import ctypes
import errno
import json
import logging
import secrets
import shutil
import socket
import ssl
import string
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from treenail import clocks, errors
from treenail.api import decode
from treenail.controllers.runtime.http_server import parse_address
from treenail.installer.bootstrap import server_certificates
from treenail.installer.bootstrap.registry_process import (
    DEFAULT_IMAGE,
    DEFAULT_LIMIT,
    RegistryProcess,
    RegistryProcessConfig,
    RegistryProgram,
    check_room,
    check_storage,
    find_registry_program,
    format_config,
    make_cleanup,
    make_command,
    measure_storage,
)
from treenail.installer.directory import install_files
from treenail.registry.authorization import Login

log = logging.getLogger(__name__)

PUSHER, PULLER = "treenail-push", "treenail-pull"
_FIELDS = ("pushPassword", "pullPassword", "uploadKey")
_LIMIT = 4096  # bytes
_PASSWORD_BYTES = 32
_LIBRARIES = ("libcrypt.so.2", "libcrypt.so.1", None)
"""In Fedora, in Debian, and in C libraries that have crypt themselves."""
_SALT_DIGITS = f"./{string.ascii_letters}{string.digits}"
_LAST_DIGITS = ".Oeu"
_HASH_LENGTH = 60


@dataclass(frozen=True, slots=True)
class RegistryLogins:
    """Passwords of the two logins, and the key that signs the state of uploads."""

    push: Login
    pull: Login
    upload_key: str = field(repr=False)


def open_logins(files: install_files.InstallFiles, path: Path) -> RegistryLogins:
    """Read the logins of an earlier run, or create them; raise `FileError` or `ConfigError`.

    Nodes have the login for pulls, and an interrupted upload continues with the same key only.
    """
    content = files.read(path, limit=_LIMIT)
    if content is None:
        document = {name: secrets.token_urlsafe(_PASSWORD_BYTES) for name in _FIELDS}
        content = json.dumps(document).encode()
        files.write(path, content)
    fields = decode.Fields.from_json(decode.load_json(content, where=str(path)), str(path))
    decode.reject_unknown_fields(fields, _FIELDS)
    push, pull, upload_key = (fields.get_required_text(name) for name in _FIELDS)
    return RegistryLogins(Login(PUSHER, push), Login(PULLER, pull), upload_key)


def _compute_bcrypt(password: str) -> str:
    """Hash a password with the crypt(3) of this host; docker-registry reads bcrypt only."""
    # The lowest cost: docker-registry computes the hash for each request, and a random password
    # of 256 bits cannot be guessed.
    salt = "".join(secrets.choice(_SALT_DIGITS) for _ in range(21)) + secrets.choice(_LAST_DIGITS)
    for name in _LIBRARIES:
        try:
            crypt = ctypes.CDLL(name).crypt
        except (OSError, AttributeError):
            continue
        crypt.restype = ctypes.c_char_p
        crypt.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        # A failure is NULL, or a text that begins with an asterisk (crypt(3)).
        password_hash: bytes | None = crypt(password.encode(), f"$2b$04${salt}".encode())
        if (
            password_hash
            and password_hash.startswith(b"$2b$")
            and len(password_hash) == _HASH_LENGTH
        ):
            return password_hash.decode("ascii")
    raise errors.HostError(
        "cannot make the logins of the bootstrap registry: crypt(3) of this host has no bcrypt",
        remedy="run: apt-get install libcrypt1, or: dnf install libxcrypt; or set registry.type to "
        "External",
    )


DEFAULT_LISTEN = ":22625"
_LOOPBACK = "127.0.0.1"
_ADDRESS_LIMIT = 1024
_START_LIMIT_S = 60.0
"""podman may pull the image first."""
_POLL_S = 0.05
_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class BootstrapRegistrySettings:
    """Options of the registry."""

    host: str
    """Name or IP address by which nodes reach this host."""
    listen: str = DEFAULT_LISTEN
    """``HOST:PORT`` or ``:PORT``; port 0 chooses a free one, at the first start."""
    storage_limit: int = DEFAULT_LIMIT
    """Bytes."""
    ca_certificate: Path | None = None
    """CA of the installation; None creates one. Needs `ca_key`."""
    ca_key: Path | None = None
    image: str = DEFAULT_IMAGE
    """For podman, on a host without docker-registry."""


class BootstrapRegistry:
    """Runs the registry while entered. Entering raises `TreenailError`.

    A thread restarts a process that ended, and stops pushes while the storage is full.
    """

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        settings: BootstrapRegistrySettings,
        clock: clocks.Clock,
        *,
        files: install_files.InstallFiles | None = None,
    ) -> None:
        self._files = files or install_files.InstallFiles()
        self._root = directory.registry
        # `openshift-install gather` copies the install directory without what has this name.
        self._secrets = self._root / "secrets"
        self._address_file = directory.registry_address
        self._logs = {
            "pull": directory.registry_access_log,
            "push": directory.logs / "registry-push.log",
        }
        self._ca_files = server_certificates.CaFiles(directory.ca_certificate, directory.ca_key)
        if settings.ca_certificate is not None and settings.ca_key is not None:
            self._ca_files = server_certificates.CaFiles(
                settings.ca_certificate, settings.ca_key, is_own=False
            )
        self._settings = settings
        self._clock = clock
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._problem = ""
        self._thread: threading.Thread | None = None
        self._ca_pem: str
        self._logins: RegistryLogins
        self._ports: tuple[int, int] = (0, 0)
        self._processes: tuple[RegistryProcess, RegistryProcess]

    @property
    def storage(self) -> Path:
        """The directory with all blobs."""
        return self._root / "storage"

    @property
    def address(self) -> str:
        """``HOST:PORT`` that nodes pull from."""
        return f"{self._settings.host}:{self._ports[0]}"

    @property
    def push_address(self) -> str:
        """``HOST:PORT`` that only this host reaches, for pushes."""
        return f"{_LOOPBACK}:{self._ports[1]}"

    @property
    def ca_pem(self) -> str:
        """The CA that signed the certificate of both addresses."""
        return self._ca_pem

    @property
    def pull_login(self) -> Login:
        """The login for `address`, which nodes get."""
        return self._logins.pull

    @property
    def push_login(self) -> Login:
        """The login for `push_address`, which never leaves this host."""
        return self._logins.push

    @property
    def pids(self) -> tuple[int | None, int | None]:
        """Process IDs of the process for pulls and of that for pushes."""
        pull, push = self._processes
        return pull.pid, push.pid

    def record_address(self) -> None:
        """Record that machines get `address`; every later start must have the same one."""
        self._files.write(self._address_file, self.address.encode())

    def find_problem(self) -> str:
        """Return why the registry accepts no push; empty if it does."""
        return self._problem

    def check_room(self, image_bytes: int) -> None:
        """Raise `HostError` unless the storage limit permits an image of this size."""
        check_room(self._settings.storage_limit, image_bytes)

    def __enter__(self) -> Self:
        _check_host(self._settings.host)
        program = find_registry_program(shutil.which, self._settings.image)
        self._prepare_files(program)
        for process in self._processes:
            process.end_abandoned(self._clock)
        # After an earlier process has released its port.
        self._choose_ports()
        self._write_configs()
        check_storage(self.storage, self._settings.storage_limit)
        # A daemon: a signal may end the program before anything closes this registry. The kernel
        # then ends the processes with the thread.
        self._thread = threading.Thread(
            target=self._supervise_processes, name="bootstrap-registry", daemon=True
        )
        try:
            self._thread.start()
            self._ready.wait()
        except BaseException:
            self.__exit__()
            raise
        if self._failure is not None:
            self.__exit__()
            raise self._failure
        log.info("bootstrap registry listens on %s", self.address)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            # A thread whose start a signal interrupted cannot be joined; it sees the event.
            with contextlib.suppress(RuntimeError):
                thread.join()

    def sync_storage(self) -> None:
        """Flush what was pushed: the program flushes files, but not the names of blobs.

        Raises `FileError`.
        """
        self._files.sync_tree(self.storage)

    # Preparation

    def _prepare_files(self, program: RegistryProgram) -> None:
        self._ca_pem = server_certificates.prepare_server_certificate(
            self._files,
            self._ca_files,
            self._root / "server.crt",
            self._root / "server.key",
            [self._settings.host, "localhost", _LOOPBACK],
            self._clock.now(),
        ).ca_pem
        self._logins = open_logins(self._files, self._secrets / "logins.json")
        for name, login in (("pull", self._logins.pull), ("push", self._logins.push)):
            text = f"{login.user}:{_compute_bcrypt(login.password)}\n"
            self._files.write(self._secrets / f"{name}.htpasswd", text.encode())
        for path in (self.storage, *(log_file.parent for log_file in self._logs.values())):
            self._files.make_directory(path)
        self._processes = self._make_process(program, "pull"), self._make_process(program, "push")

    def _make_process(self, program: RegistryProgram, name: str) -> RegistryProcess:
        config_file = self._get_config_file(name)
        container = f"treenail-registry-{name}"
        command = make_command(program, config_file, directory=self._root, name=container)
        log_file = self._logs[name]
        return RegistryProcess(command, config_file, log_file, make_cleanup(program, container))

    def _choose_ports(self) -> None:
        host, port = parse_address(self._settings.listen)
        known = self._files.read(self._address_file, limit=_ADDRESS_LIMIT)
        if known is not None:
            port = self._check_address(known.decode("utf-8", "replace"), port)
        self._ports = _reserve_port(host, port), _reserve_port(_LOOPBACK, 0)

    def _check_address(self, known: str, port: int) -> int:
        """Return the port of an earlier start; raise `HostError` if machines need another address.

        Nodes look for their image at the address in their mirror file, and drop only that one.
        """
        known_host, _, known_port = known.rpartition(":")
        port = port or (int(known_port) if known_port.isdecimal() else 0)
        address = f"{self._settings.host}:{port}"
        if address == known:
            return port
        raise errors.HostError(
            f"cannot start the bootstrap registry at {address}: machines of this installation may "
            f"have {known}",
            remedy=f"start with --host {known_host} --registry-listen :{known_port}; or begin "
            f"again, and install these machines again: treenail-controller install reset --dir "
            f"{self._root.parent.parent}",
        )

    def _write_configs(self) -> None:
        host, _ = parse_address(self._settings.listen)
        for name, address, port in (
            ("pull", host, self._ports[0]),
            ("push", _LOOPBACK, self._ports[1]),
        ):
            config = RegistryProcessConfig(
                name=name,
                host=address,
                port=port,
                storage=self.storage,
                htpasswd=self._secrets / f"{name}.htpasswd",
                certificate=self._root / "server.crt",
                key=self._root / "server.key",
                upload_key=self._logins.upload_key,
                is_readonly=name == "pull",
            )
            self._files.write(self._get_config_file(name), format_config(config).encode())

    def _get_config_file(self, name: str) -> Path:
        return self._secrets / f"{name}.json"

    # Supervision

    def _supervise_processes(self) -> None:
        """Run both processes; the thread that starts them must live until they end."""
        try:
            self._start_processes()
            self._ready.set()
            self._watch_processes()
        except errors.TreenailError as error:
            self._failure = error
        finally:
            for process in self._processes:
                process.stop()
            self._ready.set()

    def _start_processes(self) -> None:
        for process in self._processes:
            process.start()
        end = self._clock.monotonic() + _START_LIMIT_S
        for process, address in zip(self._processes, self._list_targets(), strict=True):
            while not self._can_connect(address):
                if not process.is_running:
                    raise errors.HostError(
                        "cannot start the bootstrap registry: its process ended: "
                        f"{process.read_last_lines()[-500:] or 'it wrote no message'}"
                    )
                if self._clock.monotonic() > end:
                    raise errors.HostError(
                        f"cannot start the bootstrap registry: {address[0]}:{address[1]} does not "
                        f"answer within {_START_LIMIT_S:g} s"
                    )
                if self._stopping.wait(_POLL_S):
                    return

    def _list_targets(self) -> tuple[tuple[str, int], tuple[str, int]]:
        host, _ = parse_address(self._settings.listen)
        is_wildcard = host in {"", "0.0.0.0", "::"}  # noqa: S104 - it is compared
        return (_LOOPBACK if is_wildcard else host, self._ports[0]), (_LOOPBACK, self._ports[1])

    def _can_connect(self, address: tuple[str, int]) -> bool:
        context = ssl.create_default_context(cadata=self.ca_pem)
        try:
            with socket.create_connection(address, timeout=2.0) as plain:
                context.wrap_socket(plain, server_hostname=_LOOPBACK).close()
        except OSError:
            return False
        return True

    def _watch_processes(self) -> None:
        while not self._stopping.wait(_CHECK_S):
            self._check_space()
            pull, push = self._processes
            if self._problem:
                push.stop()
            for process in (pull, *(() if self._problem else (push,))):
                if not process.is_running:
                    log.warning("starting a process of the bootstrap registry again")
                    with contextlib.suppress(errors.HostError):
                        process.start()

    def _check_space(self) -> None:
        before = self._problem
        with contextlib.suppress(errors.HostError):
            use = measure_storage(self.storage, self._settings.storage_limit)
            self._problem = use.describe_problem()
        if self._problem and self._problem != before:
            log.error("bootstrap registry accepts no push: %s", self._problem)


def _check_host(host: str) -> None:
    """Raise `HostError` for an address by which nodes cannot name a registry."""
    if ":" in host:
        # "invalid reference format" of skopeo 1.9.3, for a mirror, too.
        raise errors.HostError(
            f"cannot start the bootstrap registry at {host}: programs of nodes accept no IPv6 "
            "address as the name of a registry",
            remedy="give this host a name that machines resolve, and begin with it: --host NAME "
            f"--host {host}",
        )


def _reserve_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0; raise `HostError` unless it can be bound."""
    is_wildcard = host in {"", "::"}
    has_both = is_wildcard and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both or ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family, dualstack_ipv6=has_both) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        shown = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise errors.HostError(
                f"cannot start the bootstrap registry: another program listens on {shown}",
                remedy=f"find it with: ss -ltnp 'sport = :{port}'; or choose another port with "
                "--registry-listen",
            ) from error
        raise errors.HostError(
            f"cannot start the bootstrap registry: cannot listen on {shown}: {error.strerror}",
            remedy="choose another address with --registry-listen",
        ) from error
