"""Mirrors of registries on a machine: ``/etc/containers/registries.conf.d``.

Only what an installation writes is read: a prefix of whole path components, and mirrors that may be
limited to digests (containers-registries.conf.d(5)).
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIRECTORY = "etc/containers/registries.conf.d"


@dataclass(frozen=True, slots=True)
class MirrorSource:
    """A place to pull an image from: a name without tag and digest, such as ``HOST/PATH``."""

    name: str

    @property
    def host(self) -> str:
        return self.name.partition("/")[0]

    @property
    def repository(self) -> str:
        return self.name.partition("/")[2]


def list_sources(root: Path, pull_spec: str) -> tuple[MirrorSource, ...]:
    """Return the places of an image in the order in which they are tried, its own name last."""
    name, at, _ = pull_spec.partition("@")
    if not at:
        head, slash, tail = name.rpartition("/")
        name = head + slash + tail.partition(":")[0]
    entry = _find_entry(root, name)
    places = [
        MirrorSource(each["location"] + name[len(entry["prefix"]) :])
        for each in entry.get("mirror", [])
        if at or each.get("pull-from-mirror", "all") != "digest-only"
    ]
    return (*places, MirrorSource(name))


def _find_entry(root: Path, name: str) -> dict[str, Any]:
    """Return the entry with the longest prefix of a name; empty without one."""
    found: dict[str, Any] = {}
    for path in sorted((root / _DIRECTORY).glob("*.conf")):
        for each in tomllib.loads(path.read_text("utf-8")).get("registry", []):
            prefix = each.get("prefix") or each["location"]
            is_covered = name == prefix or name.startswith(f"{prefix}/")
            if is_covered and len(prefix) >= len(found.get("prefix", "")):
                found = {**each, "prefix": prefix}
    return found
