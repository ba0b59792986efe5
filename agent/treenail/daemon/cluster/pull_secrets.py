"""Pull secrets on disk, where rpm-ostree and bootc look; they never wait for an update."""

import json
import logging
import os
from dataclasses import dataclass

from treenail.config import logins
from treenail.config.logins import CredentialHistory
from treenail.config.pullsecret import (
    PullSecret,
    encode_pull_secret,
    merge_pull_secrets,
    parse_pull_secret,
)
from treenail.daemon.configuration.inspect import OWNERSHIP_FILE as MANAGED
from treenail.daemon.settings.settings import AgentSettings
from treenail.errors import CredentialError, FileError, LedgerError
from treenail.host.filesystem.files import FileSpec, HostFiles
from treenail.host.filesystem.root import Root
from treenail.log import MessageId
from treenail.update.steps import ownership

log = logging.getLogger(__name__)

AUTH_FILE = "/var/lib/treenail/auth.json"
RPM_OSTREE_AUTH = "/run/ostree/auth.json"
BOOTC_AUTH = "/etc/ostree/auth.json"
ORIGINAL_AUTH = "/run/ostree/auth.json.before-treenail"
KUBECONFIG = "/etc/kubernetes/kubeconfig"
"""With which any node could join: it is nobody's but root's, unless a config says otherwise."""
LOGIN_HISTORY = "/var/lib/treenail/pull-secret.good.json"
"""What using logins has shown, and those that worked."""
_LIMIT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _PullSecretSource:
    path: str
    last_good: str
    """Where its content is kept once it was understood."""


class PullSecrets:
    """The cluster's pull secret and the internal registry's, merged and put in place.

    A source that is broken, or has vanished, counts with what was last understood of it, also
    after a restart. One that never was there is nothing; without any, pulls are anonymous, and
    neither a file nor a link of ours is left.

    A new login for a registry takes the place of the one before, which is kept until the new one
    was used with success, and comes back when the registry refuses the new one.
    """

    def __init__(self, root: Root, files: HostFiles, settings: AgentSettings) -> None:
        self._root = root
        self._files = files
        self._cluster = _PullSecretSource(
            settings.pull_secret, "/var/lib/treenail/pull-secret.cluster.json"
        )
        self._internal = _PullSecretSource(
            settings.internal_pull_secret, "/var/lib/treenail/pull-secret.internal.json"
        )
        self._merged = PullSecret()

    def install_secrets(self) -> tuple[str, ...]:
        """Put the pull secrets in place; returns what is wrong, a sentence each.

        At every moment there is either the earlier or the new secret to pull with. What is in
        place already is not written again. Never raises for what is on the disk, and no sentence
        repeats anything of a secret.
        """
        problems: list[str] = []
        self._restrict_mode(KUBECONFIG, problems)
        cluster = self._read_source(self._cluster, problems)
        internal = self._read_source(self._internal, problems)
        self._merged = merge_pull_secrets(internal, cluster)
        try:
            if self._merged.credentials:
                in_place = self._parse_file_or_none(AUTH_FILE) or PullSecret()
                known = logins.renew_history(self._read_login_history(), in_place, self._merged)
                self._write_logins(known)
                problems += logins.describe_rejections(known, self._merged)
                self._link_auth_file(RPM_OSTREE_AUTH, problems, backup_path=ORIGINAL_AUTH)
                self._link_auth_file(BOOTC_AUTH, problems)
            elif not problems:
                self._remove_auth_files()
        except FileError as error:
            problems.append(str(error))
        return tuple(problems)

    def handle_rejected_login(self, image: str) -> bool:
        """A registry refused the login for this pull spec; whether there is now another to try.

        Raises `FileError`.
        """
        known = self._read_login_history()
        found = logins.record_rejection(known, self._merged, image)
        if found is None:
            return False
        self._write_logins(found)
        return len(found.rejected_digests) > len(known.rejected_digests)

    def confirm_login(self, image: str) -> None:
        """This image was pulled, with the login in place; raises `FileError`."""
        self._write_logins(logins.record_success(self._read_login_history(), self._merged, image))

    def _read_login_history(self) -> CredentialHistory:
        content = self._files.read_file(LOGIN_HISTORY, limit=2 * _LIMIT)
        try:
            return (
                CredentialHistory()
                if content is None
                else logins.decode_history(content, where=LOGIN_HISTORY)
            )
        except CredentialError as error:
            log.warning("%s; which logins worked has to be found out anew", error)
            return CredentialHistory()

    def _write_logins(self, known: CredentialHistory) -> None:
        """In this order: what a cut in between leaves is put right by the next `install_secrets`."""
        if not known.is_empty:
            self._write_if_changed(LOGIN_HISTORY, logins.encode_history(known))
        elif self._files.has_entry(LOGIN_HISTORY):
            self._files.remove_file(LOGIN_HISTORY)
        if self._merged.credentials:
            self._write_auth_file(logins.select_credentials(known, self._merged))

    def _read_source(self, source: _PullSecretSource, problems: list[str]) -> PullSecret:
        problem = ""
        try:
            found = self._parse_file(source.path)
            if found is not None:
                self._save_last_good(source, found, problems)
                return found
        except (FileError, CredentialError) as error:
            problem = str(error)
        last = None
        try:
            last = self._parse_file(source.last_good)
        except (FileError, CredentialError) as error:
            problems.append(str(error))
        if last is not None:
            problem = problem or f"{source.path} is gone"
            problems.append(f"{problem}; the logins last read from it stay in use")
        elif problem:
            problems.append(f"{problem}; nothing was read from it before")
        return last or PullSecret()

    def _save_last_good(
        self, source: _PullSecretSource, found: PullSecret, problems: list[str]
    ) -> None:
        try:
            self._write_if_changed(source.last_good, encode_pull_secret(found))
        except FileError as error:
            problems.append(str(error))

    def _parse_file(self, path: str) -> PullSecret | None:
        """None when there is no file."""
        content = self._files.read_file(path, limit=_LIMIT)
        return None if content is None else parse_pull_secret(content, where=path)

    def _parse_file_or_none(self, path: str) -> PullSecret | None:
        try:
            return self._parse_file(path)
        except CredentialError:
            return None

    def _write_auth_file(self, secret: PullSecret) -> None:
        if self._write_if_changed(AUTH_FILE, encode_pull_secret(secret)):
            log.info(
                "pull secrets changed: logins for %d registries",
                len(secret.credentials),
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )

    def _write_if_changed(self, path: str, content: bytes) -> bool:
        """Whether that was a change; looks first, so that nothing is flushed every time."""
        file = FileSpec(path, content, 0o600)
        return not self._files.has_file(file) and bool(self._files.write_files([file]))

    def _restrict_mode(self, path: str, problems: list[str]) -> None:
        """Have the file readable by its owner alone, if it is nobody else's to say.

        A link is let be, and so is a file of the config, which has its mode from there.
        """
        try:
            if self._files.read_link(path) is not None or self._is_managed(path):
                return
            content = self._files.read_file(path, limit=_LIMIT)
            if content is not None and self._write_if_changed(path, content):
                log.warning("%s was open to others, and is so no more", path)
        except FileError as error:
            problems.append(str(error))

    def _is_managed(self, path: str) -> bool:
        content = self._files.read_file(MANAGED, limit=_LIMIT)
        try:
            return path in ownership.from_json(json.loads(content or b"null")).paths
        except (ValueError, LedgerError):
            return False  # whoever needs it says what is wrong with it

    def _link_auth_file(self, path: str, problems: list[str], *, backup_path: str = "") -> None:
        """Link to the merged secret; what somebody else's file holds is kept ``backup_path``, or stays.

        The link is relative, so that it also leads there from outside of a container.
        """
        try:
            target = os.path.relpath(
                self._root.resolve_path(AUTH_FILE), self._root.resolve_entry(path).parent
            )
            found = self._files.read_link(path)
            if found == target:
                return
            content = self._files.read_file(path, limit=_LIMIT) if found is None else None
            if content is not None:
                if not backup_path:
                    problems.append(
                        f"{path} is somebody else's file and is left alone: pulls that read it do "
                        f"without the cluster's pull secrets until it is removed"
                    )
                    return
                if self._write_if_changed(backup_path, content):
                    log.info("kept what %s held in %s", path, backup_path)
            self._files.make_symlink(path, target)
        except FileError as error:
            problems.append(str(error))

    def _remove_auth_files(self) -> None:
        for path in (RPM_OSTREE_AUTH, BOOTC_AUTH):
            found = self._files.read_link(path)
            if found is not None and found.endswith(AUTH_FILE):
                self._files.remove_file(path)
        if self._files.has_entry(LOGIN_HISTORY):
            self._files.remove_file(LOGIN_HISTORY)
        if self._files.read_file(AUTH_FILE, limit=2 * _LIMIT) is not None:
            self._files.remove_file(AUTH_FILE)
            log.info(
                "there are no pull secrets any more; pulls are anonymous",
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )
