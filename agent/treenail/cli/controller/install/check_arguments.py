"""Arguments of the commands that check an install directory, and their meaning."""

import argparse
import os
import sys
from pathlib import Path

from treenail import clocks, errors
from treenail.api.pullspec import parse_pull_spec
from treenail.builder.registries import RegistrySettings
from treenail.cli import output, terminal
from treenail.image.build_inputs import ARCHITECTURES
from treenail.installer.directory import online_checks, prepare, prepared_manifests, problems


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of checks that ask registries."""
    parser.add_argument(
        "--pull-secret",
        "--authfile",
        metavar="FILE",
        type=Path,
        help="log in to registries of base images with this .dockerconfigjson (default: the field "
        "pullSecret)",
    )
    parser.add_argument(
        "--ca", metavar="FILE", type=Path,
        help="trust the CAs in this PEM file in these checks; the bootstrap host and the nodes "
        "trust those of their system and of the ControllerConfig",
    )  # fmt: skip
    parser.add_argument(
        "--architecture",
        choices=tuple(ARCHITECTURES),
        help="architecture of the machines (default: that of install-config.yaml, or amd64)",
    )
    parser.add_argument(
        "--base-image",
        metavar="IMAGE",
        default="",
        help="OS image of the release by digest, with which pre-built images are compared "
        "(default: that of the ControllerConfig among the manifests)",
    )
    parser.add_argument(
        "--push-secret",
        metavar="FILE",
        type=Path,
        help="log in to the registry of built images with this .dockerconfigjson (default: the "
        "logins for pulls)",
    )
    parser.add_argument(
        "--offline", action="store_true", help="ask no registry: look up no image, and try no login"
    )


def create_online_checks(arguments: argparse.Namespace) -> online_checks.OnlineChecks | None:
    """Create the checks that ask registries; None with ``--offline``."""
    if arguments.base_image:
        parse_pull_spec(arguments.base_image, where="--base-image")
    if arguments.offline:
        return None
    if arguments.ca is not None and arguments.ca.exists() and not arguments.ca.is_file():
        # A pipe without a writer would block.
        raise errors.UsageError(f"cannot read {arguments.ca}: it is not a regular file")
    settings = RegistrySettings.read(None, arguments.ca, os.environ)
    checker = online_checks.RegistryChecker(settings, clocks.SystemClock())
    return online_checks.OnlineChecks(checker, base_image=arguments.base_image)


def read_options(arguments: argparse.Namespace) -> prepare.PrepareOptions:
    """Return logins and architectures of the arguments."""
    return prepare.PrepareOptions(
        arguments.pull_secret, arguments.push_secret, _read_architectures(arguments)
    )


def _read_architectures(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the architecture of each built-in pool, where an argument names it."""
    if arguments.architecture is None:
        return {}
    return dict.fromkeys(prepared_manifests.BUILT_IN_POOLS, arguments.architecture)


def print_problems(program: str, error: problems.InstallDirectoryError) -> int:
    """Print all problems on lines of their own; return the exit code."""
    first, *others = error.list_lines()
    terminal.print_lines([f"{program}: {first}", *others], sys.stderr, hanging_columns=4)
    return output.EXIT_FAILED
