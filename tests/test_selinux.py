"""The SELinux policy agrees with the unit and the documentation, and compiles."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
POLICY = ROOT / "rpm/selinux"
RULES = (POLICY / "treenail.te").read_text()
DOCS = (ROOT / "docs/selinux.md").read_text()
MAKEFILE = Path("/usr/share/selinux/devel/Makefile")


def test_domain_has_the_capabilities_of_the_unit() -> None:
    unit = (ROOT / "systemd/treenail.service").read_text()
    bounding = re.search(r"^CapabilityBoundingSet=(.+)$", unit, re.MULTILINE)
    allowed = re.search(r"self:capability \{ (.+) \};", RULES)
    assert bounding is not None
    assert allowed is not None
    names = {each.removeprefix("CAP_").lower() for each in bounding[1].split()}
    assert set(allowed[1].split()) == names
    (documented,) = [line for line in DOCS.splitlines() if "the capabilities of the unit;" in line]
    assert set(re.findall(r"`(\w+)`", documented)) == names


def test_domain_is_permissive_as_documented() -> None:
    assert "\npermissive treenail_t;\n" in RULES
    assert "The domain is permissive" in DOCS


def test_documentation_lists_every_label() -> None:
    contexts = (POLICY / "treenail.fc").read_text()
    found = re.findall(r"^(/\S+)\s.*object_r:(\w+),", contexts, re.MULTILINE)
    labels = {(path.removesuffix("(/.*)?").replace("\\", ""), label) for path, label in found}
    assert labels == set(re.findall(r"^\| `(/\S+)` \| `(\w+)` \|$", DOCS, re.MULTILINE))


@pytest.mark.process
@pytest.mark.skipif(
    not MAKEFILE.exists() or shutil.which("checkmodule") is None,
    reason="no SELinux policy here: install selinux-policy-dev or selinux-policy-devel",
)
def test_policy_compiles(tmp_path: Path) -> None:
    for source in POLICY.iterdir():
        shutil.copy(source, tmp_path)
    done = subprocess.run(
        ["make", "-C", tmp_path, "-f", MAKEFILE, "treenail.pp"],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "treenail.pp").stat().st_size > 0
