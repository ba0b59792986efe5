"""Programs for the guest of vm-tests that are built outside this repository."""

from pathlib import Path

import pytest

from vmlab.image.programs import VARIABLES, Program, read_programs
from vmlab.tools import ToolError

VARIABLE = VARIABLES["rpm-ostree"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "rpm-ostree"
    (place / "tree/usr/bin").mkdir(parents=True)
    (place / "tree/usr/bin/rpm-ostree").write_text("#!/bin/true\n")
    (place / "tree/usr/bin/rpm-ostree").chmod(0o755)
    (place / "tree/lib").mkdir()
    (place / "tree/lib/librpm.so").symlink_to("librpm.so.10")
    (place / "version").write_text("2026.2\n")
    (place / "packages").write_text("polkitd\nlibrpm10\n")
    return place


def read(directory: Path) -> Program:
    (found,) = read_programs({VARIABLE: str(directory)})
    return found


def test_program_is_read_with_version_and_packages(directory: Path) -> None:
    found = read(directory)
    assert (found.name, found.version, found.packages) == (
        "rpm-ostree",
        "2026.2",
        ("polkitd", "librpm10"),
    )


def test_without_variables_there_are_no_programs() -> None:
    assert read_programs({VARIABLE: ""}) == ()


def test_directory_without_a_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=rf"{VARIABLE}: {tmp_path} has no directory tree/"):
        read(tmp_path)


def test_directory_without_a_version_is_refused(directory: Path) -> None:
    (directory / "version").unlink()
    with pytest.raises(ToolError, match=rf"{VARIABLE}: cannot read .*/version: No such file"):
        read(directory)


def test_version_of_two_lines_is_refused(directory: Path) -> None:
    (directory / "version").write_text("2026.2\n2026.3\n")
    with pytest.raises(ToolError, match="version must be one line"):
        read(directory)


@pytest.mark.process
def test_copy_keeps_links_to_directories_and_modes(directory: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/lib").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    read(directory).copy_to(root)
    assert (root / "usr/lib/librpm.so").is_symlink()
    assert (root / "usr/bin/rpm-ostree").stat().st_mode & 0o777 == 0o755


def test_fingerprint_changes_with_a_mode_a_link_and_a_content(directory: Path) -> None:
    program = directory / "tree/usr/bin/rpm-ostree"
    link = directory / "tree/lib/librpm.so"
    found = [read(directory).fingerprint()]
    program.chmod(0o700)
    found.append(read(directory).fingerprint())
    link.unlink()
    link.symlink_to("librpm.so.9")
    found.append(read(directory).fingerprint())
    program.write_text("#!/bin/false\n")
    found.append(read(directory).fingerprint())
    assert len(set(found)) == 4
