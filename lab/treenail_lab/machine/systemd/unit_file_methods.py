"""The methods of systemd's manager that concern unit files: enable, mask, preset and the like."""

from collections.abc import Callable
from pathlib import Path

from treenail_lab.machine.bus.objects import Call, Method, Values
from treenail_lab.machine.systemd.unit_files import Changes, UnitFiles


class UnitFileMethods:
    """The methods over one machine's unit files; ``changed`` is called when links changed."""

    def __init__(self, root: Path, files: UnitFiles, changed: Callable[[], None]) -> None:
        self._root = root
        self._files = files
        self._changed = changed

    def table(self) -> dict[str, Method]:
        """The methods by their D-Bus names."""
        return {
            "ListUnitFiles": self._list,
            "GetUnitFileState": lambda call: (self._files.state(call.values[0]),),
            "EnableUnitFiles": self._enable,
            "ReenableUnitFiles": self._reenable,
            "DisableUnitFiles": self._disable,
            "MaskUnitFiles": self._mask,
            "UnmaskUnitFiles": self._unmask,
            "PresetUnitFiles": self._preset,
        }

    def _list(self, _call: Call) -> Values:
        files = self._files
        found = ((files.find(name), files.state(name)) for name in files.names())
        return ([(f"/{p.relative_to(self._root)}", state) for p, state in found if p],)

    def _enable(self, call: Call) -> Values:
        names, runtime, force = call.values
        return self._installed(self._files.enable(names, runtime=runtime, force=force))

    def _reenable(self, call: Call) -> Values:
        names, runtime, force = call.values
        removed = self._files.disable(names, runtime=runtime)
        changes = self._files.enable(names, runtime=runtime, force=force)
        return self._installed(Changes(removed.made + changes.made, changes.installable))

    def _preset(self, call: Call) -> Values:
        names, runtime, force = call.values
        return self._installed(self._files.preset(names, runtime=runtime, force=force))

    def _disable(self, call: Call) -> Values:
        names, runtime = call.values
        return (self._announced(self._files.disable(names, runtime=runtime)),)

    def _mask(self, call: Call) -> Values:
        names, runtime, force = call.values
        return (self._announced(self._files.mask(names, runtime=runtime, force=force)),)

    def _unmask(self, call: Call) -> Values:
        names, runtime = call.values
        return (self._announced(self._files.unmask(names, runtime=runtime)),)

    def _installed(self, changes: Changes) -> Values:
        return (changes.installable, self._announced(changes))

    def _announced(self, changes: Changes) -> list[tuple[str, str, str]]:
        if changes.made:
            self._changed()
        return changes.made
