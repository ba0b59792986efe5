"""Registries of a phase: the login of its Secret, its CAs and the proxies of its environment."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from treenail.api.pullspec import parse_pull_spec
from treenail.clock import Clock
from treenail.config.pullsecret import PullSecret, parse_pull_secret
from treenail.errors import FileError
from treenail.image.push_spec import parse_push_spec
from treenail.registry.client import RegistryClient
from treenail.registry.logins import select_login
from treenail.registry.proxies import ProxySettings, read_proxy_settings
from treenail.registry.transport import RegistryLimits, TlsSettings

_LIMIT = 1024 * 1024  # bytes of a Secret's key or of a CA bundle


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How a phase reaches registries."""

    secret: PullSecret = field(default_factory=PullSecret)
    tls: TlsSettings = field(default_factory=TlsSettings)
    proxies: ProxySettings = field(default_factory=ProxySettings)
    limits: RegistryLimits | None = None

    @classmethod
    def read(
        cls, secret: Path | None, ca: Path | None, environ: Mapping[str, str]
    ) -> "RegistrySettings":
        """Read the files; raise `FileError`, or `CredentialError` without content of the Secret.

        A Secret that does not exist means anonymous access.
        """
        found = PullSecret()
        if secret is not None and (path := _find_secret(secret)) is not None:
            found = parse_pull_secret(_read_file(path), where=str(path))
        ca_pem = _read_file(ca).decode("ascii", "replace") if ca is not None else ""
        return cls(found, TlsSettings(ca_pem=ca_pem), read_proxy_settings(environ))

    @contextmanager
    def open_client(self, host: str, repository: str, clock: Clock) -> Iterator[RegistryClient]:
        """Open a client with the login for this repository."""
        client = RegistryClient(
            host,
            clock,
            login=select_login(self.secret.credentials, host, repository),
            tls=self.tls,
            proxies=self.proxies,
            limits=self.limits,
        )
        try:
            yield client
        finally:
            client.close()


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image in a registry by tag or digest."""

    registry: str
    repository: str
    reference: str

    @property
    def full_repository(self) -> str:
        return f"{self.registry}/{self.repository}"


def parse_image_name(text: str) -> ImageName:
    """Parse an image name of a Containerfile; raise `ConfigError`."""
    if "@" in text:
        # A tag beside the digest has no effect.
        name, _, digest = text.partition("@")
        head, slash, last = name.rpartition("/")
        spec = parse_pull_spec(f"{head}{slash}{last.partition(':')[0]}@{digest}", where="the image")
        return ImageName(spec.registry, spec.repository, spec.digest)
    tagged = text if ":" in text.rpartition("/")[2] else f"{text}:latest"
    pushed = parse_push_spec(tagged, where="the image")
    return ImageName(pushed.registry, pushed.repository, pushed.tag)


def _find_secret(path: Path) -> Path | None:
    """Return the file of a Secret: itself, or the key in a mounted directory."""
    for each in (path / ".dockerconfigjson", path / ".dockercfg", path):
        if each.is_file():
            return each
    return None


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_LIMIT + 1)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > _LIMIT:
        raise FileError(f"cannot read {path}: it is longer than {_LIMIT} bytes")
    return content
