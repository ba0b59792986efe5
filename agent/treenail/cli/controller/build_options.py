"""Arguments about image builds, of ``treenail-controller run`` and ``manifests``."""

import argparse
import re

from treenail.cli.controller.connect import parse_namespace
from treenail.controllers.image_build.job_builder import JobSettings

_QUANTITY = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    defaults = JobSettings()
    parser.add_argument(
        "--builder-image",
        metavar="IMAGE",
        default=defaults.image,
        help="build OS images with this image, which contains buildah (default: %(default)s)",
    )
    parser.add_argument(
        "--build-namespace",
        metavar="NAME",
        type=parse_namespace,
        help="namespace of the Jobs and Secrets of builds (default: that of the controllers)",
    )
    for name, default, what in (
        ("cpu", defaults.cpu, "CPU that a build requests"),
        ("memory", defaults.memory, "memory that a build requests and may use"),
        ("storage", defaults.storage, "disk space that a build may use"),
    ):
        parser.add_argument(
            f"--build-{name}",
            metavar="QUANTITY",
            type=parse_quantity,
            default=default,
            help=f"{what} (default: %(default)s)",
        )
    parser.add_argument(
        "--build-cache",
        metavar="REPOSITORY",
        default="",
        help="store layers of builds in this repository, for later builds (default: no cache)",
    )


def read_settings(arguments: argparse.Namespace, namespace: str) -> JobSettings:
    """Return the settings of Jobs in a namespace."""
    return JobSettings(
        image=arguments.builder_image,
        namespace=namespace,
        cpu=arguments.build_cpu,
        memory=arguments.build_memory,
        storage=arguments.build_storage,
        cache_repository=arguments.build_cache,
    )


def parse_quantity(text: str) -> str:
    """Parse a quantity of Kubernetes."""
    if not _QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a quantity such as 2Gi, found {text!r:.40}")
    return text
