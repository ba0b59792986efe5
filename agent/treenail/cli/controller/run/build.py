"""The controller of image builds.

Its arguments about Jobs are also those of ``treenail-controller manifests``.
"""

import argparse
import os
import re

from treenail.cli.controller import connect, trust
from treenail.cli.controller.run import controllers
from treenail.controllers.image_build.job_builder import JobSettings
from treenail.controllers.runtime import workers

_QUANTITY = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; the install controller reads those about Jobs too."""
    add_job_arguments(parser)
    trust.add_key_argument(parser)


def build(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> tuple[workers.ControllerSettings, ...]:
    """Construct the controller."""
    from treenail.controllers.handover.controller import InstallationGate
    from treenail.controllers.image_build.controller import BuildOptions, make_build_controller

    key_file = arguments.signing_key
    client = context.create_client("build")
    controller = make_build_controller(
        client,
        context.clock,
        context.recorder,
        context.metrics,
        read_job_settings(arguments, find_build_namespace(context, arguments)),
        BuildOptions(
            environ=os.environ,
            signing_key=trust.load_key(key_file) if key_file else None,
            find_hold_reason=InstallationGate(client, context.clock).find_hold_reason,
            late_writes=context.late_writes,
        ),
    )
    return (workers.ControllerSettings(controller, workers=4, max_retry_s=30.0),)


CONTROLLER = controllers.ControllerCommand(add_arguments, build)


def find_build_namespace(
    context: controllers.ControllerContext, arguments: argparse.Namespace
) -> str:
    """Return the namespace of the Jobs; raise `UsageError` where it is unknown."""
    return arguments.build_namespace or context.find_namespace()


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about Jobs."""
    defaults = JobSettings()
    parser.add_argument(
        "--builder-image",
        metavar="IMAGE",
        default=defaults.image,
        help="build OS images with this image, which contains buildah and treenail (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--build-namespace",
        metavar="NAME",
        type=connect.parse_namespace,
        help="namespace of the Jobs, Secrets and ConfigMaps of builds (default: that of the "
        "controllers)",
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


def read_job_settings(arguments: argparse.Namespace, namespace: str) -> JobSettings:
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
