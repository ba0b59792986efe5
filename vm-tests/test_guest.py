"""What goes wrong with a machine itself is told as that."""

import pytest

from vmlab.site import Site
from vmlab.tools import GuestPanicError


def test_a_kernel_that_panics_is_told_of_at_once(site: Site) -> None:
    with pytest.raises(GuestPanicError, match="sysrq triggered crash"):
        site.machine.sh("echo c >/proc/sysrq-trigger", limit_s=60.0)
    with pytest.raises(GuestPanicError):
        site.wait(lambda: False, "nothing is waited for", 600.0)
