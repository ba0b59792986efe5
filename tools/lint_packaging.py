"""Run the linters of manuals, units, alerts, scripts, the spec and the SELinux policy.

A linter that is not installed is skipped with one line. Exit code 1 when one finds something.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.manuals import format_page, list_pages

ROOT = Path(__file__).resolve().parent.parent
SELINUX_MAKEFILE = Path("/usr/share/selinux/devel/Makefile")
MAX_EXPOSURE = 25
"""In tenths of the score of systemd-analyze security, which is 100 without a sandbox."""
_BUILD_EXPOSURE = 85
"""Of a unit whose builds make namespaces and mounts."""
_BUILD_UNITS = frozenset({"treenail-bootstrap.service"})
_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class LintCommand:
    """A linter with its arguments, and the package that has it."""

    program: str
    package: str
    arguments: tuple[str | Path, ...]
    needs: Path = Path("/")
    """A file without which the linter has nothing to compare with."""

    def is_installed(self) -> bool:
        return shutil.which(self.program) is not None and self.needs.exists()


def list_commands(folder: Path) -> Iterator[LintCommand]:
    """Yield all linters; ``folder`` is empty, and gets manuals, and copies of units and policy."""
    manuals = [folder / page for page in list_pages()]
    for manual in manuals:
        manual.write_text(format_page(manual.name))
    # Below this level mandoc counts the characters of source lines.
    yield LintCommand("mandoc", "mandoc", ("-T", "lint", "-W", "warning", *manuals))
    monitoring = ROOT / "agent/treenail/manifests/monitoring_files"
    yield LintCommand("promtool", "prometheus", ("check", "rules", monitoring / "alerts.yaml"))
    units = [_copy_unit(path, folder) for path in sorted((ROOT / "systemd").glob("*.service"))]
    yield LintCommand("systemd-analyze", "systemd", ("verify", "--man=no", *units))
    for unit in units:
        limit = _BUILD_EXPOSURE if unit.name in _BUILD_UNITS else MAX_EXPOSURE
        exposure = ("security", "--offline=true", f"--threshold={limit}", unit)
        yield LintCommand("systemd-analyze", "systemd", exposure)
    spec = ("--config", ROOT / "rpm/rpmlint.toml", ROOT / "rpm/treenail.spec")
    yield LintCommand("rpmlint", "rpmlint", spec)
    tools = ("rpm", "base_packages", "build_images", "finish_layer")
    scripts = [
        ROOT / "rpm/health.d/data-volume.example",
        *(ROOT / "tools" / name for name in tools),
    ]
    yield LintCommand("shellcheck", "shellcheck", ("-s", "sh", *scripts))
    policy = shutil.copytree(ROOT / "rpm/selinux", folder / "selinux")
    yield LintCommand(
        "make",
        "selinux-policy-dev",
        ("--silent", "-C", policy, "-f", SELINUX_MAKEFILE, "treenail.pp"),
        needs=SELINUX_MAKEFILE,
    )


def _copy_unit(path: Path, folder: Path) -> Path:
    """Copy the unit with a command that exists on every machine."""
    copy = folder / path.name
    lines = path.read_text().splitlines()
    changed = ("ExecStart=/bin/true" if "/usr/bin/treenail" in each else each for each in lines)
    copy.write_text("".join(f"{each}\n" for each in changed))
    return copy


def run_linter(command: LintCommand) -> str:
    """Return what the linter found; empty when it found nothing."""
    done = subprocess.run(
        [command.program, *command.arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
        cwd=ROOT,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    """Run all linters."""
    missing, is_clean = set(), True
    with tempfile.TemporaryDirectory() as folder:
        for command in list_commands(Path(folder)):
            if not command.is_installed():
                missing.add(command.package)
            elif found := run_linter(command):
                is_clean = False
                print(f"{command.program}:\n{found}")
    for package in sorted(missing):
        print(f"skipped the linter of {package}: not installed")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
