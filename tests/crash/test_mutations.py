"""Calls of the agent whose omission a crash state shows.

`tests.daemon.configuration.test_once_power_cut` takes out each flush and rename of the undo
transaction. This adds the whole agent, which repairs much of what a missing flush loses: it plans
again, and writes the ledger again.
"""

from pathlib import Path

import pytest

from tests.crash.mutations import find_notice, list_mutations
from tests.crash.scenarios import SCENARIOS
from tests.crash.states import ScenarioRun
from tests.records import write_record

NEEDED = (
    (
        "exchange in UndoTransaction.apply_changes > UndoTransaction._put_entry > "
        "EntryWriter.exchange_entries"
    ),
    "fsync in UndoTransaction._record_changes > UndoLog.append_record > UndoLog._fsync_directory",
    (
        "fsync in UndoTransaction._remove_replaced > FsyncQueue.fsync_directories > "
        "FsyncQueue.fsync_path"
    ),
    "fsync in UndoTransaction.apply_changes > UndoTransaction._make_entry > EntryWriter.make_file",
    "fsync in _write_alone.<locals>.locked > HostFiles.write_files > HostFiles._write_temporary",
    "replace in HostFiles.write_file > _write_alone.<locals>.locked > HostFiles.write_files",
)


@pytest.mark.long
@pytest.mark.limit(3600.0)
def test_omitted_call_of_the_agent_is_noticed(tmp_path: Path) -> None:
    run = ScenarioRun(SCENARIOS["live config"], tmp_path)
    mutations = {str(each): each for each in list_mutations(run)}
    assert mutations.keys() >= set(NEEDED)
    missed = [name for name in NEEDED if not find_notice(run, mutations[name], limit=6)]
    assert missed == []
    write_record(
        "crash",
        what="calls of the agent that make a change durable or atomic, each taken out",
        count=len(NEEDED),
        result="each omission noticed",
        command="make test-long ARGS=tests/crash/test_mutations.py",
    )
