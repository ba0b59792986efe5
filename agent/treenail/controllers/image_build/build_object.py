"""The MachineOSBuild of a wanted build, as the API server gets it. Pure."""

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineosbuild import API_VERSION, KIND
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.image_build.facts import WantedBuild
from treenail.controllers.image_build.systems import encode_systems
from treenail.kube.resources import MACHINEOSCONFIGS

PUSH_SECRET = key.PREFIX + "rendered-image-push-secret"
_FAILURE_LIMIT = 2000  # characters


def make_build_object(
    wanted: WantedBuild,
    config: MachineOSConfig,
    *,
    rebuild_of: str = "",
    previous_failure: str = "",
) -> Json:
    """Return a new MachineOSBuild without a status.

    A MachineOSConfig of a file has no UID, and its build no owner.
    """
    notes = {
        PUSH_SECRET: wanted.push_secret,
        key.CONTENT_KEY: wanted.content_key,
        key.BUILD_ARCHITECTURES: ",".join(wanted.architectures),
        **encode_systems({each.name: each.initial for each in wanted.systems}),
        key.REBUILD_OF: rebuild_of,
        key.PREVIOUS_FAILURE: previous_failure[:_FAILURE_LIMIT],
    }
    metadata: Json = {
        "name": wanted.name,
        "labels": {
            key.TARGET_POOL: config.pool,
            key.RENDERED_CONFIG: wanted.config,
            key.IMAGE_CONFIG: config.name,
            key.BUILD_KEY: wanted.share_key,
        },
        "annotations": {name: text for name, text in notes.items() if text},
    }
    if config.metadata.uid:
        metadata["ownerReferences"] = [make_owner_reference(config)]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "machineConfig": {"name": wanted.config},
            "machineOSConfig": {"name": config.name},
            "renderedImagePushSpec": wanted.push_spec,
        },
    }


def make_owner_reference(config: MachineOSConfig) -> Json:
    """Return the owner reference of a build of this MachineOSConfig."""
    return {
        "apiVersion": API_VERSION,
        "kind": MACHINEOSCONFIGS.kind,
        "name": config.name,
        "uid": config.metadata.uid,
        "controller": True,
    }
