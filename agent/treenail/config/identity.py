"""Equal meaning, equal name: what a rendered MachineConfig is called."""

import hashlib

from treenail.api.decode import Json
from treenail.config.goyaml import encode_yaml

# The reference mixes these bytes into every name; without them a cluster that is taken over
# would roll all its nodes to configs that differ in nothing but the name.
_SALT = bytes.fromhex(
    "107ccee48b38afaf4fe586769d9ad36e195d2ffdac6a2507ae0da0b96e115734db830cceda8d7487"
    "bcb5c097e93e7ea54053b3770fa8d0c5926b3ae385bcee1a211aebca20ad1fea2990944f06ce1716"
)


def rendered_name(pool: str, spec: Json) -> str:
    """``rendered-<pool>-<hash>`` for a merged MachineConfig's spec.

    ``spec`` has all seven keys of a MachineConfigSpec, as `treenail.config.merge` returns it:
    the reference hashes empty values too.
    """
    return f"rendered-{pool}-{digest(spec)}"


def digest(*documents: Json) -> str:
    """The salted hash of the documents, in order: 32 hex digits."""
    # MD5 names things here and protects nothing; hashlib may refuse it in FIPS mode otherwise.
    salted = hashlib.md5(_SALT, usedforsecurity=False)
    for document in documents:
        salted.update(encode_yaml(document))
    return salted.hexdigest()
