"""Keys and password of the one user whose a config may set."""

from collections.abc import Iterator

from treenail.config import names
from treenail.config.drift import EntryKind, ExpectedEntry, compare_entry
from treenail.config.wanted import WantedState
from treenail.update.steps.inventory import ABSENT_ENTRY, KEY_DIRECTORIES, Inventory
from treenail.update.steps.ownership import Ownership
from treenail.update.steps.steps import SetPassword, SetSshKeys

LOCKED = "*"
"""The password field of a user who has no password; logging in with a key still works."""

KEYS_MODE = 0o600
KEY_DIRECTORY_MODE = 0o700


def format_key_file(keys: tuple[str, ...]) -> str:
    """The text of the file of keys, a line for each."""
    return "".join(f"{key}\n" for key in keys)


def plan_core_user(
    old: Ownership, new: WantedState, seen: Inventory, notes: list[str]
) -> Iterator[SetSshKeys | SetPassword]:
    """What it takes; a user whom the config lets go of has no keys, and a password nobody knows."""
    notes += [
        f"user {name} is left out: a config sets keys and password of {names.CORE_USER} only"
        for name in new.users
        if name != names.CORE_USER
    ]
    user = new.users.get(names.CORE_USER)
    if user is None and names.CORE_USER not in old.users:
        return
    if not seen.has_core_user:
        notes.append(
            f"there is no user {names.CORE_USER} on this machine: keys and password left out"
        )
        return
    keys = user.ssh_keys if user else ()
    reason = "the config no longer has them" if user is None else "others are there"
    if _has_other_keys(keys, seen):
        yield SetSshKeys(names.CORE_USER, keys, reason)
    password = (user.password_hash if user else None) or LOCKED
    # Without a line there is no password to take away.
    present = LOCKED if seen.password_hash is None else seen.password_hash
    if password == LOCKED and present.startswith(("*", "!")):
        return
    if password != seen.password_hash:
        reason = "the config has none" if password == LOCKED else "the config has another"
        yield SetPassword(names.CORE_USER, password, reason)


def _has_other_keys(keys: tuple[str, ...], seen: Inventory) -> bool:
    there = seen.entries.get(names.AUTHORIZED_KEYS, ABSENT_ENTRY)
    if not keys and there.kind is EntryKind.NOTHING:
        return False
    who = names.CORE_USER
    expected = (
        ExpectedEntry(
            names.AUTHORIZED_KEYS, EntryKind.FILE, format_key_file(keys), KEYS_MODE, who, who
        ),
        *(
            ExpectedEntry(path, EntryKind.DIRECTORY, None, KEY_DIRECTORY_MODE, who, who)
            for path in KEY_DIRECTORIES
        ),
    )
    return any(
        compare_entry(entry, seen.entries.get(entry.path, ABSENT_ENTRY)) for entry in expected
    )
