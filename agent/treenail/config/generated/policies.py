"""Signature policies of all pools: policy.json, registries.d and the policies of namespaces."""

from collections.abc import Iterable

from treenail.config.generated import registries, sources


def check_policy(
    source: sources.SourceObject,
    others: Iterable[sources.SourceObject],
    facts: sources.ClusterFacts,
) -> None:
    """Raise `ConfigError` when no runtime can use the policy, or no node could update again."""
    raise NotImplementedError


def generate_policy_files(
    objects: Iterable[sources.SourceObject],
    base: sources.BaseFiles,
    facts: sources.ClusterFacts,
    known: Iterable[registries.Registry],
) -> tuple[sources.GeneratedFile, ...]:
    """Return the files in the order of the MCO; ``objects`` includes the image config."""
    raise NotImplementedError
