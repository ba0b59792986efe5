"""Names of images: pull specs by digest, push specs by tag, and labels of bootable images.

An OS image is accepted by digest alone. Registry and repository of both have one grammar, so that
every repository that an image can be pushed to can also be pulled from.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from treenail.errors import ConfigError

BOOTABLE_LABELS = ("ostree.bootable", "containers.bootc")
"""The labels that ostree looks for before it deploys an image; one of them is enough."""


# Compiled at the first use (re keeps them): most commands read no pull spec.
_DIGEST = r"sha256:[a-f0-9]{64}"
_REGISTRY = r"(?=.{1,253}(:|$))[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?"
_COMPONENT = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_TRANSPORT = r".*://|ostree-|(containers-storage|docker-archive|docker-daemon|oci|oci-archive|dir):"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
LIMIT = 447
"""Maximum length in the CRD of the MachineOSConfig."""
_ANY_DIGEST = "sha256:" + 64 * "0"
_NAME_LIMIT = LIMIT - len("@") - len(_ANY_DIGEST)


@dataclass(frozen=True, slots=True)
class PullSpec:
    """An image by registry, repository and manifest digest."""

    registry: str
    repository: str
    digest: str

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}@{self.digest}"


def parse_pull_spec(text: str, *, where: str) -> PullSpec:
    """Parse ``text``; raise `ConfigError` that names ``where``.

    The grammar is that of github.com/distribution/reference without tags. A tag can move, so that
    two nodes would get different images.
    """
    name, at, digest = text.partition("@")
    if re.match(_TRANSPORT, text):
        raise _make_error(
            where, text, "it starts with a transport, and images come from a registry"
        )
    if not at:
        tagged = ":" in name.rpartition("/")[2]
        raise _make_error(where, text, "it names a tag" if tagged else "it has no digest")
    if not re.fullmatch(_DIGEST, digest):
        raise _make_error(where, text, "what follows the @ is not sha256: and 64 hex digits")
    registry, slash, repository = name.partition("/")
    if not slash or not re.fullmatch(_REGISTRY, registry):
        raise _make_error(where, text, "it does not start with a registry host and a /")
    if ":" in repository:
        raise _make_error(where, text, "it has a tag beside the digest")
    if not all(re.fullmatch(_COMPONENT, part) for part in repository.split("/")):
        raise _make_error(where, text, "its repository is not made of lower-case path components")
    if len(text) > LIMIT:
        raise _make_error(where, text[:60] + "…", f"it is longer than {LIMIT} characters")
    return PullSpec(registry, repository, digest)


def _make_error(where: str, text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where} is {text[:500]!r}, but {why}",
        remedy=f"set {where} to REGISTRY/REPOSITORY@sha256:DIGEST, for example "
        f"registry.example.com/os/node@sha256:{'0123456789abcdef' * 4}",
    )


@dataclass(frozen=True, slots=True)
class PushSpec:
    """An image by registry, repository and tag."""

    registry: str
    repository: str
    tag: str

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}:{self.tag}"

    def make_pull_spec(self, digest: str) -> str:
        """Return the pull spec of the image with this digest in the same repository."""
        return f"{self.registry}/{self.repository}@{digest}"


def parse_push_spec(text: str, *, where: str) -> PushSpec:
    """Parse ``REGISTRY/REPOSITORY:TAG``; raise `ConfigError` that names ``where``."""
    if len(text) > LIMIT:
        raise _make_push_error(where, text[:60] + "…", f"it is longer than {LIMIT} characters")
    if "@" in text:
        raise _make_push_error(where, text, "it names a digest, which exists only after the push")
    name, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        raise _make_push_error(where, text, "it has no tag")
    if not re.fullmatch(_TAG, tag):
        raise _make_push_error(
            where, text, "its tag is not made of 1 to 128 letters, digits, _, . and -"
        )
    if ":" in name.rpartition("/")[2] and "/" in name:
        raise _make_push_error(where, text, "it has more than one tag")
    if len(name) > _NAME_LIMIT:
        why = f"its repository is longer than {_NAME_LIMIT} characters, so no digest fits behind it"
        raise _make_push_error(where, text[:60] + "…", why)
    try:
        parsed = parse_pull_spec(f"{name}@{_ANY_DIGEST}", where=where)
    except ConfigError as error:
        why = str(error).partition(", but ")[2]
        raise _make_push_error(where, text, why) from error
    return PushSpec(parsed.registry, parsed.repository, tag)


def _make_push_error(where: str, text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where} is {text!r}, but {why}",
        remedy=f"set {where} to REGISTRY/REPOSITORY:TAG, for example "
        "registry.example.com/os/node:latest",
    )


def strip_tag(image: str) -> str:
    """Return registry and repository of an image, without its tag and its digest."""
    head, slash, last = image.partition("@")[0].rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"


def list_scopes(image: str) -> Iterator[str]:
    """Yield the scopes of containers-policy.json(5) for an image, the narrowest first."""
    yield image
    name = image.partition("@")[0]
    while "/" in name:
        yield name
        name = name.rpartition("/")[0]
    yield name
    domain = name.partition(":")[0]
    while "." in domain:
        domain = domain.partition(".")[2]
        yield f"*.{domain}"
    yield ""
