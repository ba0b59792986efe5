"""Which images the bootstrap host builds, and from which inputs."""

from collections.abc import Sequence

from treenail.installer.checks.install_objects import InstallObjects
from treenail.installer.images.pool_image import PoolBuildInputs
from treenail.installer.inputs.image_mode import NAMESPACE
from treenail.installer.inputs.install_manifests import InstallManifests
from treenail.installer.steps.render_step import RenderedPool

BOOTSTRAP_POOLS = ("master", "arbiter")
"""Pools whose machines the bootstrap host serves."""


def list_built_pools(manifests: InstallManifests) -> tuple[str, ...]:
    """Return the pools whose images are built on the bootstrap host: not those built before."""
    found = {each.pool for each in manifests.image_configs.values() if not each.pre_built_image}
    return tuple(name for name in BOOTSTRAP_POOLS if name in found and name in manifests.pools)


def make_build_inputs(
    manifests: InstallManifests,
    pools: Sequence[RenderedPool],
    name: str,
    *,
    namespace: str = NAMESPACE,
    architecture: str = "",
) -> PoolBuildInputs:
    """Return the inputs of the build for pool ``name``, one of `list_built_pools`.

    ``namespace`` is that of builds in the future cluster.
    """
    documents = {each.rendered.name: each.rendered.config.to_json() for each in pools}
    return PoolBuildInputs(
        next(each for each in manifests.image_configs.values() if each.pool == name),
        next(each.pool for each in pools if each.pool.name == name),
        InstallObjects(manifests, documents),
        namespace,
        architecture,
        manifests.mirror_rules,
    )
