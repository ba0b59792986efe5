"""How container images and their layers are named in an OSTree repository, as ostree-ext does."""

import re

STATEROOT = "fedora-coreos"
SCHEME = "ostree-unverified-registry:"
DIGEST_KEY = "ostree.manifest-digest"
MANIFEST_KEY = "ostree.manifest"
CONFIGURATION_KEY = "ostree.container.image-config"
ETC_FILTER = r"--tar-pathname-filter=^(\./)?etc(/|$),usr/etc\2"
"""Option of ``ostree commit``: an image has /etc, its commit has that below /usr/etc."""


def layer_ref(digest: str) -> str:
    """The ref of a layer's commit."""
    return f"ostree/container/blob/{_escaped(digest)}"


def image_ref(pull_spec: str) -> str:
    """The ref of an image's merged commit."""
    return f"ostree/container/image/{_escaped(f'docker://{pull_spec}')}"


def _escaped(text: str) -> str:
    """The text in a ref: bootc does nothing in a repository with a ref that it cannot read."""
    # Only a slash after a letter or digit, and before something else, is written as it is.
    return re.sub(
        r"(?<![A-Za-z0-9])/|/$|[^A-Za-z0-9/-]",
        lambda found: "__" if found.group() == "_" else f"_{ord(found.group()):02X}_",
        text,
    )
