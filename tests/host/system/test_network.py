"""The default route, from the kernel's routing tables."""

from pathlib import Path

import pytest

from treenail.host.filesystem.root_directory import Root
from treenail.host.system.health_probes import HostNetwork, KubeletFiles

HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
LINK = "eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
DEFAULT = "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
ZERO = "0" * 32
REJECTED6 = f"{ZERO} 00 {ZERO} 00 {ZERO} ffffffff 00000001 00000000 00200200       lo\n"
DEFAULT6 = f"{ZERO} 00 {ZERO} 00 fe80{'0' * 28} 00000400 00000003 00000000 00000003     eth0\n"


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "found"),
    [
        (None, None, None),
        (HEADER + LINK, REJECTED6, False),
        (HEADER + LINK + DEFAULT, None, True),
        (HEADER, REJECTED6 + DEFAULT6, True),
        ("nonsense\n" * 3, "", False),
    ],
)
def test_default_route_is_found(
    tmp_path: Path, ipv4: str | None, ipv6: str | None, found: bool | None
) -> None:
    directory = tmp_path / "proc/net"
    directory.mkdir(parents=True)
    for name, content in (("route", ipv4), ("ipv6_route", ipv6)):
        if content is not None:
            (directory / name).write_text(content)
    assert HostNetwork(Root(tmp_path)).has_default_route() is found


def test_kubelet_waits_while_its_new_key_is_pending(tmp_path: Path) -> None:
    files = KubeletFiles(Root(tmp_path))
    assert not files.is_waiting_for_certificate()
    key = tmp_path / "var/lib/kubelet/pki/kubelet-client.key.tmp"
    key.parent.mkdir(parents=True)
    key.touch()
    assert files.is_waiting_for_certificate()
