"""The config of a NodePool, packed: in token Secrets, and in the ConfigMap of an update in place.

A payload is a packed Ignition config with the MachineConfig in its file `node_paths.SERVED_CONFIG`.
"""

import base64
import gzip
import json
import re
import zlib

from treenail.api import decode, machineconfig
from treenail.api.hosted import token_secret
from treenail.api.ignition import model, parser
from treenail.config import node_paths
from treenail.encoding import json_text
from treenail.errors import ConfigError

LIMIT = 900 * 1024
"""Maximum length of a packed config; the API server accepts Secrets and ConfigMaps of 1 MiB."""
_GZIP = 31
_RESERVED = re.compile("[^A-Za-z0-9_.~-]+")
"""What a URL cannot have as it is."""
_LARGEST = 3


class PayloadTooLargeError(ConfigError):
    """A config that no Secret and no ConfigMap can hold; its message names the largest files."""


def build_payload(config: machineconfig.MachineConfig) -> str:
    """Return a payload; raise `PayloadTooLargeError`."""
    text = json.dumps(config.to_json(), sort_keys=True, separators=(",", ":"))
    # Escaped, because gzip cannot compress base64 well.
    source = _RESERVED.sub(lambda sign: "".join(f"%{byte:02X}" for byte in sign[0].encode()), text)
    file = {"path": node_paths.SERVED_CONFIG, "mode": 0o600, "overwrite": True}
    files = [{**file, "contents": {"source": f"data:,{source}"}}]
    ignition = {"ignition": {"version": "3.2.0"}, "storage": {"files": files}}
    return _check_size(config, _pack(json.dumps(ignition)))


def pack_config(config: machineconfig.MachineConfig) -> str:
    """Return the packed JSON of a config, always the same; raise `PayloadTooLargeError`."""
    text = json.dumps(config.to_json(), separators=(",", ":"), sort_keys=True)
    return _check_size(config, _pack(text))


def _pack(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _check_size(config: machineconfig.MachineConfig, packed: str) -> str:
    if len(packed) <= LIMIT:
        return packed
    files = parser.parse_ignition(config.config).files
    sizes = sorted((-len(file.contents.source or ""), file.path) for file in files)
    largest = ", ".join(f"{path:.200} ({-size} bytes)" for size, path in sizes[:_LARGEST])
    raise PayloadTooLargeError(
        f"the config has {len(packed)} bytes compressed, and the limit is {LIMIT}; largest files: "
        f"{largest}",
        remedy="shrink these files, or move them into the OS image",
    )


def unpack_payload(payload: str, limit: int) -> decode.Json:
    """Return the MachineConfig in a payload; ``limit`` is in bytes. Raises `ConfigError`.

    That of HyperShift has other files too.
    """
    ignition = decode.Fields(_unpack(payload, limit, "payload"), "payload")
    for file in ignition.get_object("storage").iter_objects("files"):
        if file.get_text("path") == node_paths.SERVED_CONFIG:
            contents = model.Contents.from_fields(file.get_object("contents")).decode_bytes()
            return _load(contents, node_paths.SERVED_CONFIG)
    raise ConfigError(f"payload: expected a file {node_paths.SERVED_CONFIG}, found none")


def unpack_secret(secret: decode.Json, limit: int) -> decode.Json:
    """Return the MachineConfig of a token Secret; raise `ConfigError`."""
    if packed := token_secret.read_text(secret, "config"):
        return _unpack(packed, limit, "config")
    return unpack_payload(token_secret.read_text(secret, "payload"), limit)


def _unpack(packed: str, limit: int, where: str) -> decode.Json:
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        text = unpacker.decompress(json_text.decode_base64(packed), limit)
        if unpacker.eof:
            return _load(text, where)
    except (ValueError, zlib.error):  # Their texts would quote a part of the config.
        pass
    raise ConfigError(f"{where}: expected gzip in base64 of at most {limit} bytes of text")


def _load(text: bytes, where: str) -> decode.Json:
    return dict(decode.Fields.from_json(decode.load_json(text, where=where), where).values)
