"""The Ignition config of a new machine, built from the inputs of its pool. Pure.

`build_pointer` builds the user data with which the machine fetches it.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from treenail.api import annotations, decode, documents, machineconfig
from treenail.api import annotations as key
from treenail.api.ignition import model
from treenail.config import node_paths, reconcilable, wanted_state
from treenail.config.ignition import emit, pointer
from treenail.provisioning.content.source import ServedInputs

_READABLE, _SECRET = 0o644, 0o600
_NO_CONTENT = "data:;base64,"


@dataclass(frozen=True, slots=True)
class ServedDocument:
    """An Ignition config without its kubeconfig, which differs for each token."""

    head: bytes = field(repr=False)
    """JSON up to the place of the kubeconfig in the list of files."""
    tail: tuple[bytes, ...] = field(repr=False)
    """The rest of the JSON in parts; it begins with another file."""
    rendered: str
    """Name of the rendered config."""
    image: str
    """Pull spec of the pool's image; empty when the rendered config decides."""
    version: str
    is_image_later: bool = False
    """True when the machine gets the pool's image only after it joins."""
    own_kubeconfig: bytes = field(default=b"", repr=False)
    """JSON of the rendered config's own kubeconfig; empty if it has none."""

    def format_kubeconfig(self, kubeconfig: bytes | None) -> bytes:
        """Return the JSON between head and tail: a file and a comma, or nothing.

        None leaves the kubeconfig of the rendered config.
        """
        if kubeconfig is None:
            entry = self.own_kubeconfig
        else:
            file = _make_file(node_paths.KUBECONFIG, kubeconfig, _SECRET)
            entry = _dump_json(_emit_files(model.IgnitionConfig(files=(file,)), self.version)[0])
        return entry + b"," if entry else b""

    def list_parts(self, kubeconfig: bytes | None) -> tuple[bytes, ...]:
        """Return the whole config in parts, of which all responses share the long ones."""
        return (self.head, self.format_kubeconfig(kubeconfig), *self.tail)

    def format_body(self, kubeconfig: bytes | None) -> bytes:
        """Return the whole config."""
        return b"".join(self.list_parts(kubeconfig))


def build_document(inputs: ServedInputs, version: str) -> ServedDocument:
    """Build the config of a pool in one version of Ignition's format.

    Raises `ConfigError`; `VersionTooOldError` when the version cannot express the config.
    """
    text = inputs.read_rendered()
    config = machineconfig.MachineConfig.from_json(
        documents.load_document(text, where=f"MachineConfig {inputs.config.name}")
    )
    parsed = wanted_state.ParsedConfig(config)
    ignition = parsed.ignition
    moved: tuple[str, ...] = ()
    if version < emit.KERNEL_ARGUMENTS_SINCE:
        ignition, moved = emit.detach_kernel_arguments(ignition)
    encapsulated = _encapsulate_config(config, inputs, moved, version)
    before = _make_file(
        node_paths.FIRST_BOOT_ANNOTATIONS, _dump_json(_build_annotations(inputs)), _READABLE
    )
    appended = {file.path for file in inputs.appended}
    after = [
        # The rendered config contains the secrets of the pool. Its text comes later.
        _make_file(node_paths.SERVED_CONFIG, b"", _SECRET),
        *(file for file in _list_certificates(inputs) if file.path not in appended),
        *inputs.appended,
        # Last, as in the MCO. Ignition 2.14 itself writes files in the order of their depth.
        _make_file(node_paths.ENCAPSULATED_CONFIG, _dump_json(encapsulated), _READABLE),
    ]
    # Ignition rejects a config with two entries for a path.
    added = {before.path, node_paths.KUBECONFIG, *(file.path for file in after)}
    kept = [file for file in ignition.files if file.path not in added]
    places = {
        "files": [n for n, file in enumerate(ignition.files) if file.path not in added],
        "links": [n for n, link in enumerate(ignition.links) if link.path not in added],
    }
    own = tuple(file for file in ignition.files if file.path == node_paths.KUBECONFIG)
    links = tuple(link for link in ignition.links if link.path not in added)
    served = replace(ignition, files=(*kept, before, *after), links=links)
    try:
        emitted = emit.emit_ignition(served, version)
    except emit.VersionTooOldError as error:
        field = _restore_place(error.field, places)
        raise emit.VersionTooOldError(field, error.first_version, requested=version) from error
    # The agent of the machine would refuse it after the first boot.
    reconcilable.read_appliable_state(parsed, image=inputs.image.image or config.os_image_url)
    head, tail = _split_json(emitted, len(after))
    own_entries = _emit_files(model.IgnitionConfig(files=own), version) if own else []
    return ServedDocument(
        head,
        _insert_content(tail, text),
        config.name,
        inputs.image.image,
        version,
        inputs.image.is_later,
        b",".join(map(_dump_json, own_entries)),
    )


def _restore_place(field: str, places: Mapping[str, Sequence[int]]) -> str:
    """Return the location of a field in the rendered config, which has files that are replaced.

    ``places`` has the indexes of the files and links that are left.
    """
    match = re.match(r"storage\.(files|links)\[(\d+)\]", field)
    if match is None or int(match[2]) >= len(places[match[1]]):
        return field
    return f"storage.{match[1]}[{places[match[1]][int(match[2])]}]{field[match.end() :]}"


def _build_annotations(inputs: ServedInputs) -> decode.Json:
    """Build the annotations that the agent writes to the Node when it joins."""
    name = inputs.config.name
    node_annotations: decode.Json = {
        key.CURRENT_CONFIG: name,
        key.DESIRED_CONFIG: name,
        key.FIRST_PIVOT_CONFIG: name,
        key.STATE: str(annotations.NodeState.DONE),
    }
    if inputs.image.image:
        node_annotations[key.IMAGE_SPELLINGS[inputs.image_annotation]] = inputs.image.image
        node_annotations[inputs.image_annotation] = inputs.image.image
    if inputs.pool.image_files is not None:
        # The rollout controller writes it to the Node, which does not exist at the first boot.
        node_annotations[key.IMAGE_FILES] = inputs.pool.image_files.lower()
    return node_annotations


def _encapsulate_config(
    config: machineconfig.MachineConfig, inputs: ServedInputs, moved: tuple[str, ...], version: str
) -> decode.Json:
    """Build the MachineConfig for the first boot.

    It has an empty Ignition config: daemons of the MCO require the field.
    """
    return replace(
        config,
        config=emit.emit_ignition(model.IgnitionConfig(), version),
        os_image_url=inputs.image.os_image_url,
        kernel_arguments=(*config.kernel_arguments, *moved),
    ).to_json()


def _list_certificates(inputs: ServedInputs) -> list[model.IgnitionFile]:
    """List the CAs of the cluster, which are newer than those of the rendered config."""
    controller_config = inputs.controller_config
    if controller_config is None:
        return []
    contents = {
        node_paths.KUBELET_CA: controller_config.kubelet_ca,
        node_paths.CLOUD_CA: controller_config.cloud_ca,
        **{
            f"{node_paths.REGISTRY_CAS}/{registry}/ca.crt": certificate
            for registry, certificate in sorted(controller_config.registry_cas.items())
        },
    }
    return [_make_file(path, content, _READABLE) for path, content in contents.items() if content]


def _make_file(path: str, content: bytes, mode: int) -> model.IgnitionFile:
    source = _NO_CONTENT + base64.b64encode(content).decode()
    return model.IgnitionFile(path, contents=model.Contents(source), mode=mode, overwrite=True)


def _emit_files(config: model.IgnitionConfig, version: str) -> list[object]:
    return _get_files(emit.emit_ignition(config, version))


def _get_files(emitted: decode.Json) -> list[object]:
    storage = emitted["storage"]
    files = storage["files"] if isinstance(storage, dict) else None
    if not isinstance(files, list):
        raise TypeError("an emitted config has no list of files")
    return files


def _split_json(emitted: decode.Json, last: int) -> tuple[bytes, bytes]:
    """Format a config in two parts; the second one begins with the ``last`` files.

    The files are the last field of the JSON. The first part ends with a comma.
    """
    files = _get_files(emitted)
    storage = emitted["storage"]
    others = {name: value for name, value in emitted.items() if name != "storage"}
    rest = (
        {name: value for name, value in storage.items() if name != "files"}
        if isinstance(storage, dict)
        else {}
    )
    before = b"".join(_dump_json(file) + b"," for file in files[:-last])
    after = b",".join(map(_dump_json, files[-last:]))
    opened = _dump_json(rest)[:-1] + (b"," if rest else b"")
    head = _dump_json(others)[:-1] + b',"storage":' + opened + b'"files":[' + before
    return head, after + b"]}}"


def _insert_content(entries: bytes, content: bytes) -> tuple[bytes, ...]:
    """Give the first of these files its content.

    The content may have a megabyte. To check and escape base64 again would take half of the time
    of the whole config.
    """
    before, source, after = entries.partition(_NO_CONTENT.encode())
    return before + source, base64.b64encode(content), after


def _dump_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


HEADERS_SINCE = "3.1.0"
"""The first version whose configs can have HTTP headers; older ones send a token in the URL."""


def build_pointer(
    server: str, pool: str, version: str, *, authorities: bytes = b"", token: str = ""
) -> decode.Json:
    """Return the pointer config for a pool, in one of the versions served.

    ``server`` is the URL of the config server without a path, as ``https://api-int.example:22623``.
    ``authorities`` are certificates in PEM that sign the server's certificate; without them the
    machine trusts the CAs of its image. From 3.1 the token is a header. Before, it is part of the
    URL, which proxies may log. Raises `UsageError` for an invalid URL or certificate.
    """
    source, headers = f"{pointer.check_server_url(server)}/config/{quote(pool, safe='')}", {}
    if token and version >= HEADERS_SINCE:
        headers["Authorization"] = f"Bearer {token}"
    elif token:
        source = f"{source}?token={quote(token, safe='')}"
    return pointer.point_to(source, version, headers, authorities=authorities)
