from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import HostKernel


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def write(root: Root, path: str, text: str) -> None:
    found = root.prefix / path
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_text(text)


def test_boot_id_and_command_line_are_what_the_kernel_says(root):
    write(root, "proc/sys/kernel/random/boot_id", "0b4a1e2c-0000-4000-8000-000000000000\n")
    write(root, "proc/cmdline", 'ostree=/ostree/boot.1/x root=UUID=1 a="b c"\n')
    kernel = HostKernel(root)
    assert kernel.read_boot_id() == "0b4a1e2c-0000-4000-8000-000000000000"
    assert kernel.read_command_line() == ("ostree=/ostree/boot.1/x", "root=UUID=1", 'a="b c"')


def test_this_machine_has_a_boot_id():
    assert len(HostKernel(Root("/")).read_boot_id()) == 36


def test_a_root_without_proc_is_told_so(root):
    with pytest.raises(FileError) as refused:
        HostKernel(root).read_boot_id()
    assert str(refused.value) == f"there is no {root.prefix}/proc/sys/kernel/random/boot_id"
    assert refused.value.remedy == f"have /proc mounted below {root.prefix}"


@pytest.mark.parametrize(("text", "enabled"), [("1\n", True), ("0\n", False), (None, False)])
def test_fips_mode_is_on_when_the_kernel_says_1(root, text, enabled):
    if text is not None:
        write(root, "proc/sys/crypto/fips_enabled", text)
    assert HostKernel(root).is_fips_enabled() is enabled


def test_os_release_is_read_as_its_manual_says(root):
    write(
        root,
        "usr/lib/os-release",
        "# comment\n\nID=fedora\nNAME=\"Fedora Linux\"\nVARIANT_ID='coreos'\n"
        'EMPTY=""\nNOT AN ASSIGNMENT\n=nothing\nQUOTED="a \\"b\\" \\$c"\n',
    )
    (root.prefix / "etc").mkdir()
    (root.prefix / "etc/os-release").symlink_to("../usr/lib/os-release")
    assert HostKernel(root).read_os_release() == {
        "ID": "fedora",
        "NAME": "Fedora Linux",
        "VARIANT_ID": "coreos",
        "EMPTY": "",
        "QUOTED": 'a "b" $c',
    }


def test_os_release_in_etc_comes_before_the_one_in_usr(root):
    assert HostKernel(root).read_os_release() == {}
    write(root, "usr/lib/os-release", "ID=vendor\n")
    assert HostKernel(root).read_os_release() == {"ID": "vendor"}
    write(root, "etc/os-release", "ID=admin\n")
    assert HostKernel(root).read_os_release() == {"ID": "admin"}


def test_an_ostree_system_is_known_by_its_mark(root):
    assert HostKernel(root).is_ostree_booted() is False
    write(root, "run/ostree-booted", "")
    assert HostKernel(root).is_ostree_booted() is True


def test_a_boot_after_soft_reboots_has_a_name_of_its_own(root):
    write(root, "proc/sys/kernel/random/boot_id", "0b4a1e2c-0000-4000-8000-000000000000\n")
    counts = [2, 3]
    kernel = HostKernel(root, count_soft_reboots=lambda: counts.pop(0))
    assert kernel.read_boot_id() == "0b4a1e2c-0000-4000-8000-000000000000+2"
    assert kernel.read_boot_id().endswith("+2"), "no process outlives a soft reboot"
    assert HostKernel(root, count_soft_reboots=lambda: 0).read_boot_id().endswith("000")
