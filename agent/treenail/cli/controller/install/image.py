"""``treenail-controller install image``: write a built image and a pointer config to files."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import errors, memory
from treenail.cli import terminal
from treenail.cli.controller.install.arguments import add_directory_argument

if TYPE_CHECKING:
    from treenail.installer.directory.install_files import InstallDirectory, InstallFiles

_POINTER_LIMIT = memory.MIB
_SPEC = "3.1.0"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "image",
        help="write a built image as an OCI directory",
        description="Write the image of a pool that the bootstrap host built as an OCI directory, "
        "and beside it a pointer config: OCI_DIR.ign. Tools that make disks need both, so that a "
        "machine boots into the image at once and fetches its config. Needs no running registry.",
        epilog=terminal.format_examples(
            (
                "write image and pointer config",
                "treenail-controller install image --pool master --output master-image",
            ),
            (
                "copy the image to another registry",
                "skopeo copy --all --preserve-digests oci:master-image docker://IMAGE",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    add_directory_argument(parser)
    parser.add_argument("--pool", metavar="NAME", required=True, help="the pool of the machines")
    parser.add_argument(
        "--output", metavar="OCI_DIR", type=Path, required=True,
        help="write the image to this directory, which has no other image",
    )  # fmt: skip
    parser.add_argument(
        "--server", metavar="URL",
        help="the config server that machines reach, https://HOST:PORT, for the pointer config "
        "(default: that of DIR/POOL.ign, which the OpenShift installer writes)",
    )  # fmt: skip
    parser.set_defaults(run=write_image)


def write_image(arguments: argparse.Namespace) -> int:
    """Write both; return 0."""
    from treenail.installer.directory.install_files import (
        InstallDirectory,
        InstallFiles,
        require_directory,
    )
    from treenail.installer.images.built_image import export_pool_image
    from treenail.installer.images.pool_image import read_built_image

    require_directory(arguments.directory, "write an image of")
    directory, files = InstallDirectory(arguments.directory.resolve()), InstallFiles()
    pool = arguments.pool
    image = read_built_image(directory, files, pool)
    if image is None:
        raise errors.UsageError(
            f"cannot write the image of pool {pool}: {directory.root} has none",
            remedy="build it: treenail-controller install bootstrap --dir DIR",
        )
    storage = directory.registry / "storage"
    if not storage.is_dir():
        raise errors.UsageError(
            f"cannot write the image of pool {pool}: it is in its final registry",
            remedy=f"run: skopeo copy --all docker://{image.pull_spec} oci:{arguments.output}",
        )
    pointer = _make_pointer(directory, files, pool, arguments.server)
    name = export_pool_image(image, storage, arguments.output)
    lines = [f"wrote oci:{arguments.output}:{name}, {image.digest}"]
    if pointer is not None:
        path = arguments.output.with_name(f"{arguments.output.name}.ign")
        files.write(path.absolute(), pointer)
        lines.append(f"wrote {path}")
    terminal.print_lines(lines)
    return 0


def _make_pointer(
    directory: "InstallDirectory", files: "InstallFiles", pool: str, server: str | None
) -> bytes | None:
    """Return the pointer config; None without a server and without one of the installer."""
    from treenail.provisioning.content.document import build_pointer

    if server is None:
        return files.read(directory.root / f"{pool}.ign", limit=_POINTER_LIMIT)
    authority = files.read(directory.ca_certificate, limit=_POINTER_LIMIT) or b""
    document = build_pointer(server, pool, _SPEC, authorities=authority)
    return json.dumps(document, indent=1).encode() + b"\n"
