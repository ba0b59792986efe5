"""A failure of the emulated machine is reported as such."""

import pytest

from vmlab.site import Site
from vmlab.tools import GuestPanicError


def test_kernel_panic_is_reported_at_once(site: Site) -> None:
    with pytest.raises(GuestPanicError, match="sysrq triggered crash"):
        site.machine.sh("echo c >/proc/sysrq-trigger", limit_s=60.0)
    with pytest.raises(GuestPanicError):
        site.wait(lambda: False, "nothing is waited for", 600.0)
