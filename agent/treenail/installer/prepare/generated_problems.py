"""Problems of objects that the stage ``prepare`` would write, at the place of the user's input.

The file with these objects does not exist yet: its lines are of no use. Pure.
"""

from treenail.api import documents, machineosconfig
from treenail.api.yaml_positions import FieldPath, YamlPositions, find_positions
from treenail.errors import ConfigError
from treenail.installer.inputs.image_mode_field import FIELD
from treenail.installer.inputs.install_config import PULL_SECRET_FIELD, InstallConfig
from treenail.installer.inputs.install_manifests import InstallManifest
from treenail.installer.inputs.install_problem import InstallProblem

_POOL_FIELDS = {
    "containerFile": "containerFile",
    "renderedImagePushSpec": "renderedImagePushSpec",
}
"""Fields of a pool by those of its MachineOSConfig."""


def move_problem(
    problem: InstallProblem, manifest: InstallManifest | None, config: InstallConfig
) -> InstallProblem:
    """Return a problem of a generated object with file and line of the install configuration."""
    try:
        text = documents.decode_text(config.content, config.name)
        positions = find_positions(text, where=config.name)
    except ConfigError:
        positions = YamlPositions()
    path = _find_origin(problem, manifest, config, positions)
    return InstallProblem(config.name, problem.text, problem.remedy, positions.find_line(*path))


def _find_origin(
    problem: InstallProblem,
    manifest: InstallManifest | None,
    config: InstallConfig,
    positions: YamlPositions,
) -> FieldPath:
    if manifest is None or config.mode.settings is None:
        return (FIELD,)
    if manifest.kind == "Secret":
        return (PULL_SECRET_FIELD,) if (PULL_SECRET_FIELD,) in positions.lines else (FIELD,)
    if manifest.kind != machineosconfig.KIND:
        return (FIELD,)
    names = [each.name for each in config.mode.settings.pools]
    lines = dict(zip(names, config.mode.pool_lines, strict=True))
    for path, line in positions.lines.items():
        if path[:-1] == (FIELD, "pools") and line == lines.get(manifest.name):
            inner = _POOL_FIELDS.get(str(problem.path[1])) if len(problem.path) > 1 else None
            return (*path, inner) if inner else path
    return (FIELD,)
