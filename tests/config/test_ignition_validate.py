"""Ignition's own validator reads what is emitted for 3.0 to 3.3, without a warning.

The program is `ignition-validate` of Debian's package ignition, 2.14. It warns about each field
that the version of a document does not have.
"""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.fuzzing import EXAMPLES
from tests.config.test_ignition_emit import list_models
from tests.oracle import needs_oracle, rendered
from treenail.api import documents
from treenail.api.ignition import parse_ignition
from treenail.api.ignition_model import IgnitionConfig
from treenail.api.machineconfig import MachineConfig
from treenail.config.ignition_emit import emit_ignition
from treenail.errors import ConfigError

PROGRAM = shutil.which("ignition-validate")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason="no ignition-validate: install Debian's ignition"),
]
VERSIONS = ("3.0.0", "3.1.0", "3.2.0", "3.3.0")
OF_A_UNIT = re.compile(
    r"warning at .* is enabled, but has no install section so enable does nothing"
)
"""The only warning about contents; it does not depend on the version."""
STEP = 1 if EXAMPLES else 5


def validate(document: object, path: Path) -> list[str]:
    """Return what the program prints about a document, without warnings about units."""
    path.write_text(json.dumps(document))
    done = subprocess.run(
        [str(PROGRAM), str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    lines = (done.stdout + done.stderr).splitlines()
    found = [line for line in lines if not OF_A_UNIT.fullmatch(line)]
    return found if done.returncode == 0 else ["rejected", *found]


@pytest.mark.limit(EXAMPLES or 60.0)
@pytest.mark.parametrize("version", VERSIONS)
def test_random_configs_are_valid_without_a_warning_or_refused(
    version: str, tmp_path: Path
) -> None:
    """A refused config is one that Ignition would reject, or read without a field."""
    place = tmp_path / "config.ign"
    emitted, refused = {}, {}
    for config in itertools.islice(list_models(), 0, None, STEP):
        try:
            document = emit_ignition(config, version)
            emitted[json.dumps(document)] = validate(document, place)
        except ConfigError as error:
            refused[str(error)] = validate(relabel(config, version), place)
    assert {text: lines for text, lines in emitted.items() if lines} == {}
    assert [text for text, lines in refused.items() if not lines] == []
    assert len(emitted) > 100
    assert refused


@needs_oracle
@pytest.mark.parametrize("version", VERSIONS)
def test_real_rendered_configs_are_valid_without_a_warning(version: str, tmp_path: Path) -> None:
    found = rendered()
    for path in found:
        document = documents.load_document(path.read_text(), where=path.name)
        config = parse_ignition(MachineConfig.from_json(document).config)
        assert validate(emit_ignition(config, version), tmp_path / "config.ign") == []
    assert found


def relabel(config: IgnitionConfig, version: str) -> object:
    """Return the config in the newest version, with the number of another one."""
    document = config.to_json()
    return {**document, "ignition": {**config.ignition_section, "version": version}}


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"ignition": {"version": "3.2.0"}, "kernelArguments": {}}, "Unused key kernelArguments"),
        ({"ignition": {"version": "3.4.0"}}, "unsupported config version"),
        ({"ignition": {"version": "3.0.0"}, "storage": {"files": [{"path": "x"}]}}, "rejected"),
    ],
)
def test_validator_reports_fields_that_a_version_lacks(
    document: object, line: str, tmp_path: Path
) -> None:
    assert any(line in each for each in validate(document, tmp_path / "config.ign"))
