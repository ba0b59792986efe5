"""Ignition's own validators read what is emitted for each version, without a warning.

`ignition-validate` of Debian's package ignition, 2.14, reads 3.0 to 3.3. For the other versions
`TREENAIL_TEST_IGNITION_VALIDATE` names programs of other releases, with `:` between them. They warn
about each field that the version of a document does not have.
"""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.fuzzing import EXAMPLES
from tests.config.test_ignition_emit import list_models
from tests.oracle import needs_oracle, rendered
from treenail.api import documents
from treenail.api.decode import Json
from treenail.api.ignition.model import IgnitionConfig
from treenail.api.ignition.parser import VERSION2, parse_ignition
from treenail.api.ignition.schema import NEWEST
from treenail.api.machineconfig import MachineConfig
from treenail.config.ignition.emit import (
    KERNEL_ARGUMENTS_SINCE,
    VERSIONS_SERVED,
    detach_kernel_arguments,
    emit_ignition,
)
from treenail.errors import ConfigError

pytestmark = pytest.mark.process
VARIABLE = "TREENAIL_TEST_IGNITION_VALIDATE"
PROGRAMS = [
    program
    for program in (shutil.which("ignition-validate"), *os.environ.get(VARIABLE, "").split(":"))
    if program
]
OF_THE_CONTENTS = re.compile(
    r".*("
    r"is enabled, but has no install section so enable does nothing"
    r"|template unit .* doesn't have Install section"
    r"|user/group ignored for hard link"
    # By Ignition 2.24, also in 3.4, which has them. A MachineConfig with them is invalid anyway.
    r"|setuid/setgid/sticky bits are not supported or functional in spec versions older than 3.6.0"
    r")"
)
"""Warnings that do not depend on the version of the document."""
LOST_IN_CONVERSION = "].advertisement needs Ignition 3.5.0"
"""Version 3.4 has this field, and programs that read 3.5 lose it when they convert a 3.4 config."""
LOCATION = re.compile(r"warning at line \d+, column \d+|\s+\d+: .*|\s*\^\s*")
"""What Ignition 0.35 prints before a warning."""
STEP = 1 if EXAMPLES else 5


@functools.cache
def find_program(version: str) -> str:
    """Return a program that reads this version; skip the test without one."""
    for program in PROGRAMS:
        config = json.dumps({"ignition": {"version": version}})
        done = subprocess.run(
            [program, "-"], input=config, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode == 0:
            return program
    pytest.skip(f"no ignition-validate reads {version}: set {VARIABLE}, or install ignition")


def validate(document: object, path: Path, version: str) -> list[str]:
    """Return what the program prints about a document, without warnings about contents."""
    path.write_text(json.dumps(document))
    done = subprocess.run(
        [find_program(version), str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    lines = (done.stdout + done.stderr).splitlines()
    ignored = (OF_THE_CONTENTS, LOCATION) if version == VERSION2 else (OF_THE_CONTENTS,)
    found = [line for line in lines if not any(each.fullmatch(line) for each in ignored)]
    return found if done.returncode == 0 else ["rejected", *found]


@pytest.mark.limit(EXAMPLES or 600.0)
@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_random_configs_are_valid_without_a_warning_or_refused(
    version: str, tmp_path: Path
) -> None:
    """A refused config is one that Ignition would reject, or read without a field."""
    place = tmp_path / "config.ign"
    emitted, refused = {}, {}
    for config in itertools.islice(list_models(), 0, None, STEP):
        try:
            document = emit_ignition(config, version)
            emitted[json.dumps(document)] = validate(document, place, version)
        except ConfigError as error:
            refused[str(error)] = validate(relabel(config, version), place, version)
    assert {text: lines for text, lines in emitted.items() if lines} == {}
    if version != VERSION2:  # its structure is another one
        unexplained = [text for text, lines in refused.items() if not lines]
        assert [text for text in unexplained if LOST_IN_CONVERSION not in text] == []
    assert len(emitted) > 50
    assert refused


@needs_oracle
@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_real_rendered_configs_are_valid_without_a_warning(version: str, tmp_path: Path) -> None:
    found = rendered()
    for path in found:
        document = documents.load_document(path.read_text(), where=path.name)
        config = parse_ignition(MachineConfig.from_json(document).config)
        if version < KERNEL_ARGUMENTS_SINCE:
            config, _ = detach_kernel_arguments(config)
        place = tmp_path / "config.ign"
        assert validate(emit_ignition(config, version), place, version) == []
    assert found


def relabel(config: IgnitionConfig, version: str) -> object:
    """Return the config in the newest version, with the number of another one."""
    document = config.to_json()
    return {**document, "ignition": {**config.ignition_section, "version": version}}


@pytest.mark.parametrize(
    ("version", "fields", "line"),
    [
        ("3.2.0", {"kernelArguments": {}}, "unused key kernelarguments"),
        ("3.0.0", {"storage": {"files": [{"path": "x"}]}}, "rejected"),
        (NEWEST, {"another": {}}, "unused key another"),
        (VERSION2, {"another": {}}, "unrecognized key: another"),
    ],
)
def test_validator_reports_fields_that_a_version_lacks(
    version: str, fields: Json, line: str, tmp_path: Path
) -> None:
    document = {"ignition": {"version": version}, **fields}
    # Ignition 2.20 begins the words with a capital letter, 2.26 does not.
    found = [each.casefold() for each in validate(document, tmp_path / "config.ign", version)]
    assert any(line in each for each in found)
