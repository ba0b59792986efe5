"""Files by which this node pulls from the bootstrap host of its installation.

Ignition writes them beside the rendered config (`treenail.config.bootstrap_registry`). They are
removed independently of updates, as pull secrets and certificates are installed.
"""

import logging

from treenail.config.bootstrap_registry import (
    MIRROR_FILE,
    RECORD_FILE,
    RECORD_LIMIT,
    BootstrapRegistryRecord,
    decode_record,
    is_mirror_file_of,
)
from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import HostFiles
from treenail.log import MessageId

log = logging.getLogger(__name__)


class BootstrapRegistryFiles:
    """Keeps the files until the hand-over, and then removes those that name the registry."""

    def __init__(self, files: HostFiles) -> None:
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
        except (ConfigError, FileError) as error:
            return (f"{error}; {error.remedy}" if error.remedy else str(error),)
        return ()

    def _remove_files(self, record: BootstrapRegistryRecord) -> None:
        mirror = self._files.read_file(MIRROR_FILE, limit=RECORD_LIMIT)
        if mirror is not None:
            if is_mirror_file_of(mirror, record.registry):
                self._files.remove_file(MIRROR_FILE)
            else:
                log.warning(
                    "left %s alone: it names another registry than %s", MIRROR_FILE, record.registry
                )
        self._files.remove_file(record.ca_path)
        self._files.remove_file(RECORD_FILE)
        log.info(
            "removed mirror, CA and login of the bootstrap registry %s: the final registry has the "
            "images",
            record.registry,
            extra={"message_id": MessageId.CREDENTIALS_CHANGED},
        )


def read_record(files: HostFiles) -> BootstrapRegistryRecord | None:
    """Read the record; None without one. Raises `ConfigError` and `FileError`."""
    content = files.read_file(RECORD_FILE, limit=RECORD_LIMIT)
    if content is None:
        return None
    try:
        return decode_record(content, where=RECORD_FILE)
    except ConfigError as error:
        raise ConfigError(
            f"cannot use the bootstrap registry: {error}",
            remedy=f"if the installation is complete, run: rm {RECORD_FILE} {MIRROR_FILE}",
        ) from error
