"""Labels of a built image: those of the Machine Config Operator, and treenail's own."""

from collections.abc import Mapping
from dataclasses import dataclass

MACHINE_CONFIG = "machineconfig"
POOL = "machineconfigpool"
BASE_IMAGE = "baseOSContainerImage"
RELEASE = "releaseversion"
CONTENT_KEY = "io.treenail.content-key"
BUILD = "io.treenail.machine-os-build"
CONFIG_LAYER = "io.treenail.config-layer"
"""The diff ID of the config layer: a later config replaces this layer."""


@dataclass(frozen=True, slots=True)
class ImageLabels:
    """The values of the labels; empty ones are left out."""

    machine_config: str
    pool: str
    base_image: str
    release: str = ""
    content_key: str = ""
    build: str = ""

    def to_map(self) -> dict[str, str]:
        """Return the labels by name."""
        labels = {
            MACHINE_CONFIG: self.machine_config,
            POOL: self.pool,
            BASE_IMAGE: self.base_image,
            RELEASE: self.release,
            CONTENT_KEY: self.content_key,
            BUILD: self.build,
        }
        return {name: text for name, text in labels.items() if text}


def merge_labels(base: Mapping[str, object], labels: Mapping[str, str]) -> dict[str, object]:
    """Return the labels of the base with these in place of those of the same name."""
    return dict(sorted({**base, **labels}.items()))
