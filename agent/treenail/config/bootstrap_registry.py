"""Registry on the bootstrap host of an installation, as nodes use it until the hand-over. Pure.

A node of the control plane pulls its first image by the final name. Three files beside its rendered
config send that pull to the bootstrap host: a mirror for digests, the CA of that registry, and a
record with its login. The agent removes them when the final registry has the image.
"""

import base64
import json
import re
import tomllib
from dataclasses import dataclass, field

from treenail.api import decode, pullspec
from treenail.api.ignition import model
from treenail.config import node_paths, pullsecret
from treenail.errors import ConfigError

MIRROR_FILE = "/etc/containers/registries.conf.d/50-treenail-bootstrap.conf"
RECORD_FILE = node_paths.BOOTSTRAP_REGISTRY
RECORD_LIMIT = 64 * 1024
"""Maximum size of the record and of the mirror file, in bytes."""

_REPOSITORIES_LIMIT = 100
_FIELDS = ("registry", "username", "password", "repositories")
_ANY_DIGEST = "sha256:" + 64 * "0"
_CREDENTIAL = re.compile(r"[!-~]{1,256}")
_READABLE, _SECRET = 0o644, 0o600


@dataclass(frozen=True, slots=True)
class BootstrapRegistryRecord:
    """Address and login of the registry, and the images that it mirrors."""

    registry: str
    """``HOST:PORT``."""
    username: str
    """Of the login that may only pull."""
    password: str = field(repr=False)
    repositories: tuple[str, ...]
    """Final names without tag, such as ``quay.io/example/os``, sorted."""

    @property
    def ca_path(self) -> str:
        """Path of the registry's CA on a node."""
        return f"{node_paths.REGISTRY_CAS}/{self.registry}/ca.crt"

    @property
    def paths(self) -> tuple[str, ...]:
        """All files on a node, in the order of their removal.

        The record is last: as long as it exists, the removal is unfinished.
        """
        return (MIRROR_FILE, self.ca_path, RECORD_FILE)

    def make_pull_secret(self) -> pullsecret.PullSecret:
        """Return the login as a pull secret."""
        pair = f"{self.username}:{self.password}".encode()
        auth = base64.b64encode(pair).decode()
        return pullsecret.PullSecret({self.registry: pullsecret.RegistryCredential(auth)})


def encode_record(record: BootstrapRegistryRecord) -> bytes:
    """Encode the record as JSON; equal records give equal bytes. The text contains the password.

    Raises `ConfigError` for a record that `decode_record` would refuse.
    """
    document = {name: getattr(record, name) for name in _FIELDS}
    content = json.dumps(document, indent=1).encode() + b"\n"
    decode_record(content, where="the record of the bootstrap registry")
    return content


def decode_record(content: bytes, *, where: str) -> BootstrapRegistryRecord:
    """Decode a record; raise `ConfigError`, which contains no part of the password."""
    if len(content) > RECORD_LIMIT:
        raise ConfigError(f"{where}: longer than {RECORD_LIMIT} bytes")
    fields = decode.Fields.from_json(decode.load_json(content, where=where), where)
    decode.reject_unknown_fields(fields, _FIELDS)
    registry = fields.get_required_text("registry")
    _check_name(registry, "os", fields.path_of("registry"))
    repositories = fields.get_text_list("repositories")
    if not 0 < len(repositories) <= _REPOSITORIES_LIMIT:
        raise ConfigError(
            f"{fields.path_of('repositories')}: expected 1 to {_REPOSITORIES_LIMIT} repositories, "
            f"found {len(repositories)}"
        )
    for index, repository in enumerate(repositories):
        host, _, path = repository.partition("/")
        _check_name(host, path, f"{fields.path_of('repositories')}[{index}]")
    username = fields.get_required_text("username")
    password = fields.get_required_text("password")
    for name, text in (("username", username), ("password", password)):
        if not _CREDENTIAL.fullmatch(text) or (name == "username" and ":" in text):
            raise ConfigError(
                f"{fields.path_of(name)}: expected up to 256 printable ASCII characters without "
                "spaces, and no colon in the user name"
            )
    return BootstrapRegistryRecord(registry, username, password, tuple(sorted(set(repositories))))


def format_mirror_file(record: BootstrapRegistryRecord) -> bytes:
    """Return the registries.conf.d file: each repository has the registry as mirror for digests.

    The bootstrap registry has an image under the path of its final name. A pull by tag never asks
    a mirror for digests, and a pull by digest asks the final registry if the mirror fails
    (containers-registries.conf.d(5)).
    """
    parts = ["# Written at the installation; treenail removes it at the hand-over.\n"]
    for repository in record.repositories:
        path = repository.partition("/")[2]
        parts.append(
            "\n[[registry]]\n"
            f'prefix = "{repository}"\n'
            f'location = "{repository}"\n'
            "\n[[registry.mirror]]\n"
            f'location = "{record.registry}/{path}"\n'
            'pull-from-mirror = "digest-only"\n'
        )
    return "".join(parts).encode()


def is_mirror_file_of(content: bytes, registry: str) -> bool:
    """Return whether all mirrors of a registries.conf.d file are on this registry."""
    try:
        document = decode.Fields.from_json(tomllib.loads(content.decode()), MIRROR_FILE)
        mirrors = [
            mirror.get_text("location")
            for entry in document.iter_objects("registry")
            for mirror in entry.iter_objects("mirror")
        ]
    except (ConfigError, ValueError, RecursionError):
        return False
    return bool(mirrors) and all(location.startswith(f"{registry}/") for location in mirrors)


def list_node_files(
    record: BootstrapRegistryRecord, ca_pem: bytes
) -> tuple[model.IgnitionFile, ...]:
    """List the files for Ignition; they belong beside the rendered config, never into it.

    Raises `ConfigError` for an invalid record.
    """
    return (
        _make_file(MIRROR_FILE, format_mirror_file(record), _READABLE),
        _make_file(record.ca_path, ca_pem, _READABLE),
        _make_file(RECORD_FILE, encode_record(record), _SECRET),
    )


def _make_file(path: str, content: bytes, mode: int) -> model.IgnitionFile:
    source = f"data:;base64,{base64.b64encode(content).decode()}"
    return model.IgnitionFile(path, contents=model.Contents(source), mode=mode, overwrite=True)


def _check_name(registry: str, repository: str, where: str) -> None:
    """Raise `ConfigError` unless images can be pulled from the repository.

    The grammar has no quote and no slash in a registry, so that names fit into TOML and paths.
    """
    pull_spec = pullspec.parse_pull_spec(f"{registry}/{repository}@{_ANY_DIGEST}", where=where)
    if pull_spec.registry != registry:
        raise ConfigError(f"{where}: expected HOST:PORT, found a path")
