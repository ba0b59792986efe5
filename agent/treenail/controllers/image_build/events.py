"""Events and counters of image builds."""

from treenail.api.machineosbuild import API_VERSION, KIND, BuildState, MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.image_build.actions import SetBuildStatus
from treenail.controllers.image_build.observed import make_build_facts
from treenail.controllers.pools.image_tags import TagChange
from treenail.image.inputs.findings import InputReason
from treenail.kube.events import EventRecorder, ObjectReference
from treenail.kube.resources import MACHINEOSCONFIGS


class BuildEvents:
    """Records an Event for each change of the state or the reason of a build."""

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder

    def record_prune_problem(self, config: MachineOSConfig, message: str) -> None:
        """Record that images cannot be deleted."""
        owner = ObjectReference(
            MACHINEOSCONFIGS.kind, config.name, config.metadata.uid, api_version=API_VERSION
        )
        self._recorder.record_warning(owner, "ImagesNotPruned", message)

    def record_refusal(self, config: MachineOSConfig, message: str) -> None:
        """Record that the API server refuses a write."""
        owner = ObjectReference(
            MACHINEOSCONFIGS.kind, config.name, config.metadata.uid, api_version=API_VERSION
        )
        self._recorder.record_warning(owner, InputReason.REQUEST_REFUSED, message)

    def record_tag_change(self, config: MachineOSConfig, change: TagChange) -> None:
        """Record that the tag of the base image moved, or is not followed."""
        owner = ObjectReference(
            MACHINEOSCONFIGS.kind, config.name, config.metadata.uid, api_version=API_VERSION
        )
        if change.is_warning:
            self._recorder.record_warning(owner, change.reason, change.message)
        else:
            self._recorder.record_normal(owner, change.reason, change.message)

    def record_status(
        self, action: SetBuildStatus, before: MachineOSBuild, config: MachineOSConfig
    ) -> None:
        """Record what a written status says. ``before`` is the build before the write."""
        known = before.condition
        if known is not None and (known.type, known.reason) == (action.state, action.reason):
            return
        build = ObjectReference(KIND, before.name, before.metadata.uid, api_version=API_VERSION)
        owner = ObjectReference(
            MACHINEOSCONFIGS.kind, config.name, config.metadata.uid, api_version=API_VERSION
        )
        if action.reason:
            self._recorder.record_warning(build, action.reason, action.message)
            self._recorder.record_warning(owner, action.reason, f"{before.name}: {action.message}")
        elif action.state is BuildState.SUCCEEDED:
            text = f"built {action.digest}"
            self._recorder.record_normal(build, "BuildSucceeded", text)
            self._recorder.record_normal(owner, "BuildSucceeded", f"{before.name}: {text}")
            # Written before the status.
            if warning := make_build_facts(before).report.warning:
                self._recorder.record_warning(build, "ProvenanceNotAttached", warning)
                text = f"{before.name}: {warning}"
                self._recorder.record_warning(owner, "ProvenanceNotAttached", text)
        elif before.state is not action.state:
            self._recorder.record_normal(build, f"Build{action.state.value}", action.message)
