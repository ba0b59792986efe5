"""PinnedImageSet: images that the nodes of a pool keep, whether or not a pod uses them."""

from dataclasses import dataclass
from typing import Annotated

from treenail.api import decode, object_meta, pullspec
from treenail.encoding import codec
from treenail.errors import ConfigError

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "PinnedImageSet"
_IMAGES_LIMIT = 500


@dataclass(frozen=True, slots=True)
class PinnedImageSet(codec.JsonObject, kind=KIND, api_version=API_VERSION):
    """Snapshot of a PinnedImageSet."""

    metadata: object_meta.ObjectMeta
    images: Annotated[object_meta.ObjectNames, codec.Key("spec.pinnedImages")] = ()
    """Pull specs by digest."""


def parse_pinned_set(document: decode.Json) -> PinnedImageSet:
    """Parse the object; raise `ConfigError` also for what the CRD rejects."""
    pinned = PinnedImageSet.from_json(document)
    if not 1 <= len(pinned.images) <= _IMAGES_LIMIT:
        raise ConfigError(
            f"spec.pinnedImages: expected 1 to {_IMAGES_LIMIT} images, found {len(pinned.images)}",
            remedy="delete the PinnedImageSet, or divide it into several ones",
        )
    for number, image in enumerate(pinned.images):
        pullspec.parse_pull_spec(image, where=f"spec.pinnedImages[{number}].name")
    return pinned
