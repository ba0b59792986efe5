"""The list of packages that `build` leaves for `push` in the work directory."""

import json
import logging
from pathlib import Path

from treenail.api.decode import load_json
from treenail.builder.buildah.stored_tree import StoredTree
from treenail.builder.images.package_databases import read_packages
from treenail.errors import FileError, TreenailError
from treenail.image.oci.packages import PackageList

log = logging.getLogger(__name__)

_NAME = "packages.json"
_LIMIT = 16 * 1024 * 1024


def write_packages(work: Path, driver: str, image: str) -> None:
    """Write the packages of an image of the storage; a failure is logged, and leaves no list.

    `push` has a login, and must not parse databases that the instructions of a user wrote.
    """
    place = work / _NAME
    try:
        place.unlink(missing_ok=True)
        found = read_packages(StoredTree(work / "storage", driver, image), work)
        if found is None:
            log.info("the image has no database of packages")
            return
        place.write_text(json.dumps(found.to_json()))
    except OSError as error:
        log.warning("cannot list the packages of the image: %s", error.strerror)
    except TreenailError as error:
        log.warning("cannot list the packages of the image: %s", error)
    else:
        log.info("the image has %d packages", len(found.packages))


def read_package_file(work: Path) -> PackageList | None:
    """Read the list; None without one. Raises `ConfigError` and `FileError`."""
    place = work / _NAME
    try:
        with place.open("rb") as file:
            content = file.read(_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"cannot read {place}: {error.strerror}") from error
    if len(content) > _LIMIT:
        raise FileError(f"cannot read {place}: it is longer than {_LIMIT} bytes")
    return PackageList.from_json(load_json(content, where=_NAME))
