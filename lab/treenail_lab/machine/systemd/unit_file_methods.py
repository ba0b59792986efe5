"""The methods of systemd's manager that concern unit files: enable, mask, preset and the like."""

from collections.abc import Callable
from pathlib import Path

from treenail_lab.machine.bus.objects import MethodCall, MethodCallback, ReplyValues
from treenail_lab.machine.systemd.unit_files import UnitFileChanges, UnitFileTree


class UnitFileMethods:
    """The methods over one machine's unit files; ``changed`` is called when links changed."""

    def __init__(self, root: Path, files: UnitFileTree, on_change: Callable[[], None]) -> None:
        self._root = root
        self._files = files
        self._on_change = on_change

    def build_table(self) -> dict[str, MethodCallback]:
        """The methods by their D-Bus names."""
        return {
            "ListUnitFiles": self._handle_list,
            "GetUnitFileState": lambda call: (self._files.read_state(call.arguments[0]),),
            "EnableUnitFiles": self._handle_enable,
            "ReenableUnitFiles": self._handle_reenable,
            "DisableUnitFiles": self._handle_disable,
            "MaskUnitFiles": self._handle_mask,
            "UnmaskUnitFiles": self._handle_unmask,
            "PresetUnitFiles": self._handle_preset,
        }

    def _handle_list(self, _call: MethodCall) -> ReplyValues:
        files = self._files
        found = ((files.find_file(name), files.read_state(name)) for name in files.list_names())
        return ([(f"/{p.relative_to(self._root)}", state) for p, state in found if p],)

    def _handle_enable(self, call: MethodCall) -> ReplyValues:
        names, runtime, force = call.arguments
        return self._build_reply(self._files.enable_units(names, runtime=runtime, force=force))

    def _handle_reenable(self, call: MethodCall) -> ReplyValues:
        names, runtime, force = call.arguments
        removed = self._files.disable_units(names, runtime=runtime)
        changes = self._files.enable_units(names, runtime=runtime, force=force)
        return self._build_reply(
            UnitFileChanges(removed.changes + changes.changes, changes.has_install_info)
        )

    def _handle_preset(self, call: MethodCall) -> ReplyValues:
        names, runtime, force = call.arguments
        return self._build_reply(self._files.preset_units(names, runtime=runtime, force=force))

    def _handle_disable(self, call: MethodCall) -> ReplyValues:
        names, runtime = call.arguments
        return (self._announce_changes(self._files.disable_units(names, runtime=runtime)),)

    def _handle_mask(self, call: MethodCall) -> ReplyValues:
        names, runtime, force = call.arguments
        return (
            self._announce_changes(self._files.mask_units(names, runtime=runtime, force=force)),
        )

    def _handle_unmask(self, call: MethodCall) -> ReplyValues:
        names, runtime = call.arguments
        return (self._announce_changes(self._files.unmask_units(names, runtime=runtime)),)

    def _build_reply(self, changes: UnitFileChanges) -> ReplyValues:
        return (changes.has_install_info, self._announce_changes(changes))

    def _announce_changes(self, changes: UnitFileChanges) -> list[tuple[str, str, str]]:
        if changes.changes:
            self._on_change()
        return changes.changes
