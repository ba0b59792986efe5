"""Program that builds the image of pool master, for tests that kill it: ``ROOT``."""

import sys
from pathlib import Path

from tests.installer.pool_builds import NAMESPACE, RecordingContext
from tests.installer.registries import CLOCK, make_registry
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_manifests import (
    read_install_manifests,
    render_install_pools,
)
from treenail.installer.images.build_attempt import PoolBuildSettings
from treenail.installer.images.pool_image import PoolImageBuilder, make_build_inputs


def main(root: Path) -> None:
    manifests = read_install_manifests(root)
    pools = render_install_pools(manifests)
    with make_registry(root) as registry:
        builder = PoolImageBuilder(
            InstallDirectory(root), registry, PoolBuildSettings(), CLOCK, InstallFiles()
        )
        inputs = make_build_inputs(manifests, pools, "master", namespace=NAMESPACE)
        builder.build_pool_image(inputs, RecordingContext())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
