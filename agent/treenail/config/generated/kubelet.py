"""Kubelet configuration of a pool, from a KubeletConfig over the kubelet.conf of its base."""

from treenail.config.generated import sources


def check_kubelet_config(source: sources.SourceObject, *, is_control_plane: bool) -> None:
    """Raise `ConfigError` with field, found, expected and remedy when no kubelet can use it."""
    raise NotImplementedError


def generate_kubelet_files(
    source: sources.SourceObject, base: str | None, facts: sources.ClusterFacts
) -> tuple[sources.GeneratedFile, ...]:
    """Return the files in the order of the MCO. ``base`` is kubelet.conf; None without one."""
    raise NotImplementedError
