"""An image that was built at the installation, and the MachineOSBuild that the cluster adopts."""

import json
from dataclasses import dataclass, replace

from treenail.api import annotations as key
from treenail.api.decode import Json, load_json
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.clock import format_rfc3339
from treenail.controllers.image_build.build_objects import (
    encode_report,
    encode_systems,
    make_build_object,
    read_architectures,
    read_systems,
)
from treenail.controllers.image_build.facts import BuildReport, SystemFacts, WantedBuild
from treenail.controllers.pools.image_tags import TagRecord, encode_base_record
from treenail.errors import ConfigError
from treenail.image.build_reason import BUILT_AT_INSTALL
from treenail.image.job_status import compute_build_conditions

_MESSAGE = "The image was built on the bootstrap host"


@dataclass(frozen=True, slots=True)
class BuiltPoolImage:
    """A pushed image, by the names that it has in the cluster."""

    pool: str
    digest: str
    """Of the manifest that nodes pull."""
    push_spec: str
    """Final ``REGISTRY/REPOSITORY:TAG``, also while only the bootstrap registry has it."""
    key: str
    """Content key."""
    build_name: str
    """Name of the MachineOSBuild."""
    architectures: tuple[str, ...]
    system_images: tuple[str, ...] = ()
    """Pull specs of the system parts, which later builds use again; without the base image."""

    @property
    def repository(self) -> str:
        """``REGISTRY/REPOSITORY``, final."""
        return self.push_spec.rpartition(":")[0]

    @property
    def pull_spec(self) -> str:
        """Final name by digest."""
        return f"{self.repository}@{self.digest}"


@dataclass(frozen=True, slots=True)
class BuildTimes:
    """Begin and end in seconds since the epoch."""

    began: float
    ended: float


def make_built_object(
    wanted: WantedBuild,
    config: MachineOSConfig,
    systems: dict[str, SystemFacts],
    image: str,
    report: BuildReport,
    times: BuildTimes,
    base: TagRecord | None = None,
) -> Json:
    """Return the MachineOSBuild with its status, as the build controller leaves it. Pure.

    ``image`` is the final pull spec. ``base`` says how the tag of the base image was resolved; the
    cluster records it in the MachineOSConfig, and does not resolve the tag again. The object has
    no owner: the UID of the MachineOSConfig is known in the cluster only.
    """
    document = make_build_object(wanted, config)
    metadata = document["metadata"]
    if not isinstance(metadata, dict) or not isinstance(metadata["annotations"], dict):
        raise TypeError("a MachineOSBuild has no annotations")
    metadata["annotations"] |= {
        **encode_systems(systems),
        key.BUILD_REPORT: encode_report(report),
        **({key.RESOLVED_BASE: encode_base_record(base)} if base is not None else {}),
    }
    began = format_rfc3339(times.began)
    conditions = compute_build_conditions(BuildState.SUCCEEDED, BUILT_AT_INSTALL, _MESSAGE)
    # The CRD of the Machine Config Operator requires an end after the start.
    ended = format_rfc3339(max(times.ended, times.began + 1.0))
    return {
        **document,
        "status": {
            "conditions": [
                replace(each, last_transition_time=ended).to_json() for each in conditions
            ],
            "buildStart": began,
            "buildEnd": ended,
            "digestedImagePushSpec": image,
        },
    }


def encode_built_object(document: Json) -> bytes:
    """Encode the object as a file of `InstallDirectory.cluster_objects`."""
    return json.dumps(document, indent=1).encode() + b"\n"


def decode_built_image(content: bytes, *, where: str) -> BuiltPoolImage:
    """Return the image of a file of `InstallDirectory.cluster_objects`; raise `ConfigError`."""
    build = MachineOSBuild.from_json(load_json(content, where=where))
    repository, _, digest = build.pull_spec.partition("@")
    if build.state is not BuildState.SUCCEEDED or not digest:
        raise ConfigError(f"{where}: expected a build that succeeded")
    if repository != build.push_spec.rpartition(":")[0]:
        raise ConfigError(f"{where}: its image is not in the repository of its push spec")
    return BuiltPoolImage(
        pool=build.metadata.labels.get(key.TARGET_POOL, ""),
        digest=digest,
        push_spec=build.push_spec,
        key=build.content_key,
        build_name=build.name,
        architectures=read_architectures(build),
        system_images=tuple(each.image for each in read_systems(build).values() if each.image),
    )
