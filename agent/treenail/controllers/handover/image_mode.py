"""Settings of an installation in image mode. Pure.

The user writes them into the field ``imageMode`` of the install configuration. The stage
``prepare`` copies them into a ConfigMap among the manifests, because other installers carry only
manifests to the bootstrap host and into the cluster.
"""

from dataclasses import dataclass
from enum import StrEnum

CONFIGMAP = "treenail-install"
"""Name of the ConfigMap with the settings, in the namespace of the controllers."""
CONFIGMAP_KEY = "imageMode"


class RegistryType(StrEnum):
    """Registry that has the control plane's image until the cluster runs."""

    BOOTSTRAP = "Bootstrap"
    EXTERNAL = "External"


class WorkerMode(StrEnum):
    """Config of new workers before their image exists."""

    WAIT = "Wait"
    """Nothing: the config server asks them to retry."""
    FOLLOW = "Follow"
    """The stock image; the rollout controller moves them to their image."""


@dataclass(frozen=True, slots=True)
class ImageModePool:
    """Image of one pool."""

    name: str
    container_file: str = ""
    """File below the install directory; empty for an image with the config alone."""
    push_spec: str = ""
    """Final name of the image."""


@dataclass(frozen=True, slots=True)
class ImageMode:
    """The field ``imageMode``."""

    is_enabled: bool = True
    registry: RegistryType = RegistryType.BOOTSTRAP
    workers: WorkerMode = WorkerMode.WAIT
    pools: tuple[ImageModePool, ...] = ()
