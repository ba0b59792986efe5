"""Names of MachineOSBuilds, equal to those of the Machine Config Operator."""

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import ContainerfileArch, MachineOSConfig
from treenail.config.rendered_name import digest
from treenail.errors import ConfigError


def compute_build_name(
    config: MachineOSConfig,
    pool: MachineConfigPool,
    rendered: MachineConfig,
    *,
    context_digest: str = "",
) -> str:
    """Return ``<MachineOSConfig>-<hash>`` for the pool's rendered config.

    The hash covers the pool's configuration with its sources, the spec of the MachineOSConfig, the
    images of the rendered config and the release. A base image in an annotation of the
    MachineOSConfig, by digest, replaces the one of the rendered config. Files for COPY and the
    annotation that shows the config to the Containerfile are covered if they exist. Raises
    `ConfigError` for objects that do not belong together.
    """
    if pool.name != config.pool:
        raise ConfigError(
            f"cannot name a build of MachineOSConfig {config.name}: expected pool {config.pool}, "
            f"found {pool.name}"
        )
    images: Json = {
        "BaseOSContainerImage": config.base_image or rendered.os_image_url,
        "BaseOSExtensionsContainerImage": rendered.extensions_image,
        "OSImageURL": "",
        "ReleaseVersion": rendered.metadata.annotations.get(key.RELEASE_VERSION, ""),
    }
    if config.sees_config:
        images["BuildSeesConfig"] = "true"
    if context_digest:
        images["ContextDigest"] = context_digest
    return f"{config.name}-{digest(pool.configuration.document, complete_spec(config), images)}"


def complete_spec(config: MachineOSConfig) -> Json:
    """Return the spec as Go encodes the object of the API server, also of an object of a file."""
    # Go encodes a list that is not set as null, and the API server drops the null.
    files = config.spec.get("containerFile")
    if isinstance(files, list):
        # The default of the CRD: an object of a file has the name that it gets in a cluster.
        default: Json = {"containerfileArch": ContainerfileArch.NO_ARCH.value}
        files = [default | entry if isinstance(entry, dict) else entry for entry in files]
    return {**config.spec, "containerFile": files}
