"""Logins of the bootstrap registry, and the htpasswd files that docker-registry reads.

Two logins: one may push and never leaves this host, the other may only pull and goes to nodes.
htpasswd gives every login every permission, so each process has a file with its own login alone.
"""

import ctypes
import json
import secrets
import string
from dataclasses import dataclass, field
from pathlib import Path

from treenail.api.decode import Fields, load_json
from treenail.api.unknown_fields import reject_unknown_fields
from treenail.errors import HostError
from treenail.installer.inputs.install_files import InstallFiles
from treenail.registry.logins import Login

PUSHER, PULLER = "treenail-push", "treenail-pull"
_FIELDS = ("pushPassword", "pullPassword", "uploadKey")
_LIMIT = 4096  # bytes
_PASSWORD_BYTES = 32
_LIBRARIES = ("libcrypt.so.2", "libcrypt.so.1", None)
"""In Fedora, in Debian, and in C libraries that have crypt themselves."""
_SALT_DIGITS = f"./{string.ascii_letters}{string.digits}"
_LAST_DIGITS = ".Oeu"
_HASH_LENGTH = 60


@dataclass(frozen=True, slots=True)
class RegistryLogins:
    """Passwords of the two logins, and the key that signs the state of uploads."""

    push: Login
    pull: Login
    upload_key: str = field(repr=False)


def open_logins(files: InstallFiles, path: Path) -> RegistryLogins:
    """Read the logins of an earlier run, or create them; raise `FileError` or `ConfigError`.

    Nodes have the login for pulls, and an interrupted upload continues with the same key only.
    """
    content = files.read(path, limit=_LIMIT)
    if content is None:
        document = {name: secrets.token_urlsafe(_PASSWORD_BYTES) for name in _FIELDS}
        content = json.dumps(document).encode()
        files.write(path, content)
    fields = Fields.from_json(load_json(content, where=str(path)), str(path))
    reject_unknown_fields(fields, _FIELDS)
    push, pull, upload_key = (fields.get_required_text(name) for name in _FIELDS)
    return RegistryLogins(Login(PUSHER, push), Login(PULLER, pull), upload_key)


def format_htpasswd(login: Login) -> str:
    """Return a htpasswd file with one login; raise `HostError` without bcrypt."""
    return f"{login.user}:{_compute_bcrypt(login.password)}\n"


def _compute_bcrypt(password: str) -> str:
    """Hash a password with the crypt(3) of this host; docker-registry reads bcrypt only."""
    # The lowest cost: docker-registry computes the hash for each request, and a random password
    # of 256 bits cannot be guessed.
    salt = "".join(secrets.choice(_SALT_DIGITS) for _ in range(21)) + secrets.choice(_LAST_DIGITS)
    for name in _LIBRARIES:
        try:
            crypt = ctypes.CDLL(name).crypt
        except (OSError, AttributeError):
            continue
        crypt.restype = ctypes.c_char_p
        crypt.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        found: bytes | None = crypt(password.encode(), f"$2b$04${salt}".encode())
        if found and found.startswith(b"$2b$") and len(found) == _HASH_LENGTH:
            return found.decode("ascii")
    raise HostError(
        "cannot make the logins of the bootstrap registry: crypt(3) of this host has no bcrypt",
        remedy="run: apt-get install libcrypt1, or: dnf install libxcrypt; or set registry.type to "
        "External",
    )
