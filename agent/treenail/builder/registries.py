"""Registries of a phase: the login of its Secret, its CAs, and its proxies."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from treenail import clocks, oci_content
from treenail.api import pullspec
from treenail.builder.build_spec import read_file
from treenail.config import image_mirrors, pullsecret
from treenail.registry import authorization, transport
from treenail.registry.client import RegistryClient
from treenail.registry.errors import NotFound, RegistryError, is_temporary
from treenail.registry.proxies import ProxySettings, read_proxy_settings

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """How a phase reaches registries."""

    secret: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret)
    tls: transport.TlsSettings = field(default_factory=transport.TlsSettings)
    proxies: ProxySettings | None = None
    limits: transport.RegistryLimits | None = None

    @classmethod
    def read(
        cls, secret: Path | None, ca: Path | bytes | None, environ: Mapping[str, str]
    ) -> "RegistrySettings":
        """Read the files; raise `FileError`, or `CredentialError` without content of the Secret.

        A Secret that does not exist means anonymous access. ``ca`` may be the content of the file.
        """
        logins = pullsecret.PullSecret()
        if secret is not None and (path := _find_secret(secret)) is not None:
            logins = pullsecret.parse_pull_secret(read_file(path), where=str(path))
        content = read_file(ca) if isinstance(ca, Path) else ca or b""
        ca_pem = content.decode("ascii", "replace")
        return cls(logins, transport.TlsSettings(ca_pem=ca_pem), read_proxy_settings(environ))

    def make_client(self, host: str, repository: str, clock: clocks.Clock) -> RegistryClient:
        """Make a client with the login for this repository; the caller closes it."""
        return RegistryClient(
            host,
            clock,
            login=authorization.select_login(self.secret.credentials, host, repository),
            tls=self.tls,
            proxies=self.proxies,
            limits=self.limits,
        )

    def open_client(
        self, host: str, repository: str, clock: clocks.Clock
    ) -> AbstractContextManager[RegistryClient]:
        """Make a client as `make_client` does, and close it at the end."""
        return closing(self.make_client(host, repository, clock))


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
        name = f"{pullspec.strip_tag(text)}@{text.partition('@')[2]}"
        spec = pullspec.parse_pull_spec(name, where="the image")
        return ImageName(spec.registry, spec.repository, spec.digest)
    tagged = text if ":" in text.rpartition("/")[2] else f"{text}:latest"
    pushed = pullspec.parse_push_spec(tagged, where="the image")
    return ImageName(pushed.registry, pushed.repository, pushed.tag)


def pull_from_places(
    image: ImageName, mirrors: image_mirrors.ImageMirrors, pull: Callable[[ImageName], T]
) -> T:
    """Return the result of the first place that has the image: its mirrors, then its source.

    When all fail, raise the most telling error, with those of the others in its message.
    """
    errors: list[RegistryError] = []
    names = mirrors.list_places(
        image.full_repository, is_digest=oci_content.is_digest(image.reference)
    )
    for name in names:
        registry, _, repository = name.partition("/")
        try:
            return pull(ImageName(registry, repository, image.reference))
        except RegistryError as error:
            if len(names) > 1:
                log.warning("cannot pull %s from %s: %s", image.full_repository, name, error)
            errors.append(error)
    if not errors:
        raise NotFound(
            f"cannot pull {image.full_repository}: its registry is blocked, and no mirror has "
            "images that are named like this",
            status=404,
        )
    # The error of the source, unless it is a mere outage, as where only a mirror is reachable.
    lasting = [error for error in reversed(errors) if not is_temporary(error)]
    chosen = next(iter(lasting), errors[-1])
    texts = [str(chosen), *(str(error) for error in errors if error is not chosen)]
    chosen.args = ("; also ".join(texts),)
    raise chosen


def _find_secret(path: Path) -> Path | None:
    """Return the file of a Secret: itself, or the key in a mounted directory."""
    # The kubelet mounts a Secret as a directory with one file for each key. The key depends on its
    # type: kubernetes.io/dockerconfigjson, or the older kubernetes.io/dockercfg.
    for candidate in (path / ".dockerconfigjson", path / ".dockercfg", path):
        if candidate.is_file():
            return candidate
    return None
