"""Plan the SSH keys and the password of ``core``, the only user that a config may change."""

from collections.abc import Iterator

from treenail.config import node_paths
from treenail.config.drift import EntryKind, ExpectedEntry, compare_entry
from treenail.config.wanted import WantedState
from treenail.update.steps.inventory import ABSENT_ENTRY, KEY_DIRECTORIES, Inventory
from treenail.update.steps.ownership import Ownership
from treenail.update.steps.steps import SetPassword, SetSshKeys

LOCKED = "*"
"""The password field of a user without a password, as the Machine Config Daemon sets it.

A login by key still works with it.
"""

KEYS_MODE = 0o600
KEY_DIRECTORY_MODE = 0o700


def format_key_file(keys: tuple[str, ...]) -> str:
    """Return the content of the key file, one line for each key."""
    return "".join(f"{key}\n" for key in keys)


def plan_core_user(
    old: Ownership, new: WantedState, inventory: Inventory, notes: list[str]
) -> Iterator[SetSshKeys | SetPassword]:
    """Return the steps for ``core``, who loses keys and password if the config no longer has it."""
    notes += [
        f"skipped user {name}: a config can set keys and password of {node_paths.CORE_USER} only"
        for name in new.users
        if name != node_paths.CORE_USER
    ]
    user = new.users.get(node_paths.CORE_USER)
    if user is None and node_paths.CORE_USER not in old.users:
        return
    if not inventory.has_core_user:
        notes.append(
            f"skipped keys and password of {node_paths.CORE_USER}: this machine has no such user"
        )
        return
    keys = user.ssh_keys if user else ()
    reason = "the config no longer has them" if user is None else "keys differ"
    if _has_other_keys(keys, inventory):
        yield SetSshKeys(node_paths.CORE_USER, keys, reason)
    password = (user.password_hash if user else None) or LOCKED
    # Without a line in the shadow file there is no password to remove.
    present = LOCKED if inventory.password_hash is None else inventory.password_hash
    if password == LOCKED and present.startswith(("*", "!")):
        return
    if password != inventory.password_hash:
        reason = "the config has none" if password == LOCKED else "password differs"
        yield SetPassword(node_paths.CORE_USER, password, reason)


def _has_other_keys(keys: tuple[str, ...], inventory: Inventory) -> bool:
    key_file = inventory.entries.get(node_paths.AUTHORIZED_KEYS, ABSENT_ENTRY)
    if not keys and key_file.kind is EntryKind.NOTHING:
        return False
    owner = node_paths.CORE_USER
    expected = (
        ExpectedEntry(
            node_paths.AUTHORIZED_KEYS,
            EntryKind.FILE,
            format_key_file(keys),
            KEYS_MODE,
            owner,
            owner,
        ),
        *(
            ExpectedEntry(path, EntryKind.DIRECTORY, None, KEY_DIRECTORY_MODE, owner, owner)
            for path in KEY_DIRECTORIES
        ),
    )
    return any(
        compare_entry(entry, inventory.entries.get(entry.path, ABSENT_ENTRY)) for entry in expected
    )
