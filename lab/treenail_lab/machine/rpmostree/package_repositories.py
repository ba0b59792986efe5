"""The packages in the repositories of a machine that are directories."""

from configparser import ConfigParser
from pathlib import Path

_SCHEME = "file://"


def list_packages(root: Path) -> frozenset[str]:
    """The names of all packages that rpm-ostree finds in directories of the machine."""
    found: set[str] = set()
    for file in sorted((root / "etc/yum.repos.d").glob("*.repo")):
        repositories = ConfigParser(interpolation=None)
        repositories.read(file, encoding="utf-8")
        for name in repositories.sections():
            place = repositories[name].get("baseurl", "")
            if place.startswith(_SCHEME):
                found |= {each.stem for each in Path(place.removeprefix(_SCHEME)).glob("*.rpm")}
    return frozenset(found)
