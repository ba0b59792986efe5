"""Keys and password of the one user whose a config may set."""

from collections.abc import Iterator

from treenail.config import names
from treenail.config.drift import Expected, Kind, drifted
from treenail.config.wanted import Wanted
from treenail.update.steps.inventory import KEY_DIRECTORIES, NOT_THERE, Seen
from treenail.update.steps.ownership import Managed
from treenail.update.steps.steps import SetKeys, SetPassword

LOCKED = "*"
"""The password field of a user who has no password; logging in with a key still works."""

KEYS_MODE = 0o600
KEY_DIRECTORY_MODE = 0o700


def key_file(keys: tuple[str, ...]) -> str:
    """The text of the file of keys, a line for each."""
    return "".join(f"{key}\n" for key in keys)


def logins(
    old: Managed, new: Wanted, seen: Seen, notes: list[str]
) -> Iterator[SetKeys | SetPassword]:
    """What it takes; a user whom the config lets go of has no keys, and a password nobody knows."""
    notes += [
        f"user {name} is left out: a config sets keys and password of {names.LOGIN} only"
        for name in new.users
        if name != names.LOGIN
    ]
    user = new.users.get(names.LOGIN)
    if user is None and names.LOGIN not in old.users:
        return
    if not seen.login:
        notes.append(f"there is no user {names.LOGIN} on this machine: keys and password left out")
        return
    keys = user.ssh_keys if user else ()
    reason = "the config no longer has them" if user is None else "others are there"
    if _keys_differ(keys, seen):
        yield SetKeys(names.LOGIN, keys, reason)
    password = (user.password_hash if user else None) or LOCKED
    # Without a line there is no password to take away.
    present = LOCKED if seen.password_hash is None else seen.password_hash
    if password == LOCKED and present.startswith(("*", "!")):
        return
    if password != seen.password_hash:
        reason = "the config has none" if password == LOCKED else "the config has another"
        yield SetPassword(names.LOGIN, password, reason)


def _keys_differ(keys: tuple[str, ...], seen: Seen) -> bool:
    there = seen.found.get(names.AUTHORIZED_KEYS, NOT_THERE)
    if not keys and there.kind is Kind.NOTHING:
        return False
    who = names.LOGIN
    expected = (
        Expected(names.AUTHORIZED_KEYS, Kind.FILE, key_file(keys), KEYS_MODE, who, who),
        *(
            Expected(path, Kind.DIRECTORY, None, KEY_DIRECTORY_MODE, who, who)
            for path in KEY_DIRECTORIES
        ),
    )
    return any(drifted(entry, seen.found.get(entry.path, NOT_THERE)) for entry in expected)
