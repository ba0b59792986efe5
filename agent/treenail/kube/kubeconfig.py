"""Where the API server is and who we are there: from a kubeconfig or a service account.

Nothing here connects. Certificates and tokens that are files stay paths, because kubelet
replaces them while we run; ``treenail.kube.credentials`` follows them.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from treenail.errors import UsageError

Locate = Callable[[str], Path]
"""From a path as the kubeconfig says it to where it is: the installed root may be elsewhere."""

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

# What would need a program, a password, or would change who we are: refused by name, since
# leaving any of them out would mean to act as somebody else.
_REFUSED = (
    "exec",
    "auth-provider",
    "username",
    "password",
    "as",
    "as-uid",
    "as-groups",
    "as-user-extra",
)


@dataclass(frozen=True, slots=True)
class Connection:
    """One API server and one identity. Paths are ``str``, what was inline is ``bytes``."""

    server: str
    ca: str | bytes = field(default=b"", repr=False)
    certificate: str | bytes = field(default=b"", repr=False)
    key: str | bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls_server_name: str = ""
    verify: bool = True
    namespace: str = "default"
    source: str = ""
    locate: Locate = field(default=Path, repr=False, compare=False)


def read_kubeconfig(path: str, *, context: str = "", locate: Locate = Path) -> Connection:
    """The connection of ``context`` (``current-context`` when empty).

    UsageError, in one sentence that names the file and the key, when it can't be used.
    """
    document = _Table(f"kubeconfig {path}", _parse(path, locate))
    name = context or document.text("current-context")
    if not name:
        raise document.fault("current-context", "is not set", "name a context")
    chosen = document.named("contexts", name, "context")
    cluster = document.named("clusters", chosen.needed("cluster"), "cluster")
    user = (
        document.named("users", chosen.text("user"), "user")
        if chosen.text("user")
        else _Table(chosen.where, {})
    )
    _refuse_unsupported(cluster, user)
    folder = path.rpartition("/")[0]
    connection = Connection(
        server=_server(cluster),
        ca=_pem(cluster, "certificate-authority", folder),
        certificate=_pem(user, "client-certificate", folder),
        key=_pem(user, "client-key", folder),
        token=_one_line(user, "token"),
        token_file=_beside(user.text("tokenFile"), folder),
        tls_server_name=cluster.text("tls-server-name"),
        verify=not cluster.flag("insecure-skip-tls-verify"),
        namespace=chosen.text("namespace") or "default",
        source=document.where,
        locate=locate,
    )
    if bool(connection.certificate) != bool(connection.key):
        found, missing = ("client-certificate", "client-key")
        if connection.key:
            found, missing = missing, found
        raise user.fault(missing, f"is missing although {found} is there", "give both or neither")
    if connection.ca and not connection.verify:
        raise cluster.fault(
            "insecure-skip-tls-verify",
            "contradicts certificate-authority",
            "remove insecure-skip-tls-verify",
        )
    return connection


def in_cluster(
    environment: Mapping[str, str], *, folder: str = SERVICE_ACCOUNT, locate: Locate = Path
) -> Connection:
    """The connection of the pod's own service account; UsageError outside of a pod."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "")
    if not (host and port):
        raise UsageError(
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: not in a pod",
            remedy="name a kubeconfig",
        )
    try:
        namespace = locate(f"{folder}/namespace").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"service account: {folder}/namespace can't be read: {_reason(error)}",
            remedy="run with automountServiceAccountToken, or name a kubeconfig",
        ) from error
    return Connection(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        ca=f"{folder}/ca.crt",
        token_file=f"{folder}/token",
        namespace=namespace,
        source="service account",
        locate=locate,
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """A mapping of the file and where it is, so that a fault can say so."""

    where: str
    values: Mapping[str, object] = field(repr=False)

    def fault(self, key: str, what: str, remedy: str) -> UsageError:
        return UsageError(f"{self.where}: {key} {what}", remedy=f"in {self.where}, {remedy}")

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.fault(key, f"is not text but {type(value).__name__}", f"make {key} text")
        return value

    def needed(self, key: str) -> str:
        value = self.text(key)
        if not value:
            raise self.fault(key, "is missing", f"set {key}")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key) or False
        if not isinstance(value, bool):
            raise self.fault(key, "is neither true nor false", f"make {key} true or false")
        return value

    def named(self, plural: str, name: str, key: str) -> "_Table":
        entries = self.values.get(plural) or []
        if not isinstance(entries, list):
            raise self.fault(plural, "is not a list", f"make {plural} a list")
        for entry in entries:
            if isinstance(entry, dict) and entry.get("name") == name:
                found = entry.get(key) or {}
                where = f"{self.where}: {plural}[{name}]"
                if not isinstance(found, dict):
                    raise UsageError(f"{where}.{key} is not a mapping")
                return _Table(where, found)
        names = sorted(str(e.get("name")) for e in entries if isinstance(e, dict))
        raise self.fault(
            plural, f"has no {name!r}, only: {', '.join(names) or 'nothing'}", "name one of those"
        )


def _parse(path: str, locate: Locate) -> Mapping[str, object]:
    try:
        text = locate(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"kubeconfig {path} can't be read: {_reason(error)}", remedy=f"provide {path}"
        ) from error
    document = _json(path, text) if text.lstrip().startswith("{") else _yaml(path, text)
    if not isinstance(document, dict):
        raise UsageError(f"kubeconfig {path} is not a mapping of keys to values")
    return document


def _json(path: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return _yaml(path, text)  # YAML's flow style begins with a brace too


def _yaml(path: str, text: str) -> object:
    import yaml  # noqa: PLC0415  a megabyte that a JSON kubeconfig or a service account saves

    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506  one of two safe loaders
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}" if mark else ""
        # Not chained: PyYAML quotes the line, which may be a key or a token.
        raise UsageError(f"kubeconfig {path} is neither JSON nor YAML{where}") from None
    except (yaml.YAMLError, ValueError):
        raise UsageError(f"kubeconfig {path} is neither JSON nor YAML") from None


def _refuse_unsupported(cluster: _Table, user: _Table) -> None:
    for key in _REFUSED:
        if user.values.get(key):
            raise user.fault(
                key, "is not supported", "use a client certificate, a token or a tokenFile"
            )
    if cluster.text("proxy-url"):
        raise cluster.fault("proxy-url", "is not supported", "name a server reached directly")


def _server(cluster: _Table) -> str:
    server = cluster.needed("server").rstrip("/")
    try:
        address = urlsplit(server)
        usable = address.scheme == "https" and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    else:
        usable = usable and not (address.username or address.query or address.fragment)
    if not usable:
        raise cluster.fault("server", "is no https:// address", "write https://HOST:PORT")
    return server


def _pem(table: _Table, key: str, folder: str) -> str | bytes:
    """``KEY-data`` decoded, else the path in ``KEY``, else empty; data wins, as in client-go."""
    encoded = table.text(f"{key}-data")
    if not encoded:
        return _beside(table.text(key), folder)
    try:
        decoded = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError):
        raise table.fault(f"{key}-data", "is not base64", "encode the PEM text") from None
    if b"-----BEGIN " not in decoded:
        raise table.fault(f"{key}-data", "holds no PEM block", "encode the PEM text")
    return decoded


def _beside(path: str, folder: str) -> str:
    return f"{folder}/{path}" if path and folder and not path.startswith("/") else path


def _one_line(table: _Table, key: str) -> str:
    token = table.text(key).strip()
    if not (token.isascii() and (token.isprintable())) or " " in token:
        raise table.fault(key, "is not one line of printable ASCII", f"correct {key}")
    return token


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "error") if isinstance(error, OSError) else "not UTF-8"
