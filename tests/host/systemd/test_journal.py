"""Errors of units in the journal, read with a fake ``journalctl``."""

import os
from pathlib import Path

import pytest

from treenail.clocks import SystemClock
from treenail.host.filesystem.root_directory import Root
from treenail.host.systemd.journal import SystemdJournal
from treenail.process import ProgramRunner

pytestmark = pytest.mark.process

INVOCATION = "4b0139bdb58a841cbeab69bc500347ef"
LATE = """\
#!/bin/sh
case "$*" in
    --sync) exit 0 ;;
esac
if [ -e "$0.asked" ]; then
    echo "Copying blob 1"
    echo "Error: corrupt layer"
fi
touch "$0.asked"
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "usr/bin").mkdir(parents=True)
    return Root(tmp_path)


def journal_of(root: Root, journalctl: str) -> SystemdJournal:
    program = root.resolve_path("/usr/bin/journalctl")
    program.write_text(journalctl)
    program.chmod(0o755)
    clock = SystemClock()
    return SystemdJournal(ProgramRunner(clock, os.environ), root, clock)


def test_error_that_reaches_the_journal_late_is_read(root: Root) -> None:
    assert journal_of(root, LATE).read_error(INVOCATION) == "corrupt layer"


def test_run_without_output_has_no_error(root: Root) -> None:
    assert journal_of(root, "#!/bin/sh\n").read_error(INVOCATION) == ""


def test_first_error_of_previous_boot_is_read(root: Root) -> None:
    journalctl = f"""#!/bin/sh
echo "$@" >{root.prefix}/arguments
echo 'Finalizing staged deployment'
echo 'error: Bootloader write config: No space left on device'
echo 'error: later'
"""
    journal = journal_of(root, journalctl)
    found = journal.read_previous_boot_error("ostree-finalize-staged.service")
    assert found == "Bootloader write config: No space left on device"
    assert (root.prefix / "arguments").read_text() == (
        "--quiet --no-pager -b -1 -o cat _UID=0 -u ostree-finalize-staged.service\n"
    )


def test_previous_boot_without_journal_has_no_error(root: Root) -> None:
    assert journal_of(root, "#!/bin/sh\nexit 1\n").read_previous_boot_error("a.service") == ""
