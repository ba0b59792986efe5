"""The packages on a machine with a real systemd: install, upgrade, remove."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.nspawn import REPOSITORY, Container, missing

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
    pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="no rpmbuild here"),
]
# The agent of this machine is not one of a node: run another program in its unit.
DROP_IN = (
    "[Unit]\\nConditionPathExists=\\n[Service]\\nType=exec\\nExecStart=\\nExecStart=sleep inf\\n"
)
KUBELET = "[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=true\\n"
MODULES = (
    *(f"agent/treenail/{name}" for name in ("", "api", "config", "update", "kube", "cli", "host")),
    *(f"agent/treenail/{name}" for name in ("daemon", "controllers", "manifests")),
    *(f"agent/treenail/{name}" for name in ("builder", "image", "registry")),
    *(f"agent/treenail/{name}" for name in ("provisioning", "installer")),
    "agent/treenail/manifests/monitoring_files",
    "lab/treenail_lab",
)
COMPLETIONS = """
from pathlib import Path
for name in ("treenail", "treenail-controller", "kubectl-treenail", "treenail-lab"):
    for path in (f"bash/{name}", f"zsh/_{name}", f"fish/{name}.fish"):
        (Path("completions") / path).parent.mkdir(parents=True, exist_ok=True)
        (Path("completions") / path).touch()
"""
SCRIPT = f"""
set -eu
show() {{ echo "$1: $(systemctl "$@" 2>&1 | tr '\\n' ' ')"; }}
links() {{ find /etc/systemd/system -name 'treenail*' -type l | sort | tr '\\n' ' '; }}
cd "$0"
rpm --install --nodeps old/*.rpm
show is-enabled treenail treenail-firstboot
mkdir -p /etc/systemd/system/treenail.service.d /run/ostree /etc/ostree
printf '{DROP_IN}' > /etc/systemd/system/treenail.service.d/test.conf
printf '{KUBELET}' > /etc/systemd/system/kubelet.service
systemctl daemon-reload
systemctl start treenail kubelet
echo kept > /var/lib/treenail/ledger.json
sed -i 's/^#drain = .*/drain = "never"/' /etc/treenail/agent.toml
chmod +x /etc/treenail/health.d/data-volume.example
before=$(systemctl show --value --property MainPID treenail)

rpm --upgrade --nodeps new/*.rpm
show is-active treenail
after=$(systemctl show --value --property MainPID treenail)
[ "$before" != "$after" ] && echo restarted
grep '^drain' /etc/treenail/agent.toml
tail -n 1 /etc/treenail/agent.toml.rpmnew

rpm --erase treenail python3-treenail
show is-active treenail kubelet
echo "links: $(links)"
ls /etc/treenail /var/lib/treenail | grep toml
cat /var/lib/treenail/ledger.json
find /usr/bin /usr/lib /usr/share/man -name '*treenail*' -not -path '*/rpm/*'
systemctl daemon-reload
systemctl restart kubelet && echo kubelet restarts

# An image without the package: its scripts do not run on the machine.
rpm --install --nodeps new/*.rpm
rpm --erase --noscripts treenail python3-treenail
systemctl daemon-reload
systemctl restart kubelet || echo kubelet fails
systemctl disable treenail-firstboot
systemctl start kubelet && echo kubelet starts
"""


def build_packages(folder: Path, container: Container, *, is_new: bool) -> None:
    """Build the packages of a node; the new ones have another default in agent.toml.

    Units, settings and scripts are those of the project; the modules are empty, which is faster.
    """
    source = folder / ("new" if is_new else "old")
    for module in MODULES:
        (source / module).mkdir(parents=True, exist_ok=True)
        (source / module / "__init__.py").touch()
    for name in ("py.typed", "cli/node/main.py"):
        (source / "agent/treenail" / name).touch()
    (source / "agent/treenail/manifests/monitoring_files/alerts.yaml").touch()
    for name in ("systemd", "rpm", "tools"):
        shutil.copytree(REPOSITORY / name, source / name)
    (source / "tools/completions.py").write_text(COMPLETIONS)
    for name in ("pyproject.toml", "LICENSE", "README.md", "NEWS.md"):
        shutil.copy(REPOSITORY / name, source)
    (source / ".venv").symlink_to(REPOSITORY / ".venv")
    if is_new:
        with (source / "rpm/agent.toml").open("a") as settings:
            settings.write("# new\n")
    options = ("--without", "tests", "--without", "selinux")
    release = ("--define", f"dist .{int(is_new)}", "--define", "_binary_payload w0.gzdio")
    done = subprocess.run(
        ["tools/rpm", folder / f"built-{source.name}", "rpm/macros.elsewhere", *options, *release],
        cwd=source, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    destination = container.shared / source.name
    destination.mkdir()
    built = folder / f"built-{source.name}/RPMS/noarch"
    for package in ("treenail-0*.rpm", "python3-treenail-0*.rpm"):
        (found,) = built.glob(package)
        shutil.copy(found, destination)


def test_packages_install_upgrade_and_leave_nothing_running(
    container: Container, tmp_path: Path
) -> None:
    build_packages(tmp_path, container, is_new=False)
    build_packages(tmp_path, container, is_new=True)
    inside = container.inside("sh", "-c", SCRIPT, str(container.shared))
    done = subprocess.run(inside, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "is-enabled: enabled enabled ",
        "is-active: active ",
        "restarted",
        'drain = "never"',
        "# new",
        "is-active: inactive active ",
        "links: ",
        "agent.toml.rpmnew",
        "agent.toml.rpmsave",
        "kept",
        "kubelet restarts",
        "kubelet fails",
        "kubelet starts",
    ]
