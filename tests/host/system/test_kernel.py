from pathlib import Path

import pytest

from treenail.errors import FileError
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.kernel import HostKernel


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def write(root: Root, path: str, text: str) -> None:
    found = root.prefix / path
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_text(text)


def test_boot_id_and_command_line_come_from_proc(root):
    write(root, "proc/sys/kernel/random/boot_id", "0b4a1e2c-0000-4000-8000-000000000000\n")
    write(root, "proc/cmdline", 'ostree=/ostree/boot.1/x root=UUID=1 a="b c"\n')
    kernel = HostKernel(root)
    assert kernel.read_boot_id() == "0b4a1e2c-0000-4000-8000-000000000000"
    assert kernel.read_command_line() == ("ostree=/ostree/boot.1/x", "root=UUID=1", 'a="b c"')
    assert kernel.read_first_command_line() == ()
    write(root, "var/lib/treenail/first-command-line", 'root=UUID=1 a="b c"')
    assert kernel.read_first_command_line() == ("root=UUID=1", 'a="b c"')


def test_boot_id_of_this_machine_is_a_uuid():
    assert len(HostKernel(Root("/")).read_boot_id()) == 36


def test_boot_id_without_proc_is_an_error_with_remedy(root):
    with pytest.raises(FileError) as refused:
        HostKernel(root).read_boot_id()
    assert str(refused.value) == (
        f"cannot read {root.prefix}/proc/sys/kernel/random/boot_id: it does not exist"
    )
    assert refused.value.remedy == f"mount /proc below {root.prefix}"


@pytest.mark.parametrize(("text", "enabled"), [("1\n", True), ("0\n", False), (None, False)])
def test_fips_is_enabled_only_with_value_1(root, text, enabled):
    if text is not None:
        write(root, "proc/sys/crypto/fips_enabled", text)
    assert HostKernel(root).is_fips_enabled() is enabled


def test_os_release_parses_quotes_and_skips_other_lines(root):
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


def test_os_release_in_etc_precedes_usr(root):
    assert HostKernel(root).read_os_release() == {}
    write(root, "usr/lib/os-release", "ID=vendor\n")
    assert HostKernel(root).read_os_release() == {"ID": "vendor"}
    write(root, "etc/os-release", "ID=admin\n")
    assert HostKernel(root).read_os_release() == {"ID": "admin"}


def test_ostree_booted_follows_marker_file(root):
    assert HostKernel(root).is_ostree_booted() is False
    write(root, "run/ostree-booted", "")
    assert HostKernel(root).is_ostree_booted() is True


def test_boot_id_after_soft_reboots_includes_their_count(root):
    write(root, "proc/sys/kernel/random/boot_id", "0b4a1e2c-0000-4000-8000-000000000000\n")
    counts = [2, 3]
    kernel = HostKernel(root, count_soft_reboots=lambda: counts.pop(0))
    assert kernel.read_boot_id() == "0b4a1e2c-0000-4000-8000-000000000000+2"
    assert kernel.read_boot_id().endswith("+2"), "a soft reboot ends every process"
    assert HostKernel(root, count_soft_reboots=lambda: 0).read_boot_id().endswith("000")
