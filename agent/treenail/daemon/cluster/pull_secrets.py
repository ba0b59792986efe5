"""Pull secrets, installed where rpm-ostree and bootc read them, independently of updates.

During an installation the node pulls from the registry of the bootstrap host. Ignition writes its
files beside the rendered config (`treenail.config.bootstrap_registry`), and
`BootstrapRegistryFiles` removes them independently of updates, too.
"""

import logging
import os
from dataclasses import dataclass

from treenail import errors
from treenail.config import bootstrap_registry, node_paths, pullsecret
from treenail.daemon.agent_settings import AgentSettings
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files, root_directory
from treenail.log import MessageId
from treenail.update.steps import inventory

log = logging.getLogger(__name__)


class BootstrapRegistryFiles:
    """Keeps the files until the hand-over, and then removes those that name the registry."""

    def __init__(self, files: atomic_files.HostFiles) -> None:
        self._files = files
        self.registry = ""
        """``HOST:PORT`` while the record exists, as of the last `sync_files`."""
        self.removed = ""
        """``HOST:PORT`` if the last `sync_files` removed the files."""

    def sync_files(self, handed_over: str) -> tuple[str, ...]:
        """Remove the files if they belong to the registry ``handed_over``.

        Returns one sentence for each problem. A removal continues after a kill at any point: the
        record goes last. A running pull has read its configuration, and the next one asks the
        final registry, so that the files can go at any time.
        """
        self.removed = ""
        try:
            record = read_record(self._files)
            self.registry = "" if record is None else record.registry
            if record is not None and record.registry == handed_over:
                self._remove_files(record)
                self.registry, self.removed = "", record.registry
        except (errors.ConfigError, errors.FileError) as error:
            return (f"{error}; {error.remedy}" if error.remedy else str(error),)
        return ()

    def _remove_files(self, record: bootstrap_registry.BootstrapRegistryRecord) -> None:
        mirror = self._files.read_file(
            bootstrap_registry.MIRROR_FILE, limit=bootstrap_registry.RECORD_LIMIT
        )
        if mirror is not None:
            if bootstrap_registry.is_mirror_file_of(mirror, record.registry):
                self._files.remove_file(bootstrap_registry.MIRROR_FILE)
            else:
                log.warning(
                    "left %s alone: it names another registry than %s",
                    bootstrap_registry.MIRROR_FILE,
                    record.registry,
                )
        self._files.remove_file(record.ca_path)
        self._files.remove_file(bootstrap_registry.RECORD_FILE)
        log.info(
            "removed mirror, CA and login of the bootstrap registry %s: the final registry has the "
            "images",
            record.registry,
            extra={"message_id": MessageId.CREDENTIALS_CHANGED},
        )


def read_record(files: atomic_files.HostFiles) -> bootstrap_registry.BootstrapRegistryRecord | None:
    """Read the record; None without one. Raises `ConfigError` and `FileError`."""
    content = files.read_file(bootstrap_registry.RECORD_FILE, limit=bootstrap_registry.RECORD_LIMIT)
    if content is None:
        return None
    try:
        return bootstrap_registry.decode_record(content, where=bootstrap_registry.RECORD_FILE)
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"cannot use the bootstrap registry: {error}",
            remedy=f"if the installation is complete, run: rm {bootstrap_registry.RECORD_FILE} "
            f"{bootstrap_registry.MIRROR_FILE}",
        ) from error


AUTH_FILE = "/var/lib/treenail/auth.json"
# rpm-ostree and bootc read the first that exists of /run/ostree, /etc/ostree and /usr/lib/ostree,
# merge nothing, and never read podman's paths. Without any of them pulls are anonymous. As the
# MCD does: /run for rpm-ostree, /etc for bootc.
RPM_OSTREE_AUTH = "/run/ostree/auth.json"
BOOTC_AUTH = "/etc/ostree/auth.json"
ORIGINAL_AUTH = "/run/ostree/auth.json.before-treenail"
LOGIN_HISTORY = "/var/lib/treenail/pull-secret.good.json"
"""Which logins registries accepted and rejected."""
_LIMIT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _PullSecretSource:
    path: str
    last_good: str
    """Path of the copy of its last valid content."""


class PullSecrets:
    """The pull secrets of the cluster and of its internal registry, merged into one file.

    While the record of the registry on the bootstrap host exists, its login is among them.

    For a source that is invalid, empty or missing, the copy of its last valid content is used,
    also after a restart; ``{"auths": {}}`` removes its logins. A source that never existed is
    empty. Without any login, pulls are anonymous, and the agent removes its files and links.

    A new login replaces the previous one of the same registry. The previous one is stored until a
    pull succeeded with the new one, and is used again when the registry rejects the new one.
    """

    def __init__(
        self, root: root_directory.Root, files: atomic_files.HostFiles, settings: AgentSettings
    ) -> None:
        self._root = root
        self._files = files
        self._cluster = _PullSecretSource(
            settings.pull_secret, "/var/lib/treenail/pull-secret.cluster.json"
        )
        self._internal = _PullSecretSource(
            settings.internal_pull_secret, "/var/lib/treenail/pull-secret.internal.json"
        )
        self._merged = pullsecret.PullSecret()

    def install_secrets(self) -> tuple[str, ...]:
        """Install the pull secrets; return one sentence for each problem.

        Replaces files atomically and only when they differ. Never raises for the content of files,
        and no sentence contains any part of a secret.
        """
        problems: list[str] = []
        self._restrict_mode(node_paths.KUBECONFIG, problems)
        cluster = self._read_source(self._cluster, problems)
        internal = self._read_source(self._internal, problems)
        logins = pullsecret.merge_pull_secrets(internal, cluster)
        self._merged = pullsecret.merge_pull_secrets(logins, self._read_bootstrap_login())
        try:
            if self._merged.credentials:
                installed = self._parse_file_or_none(AUTH_FILE) or pullsecret.PullSecret()
                history = pullsecret.renew_history(
                    self._read_login_history(), installed, self._merged
                )
                self._write_logins(history)
                problems += pullsecret.describe_rejections(history, self._merged)
                self._link_auth_file(RPM_OSTREE_AUTH, problems, backup_path=ORIGINAL_AUTH)
                self._link_auth_file(BOOTC_AUTH, problems)
            elif not problems:
                self._remove_auth_files()
        except errors.FileError as error:
            problems.append(str(error))
        return tuple(problems)

    def handle_rejected_login(self, image: str) -> bool:
        """Record that the image's registry rejected the login; return whether another is left.

        Raises `FileError`.
        """
        history = self._read_login_history()
        rejected = pullsecret.record_rejection(history, self._merged, image)
        if rejected is None:
            return False
        self._write_logins(rejected)
        return len(rejected.rejected_digests) > len(history.rejected_digests)

    def confirm_login(self, image: str) -> None:
        """Record that the image was pulled with the installed login. Raises `FileError`."""
        self._write_logins(
            pullsecret.record_success(self._read_login_history(), self._merged, image)
        )

    def _read_login_history(self) -> pullsecret.CredentialHistory:
        content = self._files.read_file(LOGIN_HISTORY, limit=2 * _LIMIT)
        try:
            return (
                pullsecret.CredentialHistory()
                if content is None
                else pullsecret.decode_history(content, where=LOGIN_HISTORY)
            )
        except errors.CredentialError as error:
            log.warning("%s; starting without a history of logins", error)
            return pullsecret.CredentialHistory()

    def _write_logins(self, history: pullsecret.CredentialHistory) -> None:
        """Write the history first; the next `install_secrets` repairs an interruption."""
        if not history.is_empty:
            self._write_if_changed(LOGIN_HISTORY, pullsecret.encode_history(history))
        elif self._files.has_entry(LOGIN_HISTORY):
            self._files.remove_file(LOGIN_HISTORY)
        if self._merged.credentials:
            self._write_auth_file(pullsecret.select_credentials(history, self._merged))

    def _read_source(self, source: _PullSecretSource, problems: list[str]) -> pullsecret.PullSecret:
        problem, absence = "", f"{source.path} no longer exists; its last valid logins stay in use"
        try:
            content = self._files.read_file(source.path, limit=_LIMIT)
            if content is not None and content.strip():
                pull_secret = pullsecret.parse_pull_secret(content, where=source.path)
                if pull_secret.ignored:
                    problems.append(
                        f"{source.path}: {pull_secret.ignored}; put the logins into auths"
                    )
                self._save_last_good(source, pull_secret, problems)
                return pull_secret
            if content is not None:
                # A program that rewrites a file in place empties it first.
                absence = (
                    f"{source.path} is empty; its last valid logins stay in use; "
                    'write {"auths": {}} into it to remove them'
                )
        except (errors.FileError, errors.CredentialError) as error:
            problem = str(error)
        last = None
        try:
            last = self._parse_file(source.last_good)
        except (errors.FileError, errors.CredentialError) as error:
            problems.append(str(error))
        if problem and last is None:
            problems.append(f"{problem}; it has no earlier valid content")
        elif problem:
            problems.append(f"{problem}; its last valid logins stay in use")
        elif last is not None and last.credentials:
            problems.append(absence)
        return last or pullsecret.PullSecret()

    def _read_bootstrap_login(self) -> pullsecret.PullSecret:
        """Read the login of the registry on the bootstrap host; none without a valid record.

        `BootstrapRegistryFiles` reports an invalid one.
        """
        try:
            record = read_record(self._files)
        except (errors.ConfigError, errors.FileError):
            return pullsecret.PullSecret()
        return pullsecret.PullSecret() if record is None else record.make_pull_secret()

    def _save_last_good(
        self, source: _PullSecretSource, pull_secret: pullsecret.PullSecret, problems: list[str]
    ) -> None:
        try:
            self._write_if_changed(source.last_good, pullsecret.encode_pull_secret(pull_secret))
        except errors.FileError as error:
            problems.append(str(error))

    def _parse_file(self, path: str) -> pullsecret.PullSecret | None:
        """Parse a pull secret; None when the file does not exist."""
        content = self._files.read_file(path, limit=_LIMIT)
        return None if content is None else pullsecret.parse_pull_secret(content, where=path)

    def _parse_file_or_none(self, path: str) -> pullsecret.PullSecret | None:
        try:
            return self._parse_file(path)
        except errors.CredentialError:
            return None

    def _write_auth_file(self, secret: pullsecret.PullSecret) -> None:
        if self._write_if_changed(AUTH_FILE, pullsecret.encode_pull_secret(secret)):
            log.info(
                "installed pull secrets with logins for %d registries",
                len(secret.credentials),
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )

    def _write_if_changed(self, path: str, content: bytes) -> bool:
        """Write the file when it differs; return whether it did."""
        file = atomic_files.FileSpec(path, content, 0o600)
        return not self._files.has_file(file) and bool(self._files.write_files([file]))

    def _restrict_mode(self, path: str, problems: list[str]) -> None:
        """Set the file's mode to 0600.

        Leaves a symlink alone, and a file of the config, which sets its mode.
        """
        try:
            if self._files.read_link(path) is not None:
                return
            content = self._files.read_file(path, limit=_LIMIT)
            if content is None or self._files.has_file(atomic_files.FileSpec(path, content, 0o600)):
                return
            # The record may have megabytes: read it only where the mode depends on it.
            if not self._is_managed(path) and self._write_if_changed(path, content):
                log.warning("%s was readable by other users; mode set to 0600", path)
        except errors.FileError as error:
            problems.append(str(error))

    def _is_managed(self, path: str) -> bool:
        content = self._files.read_file(inventory.OWNERSHIP_FILE, limit=inventory.OWNERSHIP_LIMIT)
        try:
            return path in inventory.from_json(json_text.parse_json(content or b"null")).paths
        except (ValueError, errors.LedgerError):
            # The planner reports a damaged ownership record.
            return False

    def _link_auth_file(self, path: str, problems: list[str], *, backup_path: str = "") -> None:
        """Make ``path`` a symlink to the merged secret.

        An existing file of another program is copied to ``backup_path``; without one, it stays and
        is reported. The link is relative, so that it also resolves from outside a container.
        """
        try:
            target = os.path.relpath(
                self._root.resolve_path(AUTH_FILE), self._root.resolve_entry(path).parent
            )
            link_target = self._files.read_link(path)
            if link_target == target:
                return
            content = self._files.read_file(path, limit=_LIMIT) if link_target is None else None
            if content is not None:
                if not backup_path:
                    problems.append(
                        f"cannot link {path} to the cluster's pull secrets: another program's file "
                        "exists at this path; remove it, or pulls that read it go without them"
                    )
                    return
                if self._write_if_changed(backup_path, content):
                    log.info("copied %s to %s before replacing it", path, backup_path)
            self._files.make_symlink(path, target)
        except errors.FileError as error:
            problems.append(str(error))

    def _remove_auth_files(self) -> None:
        for path in (RPM_OSTREE_AUTH, BOOTC_AUTH):
            link_target = self._files.read_link(path)
            if link_target is not None and link_target.endswith(AUTH_FILE):
                self._files.remove_file(path)
        if self._files.has_entry(LOGIN_HISTORY):
            self._files.remove_file(LOGIN_HISTORY)
        if self._files.read_file(AUTH_FILE, limit=2 * _LIMIT) is not None:
            self._files.remove_file(AUTH_FILE)
            log.info(
                "removed the pull secrets: no source has any; pulls are anonymous",
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )
