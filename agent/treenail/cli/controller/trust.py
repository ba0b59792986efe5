"""``treenail-controller trust``: print what nodes need to verify the signatures of images."""

import argparse
import base64
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from treenail import errors
from treenail.api import decode, documents, pullspec
from treenail.cli import terminal
from treenail.image.oci import attachments
from treenail.image.oci.documents import encode
from treenail.update.checks.signature_policy import POLICY_PATH

if TYPE_CHECKING:
    from treenail.builder.images.attachments import SigningKey

_SETTINGS = "/etc/containers/registries.d/treenail.yaml"
_KEY = "/etc/pki/containers/treenail.pub"
_KEY_LIMIT = 64 * 1024


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "trust",
        help="print what nodes need to verify the signatures of images",
        description="Print the public key, policy.json and a file of registries.d that make nodes "
        "require a signature for the images of one repository. Merge them with the files that "
        "nodes have.",
        epilog=terminal.format_examples(
            (
                "require signatures",
                "treenail-controller trust --signing-key key.pem quay.io/example/os",
            ),
            (
                "give the files to a pool",
                "treenail-controller trust --signing-key key.pem --role worker REPOSITORY",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "repository", metavar="REPOSITORY", help="REGISTRY/REPOSITORY that builds are pushed to"
    )
    parser.add_argument(
        "--signing-key",
        metavar="FILE",
        required=True,
        help="private key that the controllers sign with (PEM); only its public part is printed",
    )
    parser.add_argument(
        "--role",
        metavar="ROLE",
        help="print a MachineConfig for pools that select this role (default: print the files)",
    )
    parser.set_defaults(run=print_trust)


def add_key_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument of controllers that sign."""
    parser.add_argument(
        "--signing-key",
        metavar="FILE",
        default="",
        help="sign built images with this EC key, PEM without a password (default: no signatures)",
    )


def load_key(path: str) -> "SigningKey":
    """Load the file of a signing key; raise `FileError` or `ConfigError`."""
    # Imported late: only this command and controllers that sign need the package cryptography.
    from treenail.builder.images.attachments import load_signing_key

    try:
        with Path(path).open("rb") as file:
            content = file.read(_KEY_LIMIT + 1)
    except OSError as error:
        raise errors.FileError(f"cannot read the signing key {path}: {error.strerror}") from error
    if len(content) > _KEY_LIMIT:
        raise errors.FileError(
            f"cannot read the signing key {path}: it is longer than {_KEY_LIMIT} bytes"
        )
    return load_signing_key(content)


def print_trust(arguments: argparse.Namespace) -> int:
    """Print the files, or a MachineConfig with them."""
    name = arguments.repository
    spec = pullspec.parse_push_spec(f"{name}:tag", where="REPOSITORY")
    if f"{spec.registry}/{spec.repository}" != name:
        raise errors.UsageError(
            f"cannot use {name!r:.200}: expected REGISTRY/REPOSITORY without a tag"
        )
    key = load_key(arguments.signing_key).public_key
    files = {
        _KEY: key.to_pem().decode(),
        POLICY_PATH: encode(attachments.make_policy(name, _KEY)).decode() + "\n",
        _SETTINGS: attachments.make_registry_settings(name),
    }
    if arguments.role:
        sys.stdout.write(documents.dump_document(_make_machine_config(files, arguments.role)))
    else:
        sys.stdout.write("\n".join(f"# {path}\n{text}" for path, text in files.items()))
    sys.stdout.flush()
    return 0


def _make_machine_config(files: Mapping[str, str], role: str) -> decode.Json:
    entries = [
        {
            "path": path,
            "mode": 0o644,
            "overwrite": True,
            "contents": {
                "source": f"data:;base64,{base64.b64encode(text.encode()).decode()}",
            },
        }
        for path, text in files.items()
    ]
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {
            "name": f"50-{role}-image-signatures",
            "labels": {"machineconfiguration.openshift.io/role": role},
        },
        "spec": {"config": {"ignition": {"version": "3.4.0"}, "storage": {"files": entries}}},
    }
