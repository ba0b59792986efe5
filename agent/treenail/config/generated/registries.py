"""registries.conf of all pools, from mirror sets and the image config of the cluster."""

from collections.abc import Iterable
from dataclasses import dataclass

from treenail.config.generated import sources


@dataclass(frozen=True, slots=True)
class Registry:
    """One ``[[registry]]`` of registries.conf (containers-registries.conf(5))."""

    prefix: str
    location: str
    is_insecure: bool = False
    is_blocked: bool = False
    mirrors: tuple[tuple[str, str], ...] = ()
    """Location and pull-from-mirror of each mirror, in order."""


def check_registries(source: sources.SourceObject, others: Iterable[sources.SourceObject]) -> None:
    """Raise `ConfigError` when the mirror set or image config is wrong or contradicts another."""
    raise NotImplementedError


def list_registries(objects: Iterable[sources.SourceObject], base: str) -> tuple[Registry, ...]:
    """Return the registries, sorted as in the file; ``base`` is registries.conf of the base."""
    raise NotImplementedError


def generate_registry_files(
    objects: Iterable[sources.SourceObject], base: sources.BaseFiles, facts: sources.ClusterFacts
) -> tuple[sources.GeneratedFile, ...]:
    """Return registries.conf, and the drop-in with search registries; empty without a change."""
    raise NotImplementedError
