"""``treenail-controller ignition``: print the config that the server would serve."""

import argparse
import json
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import documents
from treenail.cli import files, terminal
from treenail.cli.controller.serve import add_document_arguments
from treenail.config.ignition import emit, withhold
from treenail.provisioning.content.document import HEADERS_SINCE, build_pointer
from treenail.provisioning.server import certificate

if TYPE_CHECKING:
    from treenail.provisioning.content.document import ServedDocument

VERSIONS = {version.removesuffix(".0"): version for version in emit.VERSIONS_SERVED}
"""Versions of Ignition's format as users write them."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "ignition",
        help="print the Ignition config of a pool, without a server",
        description="Print the Ignition config that `serve --from` serves to the machines of a "
        "pool, or the pointer config with which they fetch it. The config contains the secrets of "
        "the pool.",
        epilog=terminal.format_examples(
            (
                "write the config for a boot image",
                "treenail-controller ignition --from DIR --pool worker --spec 3.4 > worker.ign",
            ),
            (
                "review the config",
                "treenail-controller ignition --from DIR --pool worker --without-secrets",
            ),
            (
                "print user data for machines",
                "treenail-controller ignition --pool worker --pointer --server https://HOST:22623",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "--from", dest="directory", metavar="DIR", type=Path,
        help="read pools, rendered configs and the ControllerConfig from the .yaml, .yml and .json "
        "files of this directory; with --pointer, only verify that the server can serve the pool",
    )  # fmt: skip
    parser.add_argument("--pool", metavar="NAME", required=True, help="the pool of the machine")
    parser.add_argument(
        "--spec", metavar="VERSION", type=parse_version,
        help=f"version of Ignition's format: {', '.join(VERSIONS)} (default: "
        f"{emit.VERSIONS_SERVED[-1]}; with --pointer {HEADERS_SINCE}, which each newer Ignition "
        "reads)",
    )  # fmt: skip
    parser.add_argument(
        "--pointer", action="store_true", help="print the pointer config; needs --server"
    )
    parser.add_argument(
        "--server", metavar="URL",
        help="with --pointer: the config server that machines reach, https://HOST:PORT",
    )  # fmt: skip
    parser.add_argument(
        "--ca", metavar="FILE",
        help="with --pointer: CA of the server's certificate, PEM (default: the CAs of the "
        "machine's image)",
    )  # fmt: skip
    parser.add_argument(
        "--bootstrap-kubeconfig", metavar="FILE",
        help="add this kubeconfig, with which the kubelet joins the cluster (default: that of the "
        "rendered config, if it has one)",
    )  # fmt: skip
    add_document_arguments(parser)
    parser.add_argument(
        "--without-secrets", action="store_true",
        help="print the size in place of the contents of files that not every user may read, and "
        "no password hashes, disk keys and HTTP headers, for review",
    )  # fmt: skip
    parser.set_defaults(run=print_ignition)


def print_ignition(arguments: argparse.Namespace) -> int:
    """Print the config or the pointer config as one line of JSON; indented without secrets.

    Raises `UsageError` for contradicting arguments, and the errors of `build_document`.
    """
    text = _format_pointer(arguments) if arguments.pointer else _format_config(arguments)
    if arguments.without_secrets:
        where = "the Ignition config"
        text = json.dumps(
            withhold.withhold_secrets(documents.load_document(text, where=where)), indent=2
        )
    print(text)
    return 0


def parse_version(text: str) -> str:
    """Return a version that is served; raise `argparse.ArgumentTypeError`."""
    version = VERSIONS.get(text, text)
    if version not in emit.VERSIONS_SERVED:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(VERSIONS)}, found {text!r:.40}"
        )
    return version


def read_authorities(path: str | None) -> bytes:
    """Return the CAs that machines trust; raise `UsageError` if each one has expired."""
    content = b"" if path is None else files.read_input(path)
    parts = content.decode("ascii", "replace").split(ssl.PEM_FOOTER)[:-1]
    ends = [certificate.read_expiry(f"{part}{ssl.PEM_FOOTER}") for part in parts]
    last = max((end or float("inf") for end in ends), default=float("inf"))
    if last <= clocks.SystemClock().now():
        raise errors.UsageError(
            f"cannot use the CA {path}: it expired at {clocks.format_rfc3339(last)}",
            remedy="give the CA that signs the server's present certificate",
        )
    return content


def _format_pointer(arguments: argparse.Namespace) -> str:
    if arguments.server is None:
        raise errors.UsageError(
            "cannot print a pointer config: the URL of the config server is missing",
            remedy="give the address that new machines reach: --server https://HOST:22623",
        )
    if arguments.bootstrap_kubeconfig is not None:
        raise errors.UsageError(
            "cannot use --bootstrap-kubeconfig with --pointer: a pointer config has no files"
        )
    if arguments.directory is not None:
        _build_document(arguments)
    authorities = read_authorities(arguments.ca)
    pointer = build_pointer(
        arguments.server, arguments.pool, arguments.spec or HEADERS_SINCE, authorities=authorities
    )
    return json.dumps(pointer, separators=(",", ":"))


def _format_config(arguments: argparse.Namespace) -> str:
    if arguments.server is not None or arguments.ca is not None:
        raise errors.UsageError("cannot use --server and --ca without --pointer")
    if arguments.directory is None:
        raise errors.UsageError(
            "cannot print a config: no directory is given",
            remedy="give the directory with the pool and its rendered config: --from DIR",
        )
    kubeconfig = None
    if arguments.bootstrap_kubeconfig is not None:
        kubeconfig = _read_kubeconfig(arguments.bootstrap_kubeconfig)
    document = _build_document(arguments)
    if document.is_image_later:
        print(
            f"treenail-controller: warning: the config names no image of pool {arguments.pool}: "
            "machines reach its registry only after they join",
            file=sys.stderr,
        )
    return document.format_body(kubeconfig).decode()


def _build_document(arguments: argparse.Namespace) -> "ServedDocument":
    # Imported late: other commands need no sources of configs.
    from treenail.provisioning.content.directory_source import DirectorySource
    from treenail.provisioning.content.document import build_document
    from treenail.provisioning.content.source import SourceSettings

    settings = SourceSettings(
        key.PREFIX + arguments.image_annotation, frozenset(arguments.registry_needs_cluster)
    )
    inputs = DirectorySource(arguments.directory, settings).read_inputs(arguments.pool)
    return build_document(inputs, arguments.spec or emit.VERSIONS_SERVED[-1])


def _read_kubeconfig(name: str) -> bytes:
    """Return the content of a kubeconfig; raise `ConfigError` if it is none."""
    content = files.read_input(name)
    document = documents.load_document(content, where=name)
    if document.get("kind") != "Config" or not document.get("clusters"):
        raise errors.ConfigError(
            f"cannot use {name}: expected a kubeconfig, with kind Config and clusters"
        )
    return content
