"""Files that contain secrets, by their path and mode."""

import re
from fnmatch import translate
from functools import cache

from treenail.config import node_paths

WITHHELD = "<withheld>"

_OTHERS_READ = 0o004
_SECRET_PATHS = (
    "/var/lib/kubelet/config.json", "/etc/ostree/auth.json", "/run/ostree/auth.json",
    "/etc/containers/auth.json", "*/.docker/config.json", "*/.dockercfg", "*/.netrc",
    "/etc/shadow*", "/etc/gshadow*", "*kubeconfig*", "*/ipsec.secrets", "/etc/ipsec.d/*.secrets",
    "/etc/NetworkManager/system-connections/*", "/etc/wireguard/*", "*.key", "*-key.pem",
    "*/ssh_host_*_key", "*/id_rsa", "*/id_ecdsa", "*/id_ed25519", "*.p12", "*.pfx", "*.jks",
    "*.keytab", "/var/lib/treenail/auth.json",
)  # fmt: skip


def is_secret_file(path: str, mode: int) -> bool:
    """Return whether the file is not world-readable, or its path is a known place of secrets."""
    return (
        not mode & _OTHERS_READ
        or path in node_paths.CREDENTIALS
        or _compile_secret_paths().match(path) is not None
    )


@cache
def _compile_secret_paths() -> re.Pattern[str]:
    # One pattern: a config with thousands of files has each path compared.
    return re.compile("|".join(map(translate, _SECRET_PATHS)))
