"""Pull secrets on disk, where rpm-ostree and bootc look; they never wait for an update."""

import json
import logging
import os
from dataclasses import dataclass

from treenail.config import logins
from treenail.config.logins import Experience
from treenail.config.pullsecret import PullSecret, encode, merge, parse
from treenail.daemon.configuration.inspect import RECORD as MANAGED
from treenail.daemon.settings.settings import Settings
from treenail.errors import CredentialError, FileError, LedgerError
from treenail.host.filesystem.files import File, Files
from treenail.host.filesystem.root import Root
from treenail.log import MessageId
from treenail.update.steps import ownership

log = logging.getLogger(__name__)

AUTH = "/var/lib/treenail/auth.json"
RPM_OSTREE = "/run/ostree/auth.json"
BOOTC = "/etc/ostree/auth.json"
ASIDE = "/run/ostree/auth.json.before-treenail"
KUBECONFIG = "/etc/kubernetes/kubeconfig"
"""With which any node could join: it is nobody's but root's, unless a config says otherwise."""
GOOD = "/var/lib/treenail/pull-secret.good.json"
"""What using logins has shown, and those that worked."""
_LIMIT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Source:
    path: str
    last_good: str
    """Where its content is kept once it was understood."""


class Credentials:
    """The cluster's pull secret and the internal registry's, merged and put in place.

    A source that is broken, or has vanished, counts with what was last understood of it, also
    after a restart. One that never was there is nothing; without any, pulls are anonymous, and
    neither a file nor a link of ours is left.

    A new login for a registry takes the place of the one before, which is kept until the new one
    was used with success, and comes back when the registry refuses the new one.
    """

    def __init__(self, root: Root, files: Files, settings: Settings) -> None:
        self._root = root
        self._files = files
        self._cluster = _Source(settings.pull_secret, "/var/lib/treenail/pull-secret.cluster.json")
        self._internal = _Source(
            settings.internal_pull_secret, "/var/lib/treenail/pull-secret.internal.json"
        )
        self._newest = PullSecret()

    def refresh(self) -> tuple[str, ...]:
        """Put the pull secrets in place; returns what is wrong, a sentence each.

        At every moment there is either the earlier or the new secret to pull with. What is in
        place already is not written again. Never raises for what is on the disk, and no sentence
        repeats anything of a secret.
        """
        problems: list[str] = []
        self._close(KUBECONFIG, problems)
        cluster = self._read(self._cluster, problems)
        internal = self._read(self._internal, problems)
        self._newest = merge(internal, cluster)
        try:
            if self._newest.logins:
                in_place = self._understood_or_none(AUTH) or PullSecret()
                known = logins.renewed(self._known(), in_place, self._newest)
                self._use(known)
                problems += logins.complaints(known, self._newest)
                self._link(RPM_OSTREE, problems, aside=ASIDE)
                self._link(BOOTC, problems)
            elif not problems:
                self._withdraw()
        except FileError as error:
            problems.append(str(error))
        return tuple(problems)

    def refused(self, image: str) -> bool:
        """A registry refused the login for this pull spec; whether there is now another to try.

        Raises `FileError`.
        """
        known = self._known()
        found = logins.refused(known, self._newest, image)
        if found is None:
            return False
        self._use(found)
        return len(found.refused) > len(known.refused)

    def proven(self, image: str) -> None:
        """This image was pulled, with the login in place; raises `FileError`."""
        self._use(logins.proven(self._known(), self._newest, image))

    def _known(self) -> Experience:
        content = self._files.read(GOOD, limit=2 * _LIMIT)
        try:
            return Experience() if content is None else logins.load(content, where=GOOD)
        except CredentialError as error:
            log.warning("%s; which logins worked has to be found out anew", error)
            return Experience()

    def _use(self, known: Experience) -> None:
        """In this order: what a cut in between leaves is put right by the next `refresh`."""
        if not known.empty:
            self._have(GOOD, logins.dump(known))
        elif self._files.is_there(GOOD):
            self._files.remove(GOOD)
        if self._newest.logins:
            self._write(logins.in_use(known, self._newest))

    def _read(self, source: _Source, problems: list[str]) -> PullSecret:
        problem = ""
        try:
            found = self._understood(source.path)
            if found is not None:
                self._keep(source, found, problems)
                return found
        except (FileError, CredentialError) as error:
            problem = str(error)
        last = None
        try:
            last = self._understood(source.last_good)
        except (FileError, CredentialError) as error:
            problems.append(str(error))
        if last is not None:
            problem = problem or f"{source.path} is gone"
            problems.append(f"{problem}; the logins last read from it stay in use")
        elif problem:
            problems.append(f"{problem}; nothing was read from it before")
        return last or PullSecret()

    def _keep(self, source: _Source, found: PullSecret, problems: list[str]) -> None:
        try:
            self._have(source.last_good, encode(found))
        except FileError as error:
            problems.append(str(error))

    def _understood(self, path: str) -> PullSecret | None:
        """None when there is no file."""
        content = self._files.read(path, limit=_LIMIT)
        return None if content is None else parse(content, where=path)

    def _understood_or_none(self, path: str) -> PullSecret | None:
        try:
            return self._understood(path)
        except CredentialError:
            return None

    def _write(self, secret: PullSecret) -> None:
        if self._have(AUTH, encode(secret)):
            log.info(
                "pull secrets changed: logins for %d registries",
                len(secret.logins),
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )

    def _have(self, path: str, content: bytes) -> bool:
        """Whether that was a change; looks first, so that nothing is flushed every time."""
        file = File(path, content, 0o600)
        return not self._files.has(file) and bool(self._files.write_all([file]))

    def _close(self, path: str, problems: list[str]) -> None:
        """Have the file readable by its owner alone, if it is nobody else's to say.

        A link is let be, and so is a file of the config, which has its mode from there.
        """
        try:
            if self._files.link_text(path) is not None or self._is_managed(path):
                return
            content = self._files.read(path, limit=_LIMIT)
            if content is not None and self._have(path, content):
                log.warning("%s was open to others, and is so no more", path)
        except FileError as error:
            problems.append(str(error))

    def _is_managed(self, path: str) -> bool:
        content = self._files.read(MANAGED, limit=_LIMIT)
        try:
            return path in ownership.from_json(json.loads(content or b"null")).paths
        except (ValueError, LedgerError):
            return False  # whoever needs it says what is wrong with it

    def _link(self, path: str, problems: list[str], *, aside: str = "") -> None:
        """Link to the merged secret; what somebody else's file holds is kept ``aside``, or stays.

        The link is relative, so that it also leads there from outside of a container.
        """
        try:
            target = os.path.relpath(self._root.path(AUTH), self._root.entry(path).parent)
            found = self._files.link_text(path)
            if found == target:
                return
            content = self._files.read(path, limit=_LIMIT) if found is None else None
            if content is not None:
                if not aside:
                    problems.append(
                        f"{path} is somebody else's file and is left alone: pulls that read it do "
                        f"without the cluster's pull secrets until it is removed"
                    )
                    return
                if self._have(aside, content):
                    log.info("kept what %s held in %s", path, aside)
            self._files.symlink(path, target)
        except FileError as error:
            problems.append(str(error))

    def _withdraw(self) -> None:
        for path in (RPM_OSTREE, BOOTC):
            found = self._files.link_text(path)
            if found is not None and found.endswith(AUTH):
                self._files.remove(path)
        if self._files.is_there(GOOD):
            self._files.remove(GOOD)
        if self._files.read(AUTH, limit=2 * _LIMIT) is not None:
            self._files.remove(AUTH)
            log.info(
                "there are no pull secrets any more; pulls are anonymous",
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )
