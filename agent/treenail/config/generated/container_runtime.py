"""CRI-O drop-ins and storage.conf of a pool, from a ContainerRuntimeConfig."""

from treenail.config.generated import sources


def check_runtime_config(source: sources.SourceObject) -> None:
    """Raise `ConfigError` with field, found, expected and remedy."""
    raise NotImplementedError


def generate_runtime_files(
    source: sources.SourceObject, base: sources.BaseFiles
) -> tuple[sources.GeneratedFile, ...]:
    """Return the files in the order of the MCO."""
    raise NotImplementedError
