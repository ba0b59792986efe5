"""Read the API server and the identity from a kubeconfig or a service account.

Nothing here connects. Certificates and tokens in files stay paths, because the kubelet replaces the
files at run time; ``treenail.kube.transport.credentials`` reloads them.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from treenail.errors import ConfigError, UsageError

LocatePath = Callable[[str], Path]
"""Maps a path of the kubeconfig to a path on this machine, which may have another root."""

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

# Keys that need a program or a password, or change the identity. Ignoring one would mean to act as
# another user, so each is rejected by name.
_UNSUPPORTED_KEYS = (
    "exec",
    "auth-provider",
    "username",
    "password",
    "as",
    "as-uid",
    "as-groups",
    "as-user-extra",
)
_LINE = re.compile(r", line (\d+)")
_REMEDY = "check it with: kubectl config view --kubeconfig FILE"


class UnsupportedKubeconfigError(UsageError):
    """A kubeconfig with credentials that only the package ``kubernetes`` supports."""


@dataclass(frozen=True, slots=True)
class ApiServerConfig:
    """One API server and one identity. Paths are ``str``, inline data is ``bytes``."""

    server: str
    ca: str | bytes = field(default=b"", repr=False)
    certificate: str | bytes = field(default=b"", repr=False)
    key: str | bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls_server_name: str = ""
    should_verify_tls: bool = True
    namespace: str = "default"
    source: str = ""
    locate: LocatePath = field(default=Path, repr=False, compare=False)


def read_kubeconfig(path: str, *, context: str = "", locate: LocatePath = Path) -> ApiServerConfig:
    """Read ``context`` of one file, see `read_kubeconfigs`."""
    return read_kubeconfigs([path], context=context, locate=locate)


def read_kubeconfigs(
    paths: Sequence[str], *, context: str = "", locate: LocatePath = Path
) -> ApiServerConfig:
    """Read ``context``, or the first ``current-context`` when it is empty.

    As kubectl does, take each named entry whole from the first file that has it, and resolve its
    paths beside that file. Raises UsageError in one sentence that names the file and the key.
    """
    return _read_context(_MergedKubeconfig.load(paths, locate), context, locate)


def read_kubeconfig_text(text: str, where: str) -> ApiServerConfig:
    """Read the current context of a kubeconfig from a Secret; it may name no file.

    ``where`` names the Secret in errors. Raises UsageError.
    """
    file = _KubeconfigSection(where, _parse_document(where, text))
    config = _read_context(_MergedKubeconfig(where, (file,)), "", Path)
    for key, value in (
        ("certificate-authority", config.ca),
        ("client-certificate", config.certificate),
        ("client-key", config.key),
        ("tokenFile", config.token_file),
    ):
        # Its author could have this process send any file of this machine to a server.
        if value and isinstance(value, str):
            raise file.make_error(key, "names a file", "put the contents into the kubeconfig")
    return config


def _read_context(merged: "_MergedKubeconfig", context: str, locate: LocatePath) -> ApiServerConfig:
    chosen = merged.find_entry("contexts", context or merged.find_current_context(), "context")
    cluster = merged.find_entry("clusters", chosen.get_required_text("cluster"), "cluster")
    user = (
        merged.find_entry("users", chosen.get_text("user"), "user")
        if chosen.get_text("user")
        else _KubeconfigSection(chosen.where, {})
    )
    _refuse_unsupported(cluster, user)
    config = ApiServerConfig(
        server=_parse_server(cluster),
        ca=_parse_pem(cluster, "certificate-authority"),
        certificate=_parse_pem(user, "client-certificate"),
        key=_parse_pem(user, "client-key"),
        token=_parse_token(user, "token"),
        token_file=_resolve_path(user.get_text("tokenFile"), user.folder),
        tls_server_name=_parse_server_name(cluster),
        should_verify_tls=not cluster.get_bool("insecure-skip-tls-verify"),
        namespace=chosen.get_text("namespace") or "default",
        source=merged.where,
        locate=locate,
    )
    if bool(config.certificate) != bool(config.key):
        present, missing = ("client-certificate", "client-key")
        if config.key:
            present, missing = missing, present
        raise user.make_error(
            missing, f"is missing although {present} is there", "give both or neither"
        )
    if config.ca and not config.should_verify_tls:
        raise cluster.make_error(
            "insecure-skip-tls-verify",
            "contradicts certificate-authority",
            "remove insecure-skip-tls-verify",
        )
    return config


def find_current_context(paths: Sequence[str], *, locate: LocatePath = Path) -> str:
    """Return the first ``current-context`` of these files; raise `UsageError` without one."""
    return _MergedKubeconfig.load(paths, locate).find_current_context()


def read_service_account(
    environment: Mapping[str, str], *, folder: str = SERVICE_ACCOUNT, locate: LocatePath = Path
) -> ApiServerConfig:
    """Read the service account of this pod; raise UsageError outside a pod."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "")
    if not (host and port):
        raise UsageError(
            "cannot use the service account: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT "
            "are not set, so this is not a pod",
            remedy="pass --kubeconfig FILE",
        )
    try:
        namespace = locate(f"{folder}/namespace").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {folder}/namespace of the service account: {_describe_error(error)}",
            remedy="set automountServiceAccountToken: true, or pass --kubeconfig FILE",
        ) from error
    return ApiServerConfig(
        # The kubelet sets a bare address, also of IPv6.
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        ca=f"{folder}/ca.crt",
        token_file=f"{folder}/token",
        namespace=namespace,
        source="service account",
        locate=locate,
    )


@dataclass(frozen=True, slots=True)
class _KubeconfigSection:
    """A mapping of the file and its location, for error messages."""

    where: str
    values: Mapping[str, object] = field(repr=False)
    folder: str = ""
    """Directory of the file, to which its paths are relative."""

    def make_error(self, key: str, problem: str, remedy: str) -> UsageError:
        return UsageError(f"{self.where}: {key} {problem}", remedy=f"in {self.where}, {remedy}")

    def get_text(self, key: str) -> str:
        value = self.values.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.make_error(
                key, f"is not text but {type(value).__name__}", f"write {key} as text"
            )
        return value

    def get_required_text(self, key: str) -> str:
        value = self.get_text(key)
        if not value:
            raise self.make_error(key, "is missing", f"set {key}")
        return value

    def get_bool(self, key: str) -> bool:
        value = self.values.get(key) or False
        if not isinstance(value, bool):
            raise self.make_error(key, "is neither true nor false", f"set {key} to true or false")
        return value

    def list_entries(self, plural: str) -> list[Mapping[str, object]]:
        entries = self.values.get(plural) or []
        if not isinstance(entries, list):
            raise self.make_error(plural, "is not a list", f"write {plural} as a list")
        return [entry for entry in entries if isinstance(entry, dict)]


@dataclass(frozen=True, slots=True)
class _MergedKubeconfig:
    """The files of a list, in the order of the list."""

    where: str
    files: tuple[_KubeconfigSection, ...]

    @classmethod
    def load(cls, paths: Sequence[str], locate: LocatePath) -> Self:
        files = tuple(
            _KubeconfigSection(
                f"kubeconfig {path}", _load_document(path, locate), str(Path(path).parent)
            )
            for path in paths
        )
        return cls(f"kubeconfig {':'.join(paths)}", files)

    def find_current_context(self) -> str:
        for file in self.files:
            if name := file.get_text("current-context"):
                return name
        names = self._list_names("contexts")
        raise UsageError(
            f"{self.where}: current-context is not set, contexts: {names}",
            remedy="pass --context NAME, or run: kubectl config use-context NAME",
        )

    def find_entry(self, plural: str, name: str, key: str) -> _KubeconfigSection:
        for file in self.files:
            for entry in file.list_entries(plural):
                if entry.get("name") == name:
                    values = entry.get(key) or {}
                    where = f"{file.where}: {plural}[{name}]"
                    if not isinstance(values, dict):
                        raise UsageError(f"{where}.{key} is not a mapping", remedy=_REMEDY)
                    return _KubeconfigSection(where, values, file.folder)
        raise UsageError(
            f"{self.where}: {plural} has no {name!r}, only: {self._list_names(plural)}",
            remedy=f"in {self.where}, use one of these names",
        )

    def _list_names(self, plural: str) -> str:
        names = {
            str(entry.get("name")) for file in self.files for entry in file.list_entries(plural)
        }
        return ", ".join(sorted(names)) or "nothing"


def _load_document(path: str, locate: LocatePath) -> Mapping[str, object]:
    try:
        text = locate(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            f"cannot read kubeconfig {path}: {_describe_error(error)}",
            remedy=f"create {path}, or name another kubeconfig",
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read kubeconfig {path}: {_describe_error(error)}",
            remedy="name a readable kubeconfig",
        ) from error
    return _parse_document(f"kubeconfig {path}", text)


def _parse_document(where: str, text: str) -> Mapping[str, object]:
    document = (
        _parse_json(where, text) if text.lstrip().startswith("{") else _parse_yaml(where, text)
    )
    if document is None:
        # kubectl accepts an empty file, which "kubectl config" fills.
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{where} is not a mapping of keys to values", remedy=_REMEDY)
    return document


def _parse_json(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply", remedy=_REMEDY) from None
    except ValueError:
        # A YAML mapping in flow style starts with a brace too.
        return _parse_yaml(where, text)


def _parse_yaml(where: str, text: str) -> object:
    from treenail.encoding import yaml11  # noqa: PLC0415  saves 1 MiB of memory with a JSON kubeconfig

    try:
        return next(iter(yaml11.parse_yaml(text, where=where)), None)
    except ConfigError as error:
        if "nested" in str(error):
            raise UsageError(f"{where} is nested too deeply", remedy=_REMEDY) from None
        line = _LINE.search(str(error))
        place = f" at line {line[1]}" if line else ""
        # Not chained: the error may quote a key or a token.
        raise UsageError(f"{where} is neither JSON nor YAML{place}", remedy=_REMEDY) from None


def _refuse_unsupported(cluster: _KubeconfigSection, user: _KubeconfigSection) -> None:
    for key in _UNSUPPORTED_KEYS:
        if user.values.get(key):
            error = user.make_error(
                key, "is not supported", "use a client certificate, a token or a tokenFile"
            )
            raise UnsupportedKubeconfigError(str(error), remedy=error.remedy)
    if cluster.get_text("proxy-url"):
        error = cluster.make_error("proxy-url", "is not supported", "name a server without a proxy")
        raise UnsupportedKubeconfigError(str(error), remedy=error.remedy)


def _parse_server(cluster: _KubeconfigSection) -> str:
    server = cluster.get_required_text("server").rstrip("/")
    try:
        address = urlsplit(server)
        usable = address.scheme == "https" and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    else:
        usable = usable and not (address.username or address.query or address.fragment)
        usable = usable and _is_plain(server) and _is_host(address.hostname or "")
    if not usable:
        raise cluster.make_error("server", "is not an https:// address", "write https://HOST:PORT")
    return server


def _parse_server_name(cluster: _KubeconfigSection) -> str:
    name = cluster.get_text("tls-server-name")
    if name and not (_is_plain(name) and _is_host(name)):
        raise cluster.make_error(
            "tls-server-name", "is not a host name", "write a name of the server's certificate"
        )
    return name


def _is_plain(text: str) -> bool:
    """Return whether the text can be sent in the head of a request."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_host(host: str) -> bool:
    """Return False for a host that `socket` and `ssl` reject with UnicodeError."""
    try:
        # An empty label (a..b), or one of more than 63 characters.
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _parse_pem(table: _KubeconfigSection, key: str) -> str | bytes:
    """Return ``KEY-data`` decoded, else the path in ``KEY``; as in client-go, data wins."""
    encoded = table.get_text(f"{key}-data")
    if not encoded:
        return _resolve_path(table.get_text(key), table.folder)
    try:
        # base64(1) wraps its output after 76 characters.
        decoded = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError):
        raise table.make_error(
            f"{key}-data", "is not base64", "encode the PEM text in base64"
        ) from None
    if b"-----BEGIN " not in decoded:
        raise table.make_error(
            f"{key}-data", "contains no PEM block", "encode the PEM text in base64"
        )
    return decoded


def _resolve_path(path: str, folder: str) -> str:
    return str(Path(folder) / path) if path else ""


def _parse_token(table: _KubeconfigSection, key: str) -> str:
    token = table.get_text(key).strip()
    if not (token.isascii() and (token.isprintable())) or " " in token:
        raise table.make_error(
            key, "is not one line of printable ASCII", f"write {key} as one line"
        )
    return token


def _describe_error(error: OSError | ValueError) -> str:
    match error:
        case OSError():
            return error.strerror or "error"
        case UnicodeDecodeError():
            return "not UTF-8"
        case _:  # a NUL character in the path
            return str(error)
