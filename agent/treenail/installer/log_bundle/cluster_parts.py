"""Parts of a log bundle that the new cluster has: pools, image configs, builds, and its nodes.

A node gives the archive of ``treenail collect``, read over ssh.
"""

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from treenail import errors, log_bundle, memory, process
from treenail.api import decode
from treenail.config import redact
from treenail.controllers.handover.handover_objects import parse_objects
from treenail.installer.log_bundle.object_secrets import format_objects
from treenail.kube import api_client, resources

PREFIX = "cluster/treenail"
_RESOURCES = (
    resources.MACHINEOSCONFIGS,
    resources.MACHINEOSBUILDS,
    resources.MACHINECONFIGPOOLS,
    resources.NODES,
)

OpenCluster = Callable[[], AbstractContextManager[api_client.Client]]
"""Connects to the cluster; raises `UsageError`."""


def add_cluster_parts(bundle: log_bundle.LogBundle, open_cluster: OpenCluster) -> tuple[str, ...]:
    """Add the objects; return a sentence for each pool without its image.

    A cluster that does not answer is recorded as missing, with one attempt.
    """
    objects: dict[resources.Resource, tuple[decode.Json, ...]] = {}
    try:
        with open_cluster() as client:
            for resource in _RESOURCES:
                try:
                    objects[resource] = client.list(resource).items
                except errors.NotFoundError as error:
                    # The controllers, which bring the kind, are not installed yet.
                    bundle.note_missing(f"{PREFIX}/{resource.plural}.yaml", str(error))
    except (errors.ClusterError, errors.UsageError) as error:
        bundle.note_missing(PREFIX, str(error))
    for resource, items in objects.items():
        name = f"{PREFIX}/{resource.plural}.yaml"
        bundle.add_part(name, partial(_format_items, items, resource))
    return tuple(_describe_pools(objects))


def _format_items(items: tuple[decode.Json, ...], resource: resources.Resource) -> bytes:
    # API servers leave kind and version out of the items of a list.
    kind: decode.Json = {"apiVersion": resource.api_version, "kind": resource.kind}
    text = "".join(f"---\n{json.dumps({**kind, **item})}\n" for item in items)
    return format_objects(text.encode(), where=resource.plural)


def _describe_pools(objects: dict[resources.Resource, tuple[decode.Json, ...]]) -> Iterator[str]:
    if not objects.keys() >= {
        resources.MACHINECONFIGPOOLS,
        resources.MACHINEOSCONFIGS,
        resources.MACHINEOSBUILDS,
    }:
        return
    try:
        progress = parse_objects(
            objects[resources.MACHINECONFIGPOOLS],
            objects[resources.MACHINEOSCONFIGS],
            objects[resources.MACHINEOSBUILDS],
        )
    except errors.ConfigError as error:
        yield f"cannot read the pools: {error}"
        return
    yield from (*progress.failed, *progress.missing)


DEFAULT_USER = "core"
DEFAULT_TIMEOUT_S = 120.0
MAX_NODES = 100
_CONNECTIONS = 8
_CONNECT_TIMEOUT_S = 15
_ARCHIVE_LIMIT = 64 * memory.MIB
_UNPACKED_LIMIT = 256 * memory.MIB
_PART_LIMIT = 4 * memory.MIB
_MAX_PARTS = 500
# ssh would read a leading dash as an option.
_ADDRESS = re.compile(
    r"(?:(?P<user>[a-z_][\w.-]{0,31})@)?(?P<host>[0-9A-Za-z\[:][\w.:%\]-]{0,252})"
)
_PART_NAME = re.compile(r"[\w.@:+-]+(?:/[\w.@:+-]+)*", re.ASCII)
# ssh(1): it exits with 255 if an error occurred, otherwise with the code of the command.
_SSH_FAILED = "failed with exit code 255"
_FALLBACK_UNITS = ("treenail.service", "treenail-firstboot.service", "rpm-ostreed.service")
_FALLBACK_LINES = 2000


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Address of a node, and the user who logs in."""

    host: str
    user: str = DEFAULT_USER

    def __str__(self) -> str:
        return self.host


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Parts that a node sent, and causes of missing ones; both by name."""

    address: NodeAddress
    parts: dict[str, bytes] = field(default_factory=dict, repr=False)
    missing: dict[str, str] = field(default_factory=dict)


def parse_node_address(text: str) -> NodeAddress:
    """Parse ``[USER@]ADDRESS``; raise `UsageError`."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise errors.UsageError(
            f"cannot use the node address {text:.100}: expected [USER@]ADDRESS",
            remedy="name a host or an IP address, for example --node core@192.0.2.10",
        )
    return NodeAddress(match["host"].strip("[]"), match["user"] or DEFAULT_USER)


def add_node_parts(
    bundle: log_bundle.LogBundle,
    addresses: Sequence[NodeAddress],
    programs: process.ProgramRunner,
    timeout_s: float,
) -> tuple[NodeAddress, ...]:
    """Add the parts of all nodes, several at a time; return the nodes that sent none."""
    silent: list[NodeAddress] = []
    read = partial(read_node_parts, programs, timeout_s)
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for node in pool.map(read, addresses):
            prefix = f"control-plane/{node.address}/treenail"
            for name, content in node.parts.items():
                bundle.add_part(f"{prefix}/{name}", partial(bytes, content))
            for name, cause in node.missing.items():
                bundle.note_missing(f"{prefix}/{name}" if name else prefix, cause)
            if not node.parts:
                silent.append(node.address)
    return tuple(silent)


def read_node_parts(
    programs: process.ProgramRunner, timeout_s: float, address: NodeAddress
) -> NodeParts:
    """Read the parts of one node within the time limit; errors become causes of missing parts."""
    run = partial(_run_remote, programs, address)
    try:
        archive = run("sudo treenail collect --output -", timeout_s)
    except errors.CommandTimeoutError as error:
        return NodeParts(address, missing={"": f"cannot read node {address}: {error}"})
    except errors.CommandError as error:
        cause = f"cannot read node {address}: {error}"
        if _SSH_FAILED in str(error):
            return NodeParts(address, missing={"": cause})
        return _read_fallback(run, address, cause, timeout_s)
    try:
        return NodeParts(address, dict(unpack_parts(archive)))
    except errors.HostError as error:
        return NodeParts(address, missing={"": f"cannot read node {address}: {error}"})


def _read_fallback(
    run: partial[bytes], address: NodeAddress, cause: str, timeout_s: float
) -> NodeParts:
    """Read the journal of a node whose `treenail collect` failed: it may boot the first time."""
    units = " ".join(f"--unit {unit}" for unit in _FALLBACK_UNITS)
    command = f"sudo journalctl --no-pager --quiet --lines {_FALLBACK_LINES} {units}"
    try:
        journal = run(command, timeout_s).decode("utf-8", "replace")
    except errors.CommandError as error:
        return NodeParts(address, missing={"": cause, "journal": str(error)})
    return NodeParts(address, {"journal/all": redact.format_redacted_lines(journal)}, {"": cause})


def _run_remote(
    programs: process.ProgramRunner, address: NodeAddress, command: str, timeout_s: float
) -> bytes:
    # The machines are new, so no known_hosts has their keys. The installer's gather does the same.
    argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}"]
    argv += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    argv += ["-o", "LogLevel=ERROR", "-l", address.user, "--", address.host, command]
    return programs.run_command(argv, timeout_s=timeout_s, output_limit=_ARCHIVE_LIMIT)


def unpack_parts(archive: bytes) -> list[tuple[str, bytes]]:
    """Unpack what a node sent, and withhold secrets again; raise `HostError` if it is damaged.

    Only regular files with plain names are read, within limits: the node may be compromised.
    """
    parts: list[tuple[str, bytes]] = []
    try:
        with gzip.open(io.BytesIO(archive)) as packed:
            unpacked = packed.read(_UNPACKED_LIMIT + 1)
        if len(unpacked) > _UNPACKED_LIMIT:
            raise errors.HostError("the archive unpacks to more than 256 MiB")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            for entry in tar:
                name = entry.name.partition("/")[2]
                if len(parts) < _MAX_PARTS and entry.isreg() and _is_plain_name(name):
                    file = tar.extractfile(entry)
                    content = file.read(_PART_LIMIT) if file else b""
                    parts.append((name, _withhold_part(name, content)))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise errors.HostError("the archive of `treenail collect` is damaged") from error
    return parts


def _is_plain_name(name: str) -> bool:
    return bool(_PART_NAME.fullmatch(name)) and not {".", ".."} & {*name.split("/")}


def _withhold_part(name: str, content: bytes) -> bytes:
    if name.endswith(".json"):
        try:
            return redact.format_redacted_document(decode.load_json(content, where=name))
        except errors.TreenailError:
            pass
    text = content.decode("utf-8", "replace")
    is_journal = name.startswith("journal/")
    return redact.format_redacted_lines(text) if is_journal else redact.format_redacted_text(text)
