"""Push specs: the repository and the tag that an image is pushed to.

Registry and repository have the grammar of `treenail.api.pullspec`, so that every repository that
an image can be pushed to can also be pulled from by digest.
"""

import re
from dataclasses import dataclass

from treenail.api import pullspec
from treenail.errors import ConfigError

LIMIT = 447
"""Maximum length in the CRD of the MachineOSConfig."""

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ANY_DIGEST = "sha256:" + 64 * "0"
_NAME_LIMIT = LIMIT - len("@") - len(_ANY_DIGEST)
_EXAMPLE = "registry.example.com/os/node:latest"


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
        raise _make_error(where, text[:60] + "…", f"it is longer than {LIMIT} characters")
    if "@" in text:
        raise _make_error(where, text, "it names a digest, which exists only after the push")
    name, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        raise _make_error(where, text, "it has no tag")
    if not _TAG.fullmatch(tag):
        raise _make_error(
            where, text, "its tag is not made of 1 to 128 letters, digits, _, . and -"
        )
    if ":" in name.rpartition("/")[2] and "/" in name:
        raise _make_error(where, text, "it has more than one tag")
    if len(name) > _NAME_LIMIT:
        why = f"its repository is longer than {_NAME_LIMIT} characters, so no digest fits behind it"
        raise _make_error(where, text[:60] + "…", why)
    try:
        parsed = pullspec.parse_pull_spec(f"{name}@{_ANY_DIGEST}", where=where)
    except ConfigError as error:
        why = str(error).partition(", but ")[2]
        raise _make_error(where, text, why) from error
    return PushSpec(parsed.registry, parsed.repository, tag)


def _make_error(where: str, text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where} is {text!r}, but {why}",
        remedy=f"set {where} to REGISTRY/REPOSITORY:TAG, for example {_EXAMPLE}",
    )
