"""Program that builds the image of pool master, for tests that kill it: ``ROOT``."""

import sys
from pathlib import Path

from tests.controllers.install_time.pool_builds import NAMESPACE, RecordingContext
from tests.controllers.install_time.registries import CLOCK, make_registry
from treenail.controllers.install_time.images.build_attempt import PoolBuildSettings
from treenail.controllers.install_time.images.build_step import make_build_inputs
from treenail.controllers.install_time.images.pool_image import PoolImageBuilder
from treenail.controllers.install_time.inputs.install_directory import InstallDirectory
from treenail.controllers.install_time.inputs.install_files import InstallFiles
from treenail.controllers.install_time.inputs.install_manifests import read_install_manifests
from treenail.controllers.install_time.steps.render_step import render_install_pools


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
