"""Names of rendered MachineConfigs: equal specs have equal names."""

import hashlib

from treenail.api.decode import Json
from treenail.config.goyaml import encode_yaml

# The Machine Config Operator hashes these bytes into every name. Without them, a migrated cluster
# would roll out new configs to all nodes that differ only in the name.
_SALT = bytes.fromhex(
    "107ccee48b38afaf4fe586769d9ad36e195d2ffdac6a2507ae0da0b96e115734db830cceda8d7487"
    "bcb5c097e93e7ea54053b3770fa8d0c5926b3ae385bcee1a211aebca20ad1fea2990944f06ce1716"
)


def rendered_name(pool: str, spec: Json) -> str:
    """Return ``rendered-<pool>-<hash>`` for a merged MachineConfig's spec.

    ``spec`` has all seven keys of a MachineConfigSpec, as `treenail.config.merge` returns it:
    the Machine Config Operator also hashes empty values.
    """
    return f"rendered-{pool}-{digest(spec)}"


def digest(*documents: Json) -> str:
    """Return the salted hash of the documents, in order, as 32 hex digits."""
    # MD5 only makes names here. Without usedforsecurity=False hashlib rejects it in FIPS mode.
    salted = hashlib.md5(_SALT, usedforsecurity=False)
    for document in documents:
        salted.update(encode_yaml(document))
    return salted.hexdigest()
