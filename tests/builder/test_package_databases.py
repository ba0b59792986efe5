"""Packages of RPM and dpkg databases, compared with the answers of rpm and dpkg-query."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from treenail.builder.images.packages import parse_dpkg_status, read_packages
from treenail.errors import FileError
from treenail.image.oci.attachments import InstalledPackage

pytestmark = pytest.mark.process

SPEC = """\
Name: {name}
Epoch: {epoch}
Version: 1.2
Release: 3.fc41
Summary: A package
License: MIT and {name}
BuildArch: noarch
%description
A package.
%files
"""
STATUS = """\
Package: bash
Status: install ok installed
Architecture: amd64
Version: 5.2.15-2+b7
Description: shell
 Package: hidden

Package: removed
Status: deinstall ok config-files
Version: 1

Package: libc6
Source: glibc (2.36-9)
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u9
"""


class FakeTree:
    """Files of an image in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def read_file(self, path: str) -> bytes | None:
        return self._files.get(path)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that rpm wrote: two packages, one of them with an epoch."""
    if shutil.which("rpmbuild") is None:
        pytest.skip("rpmbuild is not installed: install the package rpm")
    place = tmp_path_factory.mktemp("rpm")
    for name, epoch in (("first", "%{nil}"), ("second", "7")):
        text = SPEC.format(name=name, epoch=epoch).replace("Epoch: %{nil}\n", "")
        (place / f"{name}.spec").write_text(text)
        run_rpm("rpmbuild", "-bb", f"--define=_topdir {place}", str(place / f"{name}.spec"))
    packages = sorted(map(str, (place / "RPMS").glob("*/*.rpm")))
    target = place / "db"
    run_rpm(
        "rpm", "--install", "--justdb", "--nodeps", "--nosignature", "--ignorearch", "--ignoreos",
        "--define=_db_backend sqlite", f"--dbpath={target}", *packages,
    )  # fmt: skip
    return target / "rpmdb.sqlite"


def run_rpm(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_of_rpm_equal_the_answer_of_rpm(database: Path, tmp_path: Path) -> None:
    tree = FakeTree(
        {
            "/usr/share/rpm/rpmdb.sqlite": database.read_bytes(),
            "/usr/lib/os-release": b'NAME="Fedora Linux"\nID=fedora\n',
        }
    )
    found = read_packages(tree, tmp_path)
    assert found.distribution == "fedora"
    answer = run_rpm(
        "rpm", "--query", "--all", f"--dbpath={database.parent}",
        "--queryformat=%{NAME} %|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE} %{ARCH} %{SOURCERPM}\\n",
    )  # fmt: skip
    listed = [
        f"{each.name} {each.version} {each.architecture} {each.source}" for each in found.packages
    ]
    assert sorted(listed) == sorted(answer.splitlines())
    assert [each.version for each in sorted(found.packages)] == ["1.2-3.fc41", "7:1.2-3.fc41"]
    assert {each.license for each in found.packages} == {"MIT and first", "MIT and second"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="dpkg is not installed")
def test_packages_of_dpkg_equal_the_answer_of_dpkg() -> None:
    answer = run_rpm(
        "dpkg-query",
        "--show",
        "--showformat=${db:Status-Status} ${binary:Package} ${Version} ${Architecture}\n",
    )
    expected = [line.split()[1:] for line in answer.splitlines() if line.startswith("installed ")]
    found = parse_dpkg_status(Path("/var/lib/dpkg/status").read_bytes())
    # dpkg-query shows the architecture of some packages behind their name.
    assert [[each.name, each.version, each.architecture] for each in found] == [
        [name.partition(":")[0], version, architecture] for name, version, architecture in expected
    ]


def test_removed_packages_and_lines_of_descriptions_do_not_count() -> None:
    assert list(parse_dpkg_status(STATUS.encode())) == [
        InstalledPackage("deb", "bash", "5.2.15-2+b7", "amd64"),
        InstalledPackage("deb", "libc6", "2.36-9+deb12u9", "amd64", source="glibc (2.36-9)"),
    ]


def test_tree_without_database_has_no_list(tmp_path: Path) -> None:
    assert read_packages(FakeTree({"/etc/os-release": b"ID=x\n"}), tmp_path) is None


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xff" * 4096])
def test_damaged_database_is_an_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read /var/lib/rpm/rpmdb\.sqlite"):
        read_packages(FakeTree({"/var/lib/rpm/rpmdb.sqlite": content}), tmp_path)


def test_cut_header_is_an_error(database: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copyfile(database, copy)
    sql = "UPDATE Packages SET blob = substr(blob, 1, 40)"
    run_rpm("sqlite3", str(copy), sql)
    tree = FakeTree({"/var/lib/rpm/rpmdb.sqlite": copy.read_bytes()})
    with pytest.raises(FileError, match="ends early"):
        read_packages(tree, tmp_path)
