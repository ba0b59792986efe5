"""A logind that counts reboots, and lists the given inhibitors."""

from gi.repository import GLib

from tests.fakes.bus_service import Exports

NAME = "org.freedesktop.login1"
PATH = "/org/freedesktop/login1"
_XML = """<node><interface name="org.freedesktop.login1.Manager">
  <method name="Reboot"><arg type="b" direction="in"/></method>
  <method name="ListInhibitors"><arg type="a(ssssuu)" direction="out"/></method>
</interface></node>"""


class Login1(Exports):
    """The manager object."""

    def __init__(self, *inhibitors: tuple[str, str, str, str, int, int]) -> None:
        methods = {
            "Reboot": self._reboot,
            "ListInhibitors": lambda: GLib.Variant("(a(ssssuu))", (list(inhibitors),)),
        }
        super().__init__(_XML, methods)
        self.reboots = 0

    def _reboot(self, _interactive: object) -> None:
        self.reboots += 1
