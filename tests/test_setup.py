"""The script that installs what the tests need, with programs that only record their arguments."""

import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "tools" / "setup"
RECORD = 'echo "$(basename "$0") $*" >> "$RECORD"\n'
# "python -m venv DIR" makes a Python of the same kind.
PYTHON = (
    'if [ "$2" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; '
    'cp "$0" "$last/bin/python"; fi\n'
)


class Host:
    """A host without packages, whose distribution offers some."""

    def __init__(self, directory: Path, packager: str, offered: tuple[str, ...]) -> None:
        self._directory = directory
        self._record = directory / "record"
        self._programs = directory / "bin"
        self._programs.mkdir()
        names = " ".join(offered)
        is_offered = (
            f'for name; do :; done; case " {names} " in *" $name "*) exit 0 ;; esac; exit 1\n'
        )
        self._write("python", PYTHON)
        self._write("id", "echo 0\n")
        for name in ("sh", "basename", "readlink", "cp", "mkdir", "ln", "env", "grep"):
            (self._programs / name).symlink_to(f"/usr/bin/{name}")
        if packager == "apt-get":
            self._write("dpkg-query", "exit 1\n")
            # All others are offered.
            self._write("apt-cache", f'case "$*" in "show ignition") {is_offered} ;; esac\n')
            self._write("apt-get", RECORD)
        else:
            self._write("rpm", "exit 1\n")
            self._write("dnf", f'{RECORD}[ "$2" = info ] || exit 0\n{is_offered}')

    def run(self) -> str:
        """Run the script; return what it prints."""
        done = subprocess.run(
            [
                "/bin/sh",
                str(SETUP),
                str(self._directory / "venv"),
                "lab",
                str(self._programs / "python"),
            ],
            env={"PATH": str(self._programs), "RECORD": str(self._record)},
            capture_output=True,
            check=True,
            text=True,
            cwd=SETUP.parents[1],
            timeout=30,
        )
        return done.stderr

    def list_installed(self) -> set[str]:
        lines = self._record.read_text().splitlines()
        return {word for line in lines if " install " in line for word in line.split()}

    def _write(self, name: str, text: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)


@pytest.mark.process
@pytest.mark.parametrize(
    ("packager", "names"),
    [("apt-get", ("ignition",)), ("dnf", ("ignition", "ignition-validate"))],
)
def test_setup_installs_ignition_where_it_is_offered(
    tmp_path: Path, packager: str, names: tuple[str, ...]
) -> None:
    host = Host(tmp_path, packager, names)
    assert "no package" not in host.run()
    assert {"make", *names} <= host.list_installed()


@pytest.mark.process
@pytest.mark.parametrize("packager", ["apt-get", "dnf"])
def test_setup_goes_on_without_ignition(tmp_path: Path, packager: str) -> None:
    host = Host(tmp_path, packager, ())
    assert "no package ignition here: the tests that need it are skipped" in host.run()
    assert "make" in host.list_installed()
    assert "ignition" not in host.list_installed()
    assert (tmp_path / "venv/bin/python").exists()
