"""MachineConfigNode: the update of a node as conditions."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from treenail.api import decode, object_meta
from treenail.encoding import codec

API_VERSION = "machineconfiguration.openshift.io/v1"
KIND = "MachineConfigNode"

NOT_YET_SET = "not-yet-set"
"""Placeholder of a config name that is not known yet."""

CONFIG_IMAGE_FIELD = "configImage"
"""Field of spec and status with the images; not every cluster's CRD has it."""

NOT_YET_OCCURRED = "NotYetOccurred"


class ConditionType(StrEnum):
    """Condition types of a drain; the API server rejects those that the MCO does not have."""

    CORDONED = "Cordoned"
    DRAINED = "Drained"
    UNCORDONED = "Uncordoned"


@dataclass(frozen=True, slots=True)
class MachineConfigNode(codec.JsonObject, where=KIND):
    """Snapshot of a MachineConfigNode; an empty config or image is unset."""

    metadata: object_meta.ObjectMeta
    pool: Annotated[str, codec.Key("spec.pool.name")] = ""
    desired_config: Annotated[str, codec.Key("spec.configVersion.desired")] = ""
    desired_image: Annotated[str, codec.Key("spec.configImage.desiredImage")] = ""
    current_config: Annotated[str, codec.Key("status.configVersion.current")] = ""
    current_image: Annotated[str, codec.Key("status.configImage.currentImage")] = ""
    reported_image: Annotated[str, codec.Key("status.configImage.desiredImage")] = ""
    """The desired image in the status."""
    observed_generation: Annotated[int, codec.Key("status.observedGeneration")] = 0
    conditions: object_meta.StatusConditions = ()

    @property
    def has_status_images(self) -> bool:
        """True when the status contains images."""
        return bool(self.current_image or self.reported_image)


def build_status_apply(
    node: str,
    conditions: Iterable[object_meta.Condition],
    *,
    current_config: str,
    desired_config: str,
    current_image: str = "",
    desired_image: str = "",
) -> decode.Json:
    """Build the document of a server-side apply to the status subresource.

    It must contain every condition that the field manager wrote before: server-side apply removes
    fields that their owner omits. Without images ``configImage`` is omitted, because older CRDs
    lack it. A ``configImage`` that the applier wrote must be removed first: a map without its
    fields becomes null, which the schema rejects. ``observedGeneration`` is always omitted: the MCO
    writes the generation plus one, and its CRD rejects a lower number.
    """
    status: decode.Json = {
        "conditions": [condition.to_json() for condition in conditions],
        "configVersion": {
            **_omit_empty("current", current_config),
            "desired": desired_config or NOT_YET_SET,
        },
    }
    images = {
        **_omit_empty("currentImage", current_image),
        **_omit_empty("desiredImage", desired_image),
    }
    if images:
        status[CONFIG_IMAGE_FIELD] = images
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": node},
        "status": status,
    }


def _omit_empty(name: str, value: str) -> decode.Json:
    return {name: value} if value else {}
