"""Fuzzes one target: ``python -m tests.fuzz.child MODULE TARGET WORK libFuzzer-options``.

Findings do not end the run. The first input of each finding stays in WORK/found, with its traceback
beside it.
"""

import gc
import hashlib
import mmap
import resource
import sys
from pathlib import Path

import atheris

from tests.fuzz.mutate import Mutator, collect_words, format_dictionary
from tests.fuzz.target import Finding, FuzzTarget, run_input

MEMORY_LIMIT = 1024 * 1024 * 1024
"""Bytes of address space that an input may add: decompressed content may have 64 MiB."""


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's options end it; never returns."""
    module, name, work = arguments[0], arguments[1], Path(arguments[2])
    with atheris.instrument_imports(include=["treenail"]):
        from tests.fuzz.targets import load_targets

        target = next(each for each in load_targets(module) if each.name == name)
        seeds = [*target.seeds()]
        # Modules that readers import late must be instrumented too.
        for each in seeds:
            run_input(target, each)
    corpus, found = work / "corpus", work / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    for each in seeds:
        (corpus / hashlib.sha256(each).hexdigest()).write_bytes(each)
    words = collect_words()
    (work / "words").write_text(format_dictionary(words), "utf-8")
    recorder = FindingRecorder(target, found)
    # Fuzz replaces atheris.Mutate, so it is looked up for each call.
    mutator = Mutator(
        target.grammar,
        words,
        seeds,
        lambda content, size: atheris.Mutate(content, size),  # noqa: PLW0108 - as above
    )
    options = [
        sys.argv[0],
        f"-dict={work / 'words'}",
        f"-max_len={target.max_bytes}",
        f"-artifact_prefix={found}/libfuzzer-",
        *arguments[3:],
        str(corpus),
    ]
    gc.collect()
    limit_memory()
    atheris.Setup(options, recorder.run, custom_mutator=mutator.mutate)
    atheris.Fuzz()


class FindingRecorder:
    """Runs inputs, and keeps the first and shortest input of each finding."""

    def __init__(self, target: FuzzTarget, directory: Path) -> None:
        self._target = target
        self._directory = directory
        self._sizes: dict[str, int] = {}
        # A file, so that it outlives a process that is killed.
        with (directory.parent / "current").open("w+b") as current:
            current.truncate(2 * target.max_bytes + 8)
            self._current = mmap.mmap(current.fileno(), 0)

    def run(self, content: bytes) -> None:
        self._current[: 8 + len(content)] = len(content).to_bytes(8, "big") + content
        finding = run_input(self._target, content)
        if finding is None:
            return
        if len(content) < self._sizes.get(finding.key, sys.maxsize):
            self._sizes[finding.key] = len(content)
            self._write(finding, content)

    def _write(self, finding: Finding, content: bytes) -> None:
        path = self._directory / finding.key.strip("<>").replace("/", "-")
        path.write_bytes(content)
        path.with_name(f"{path.name}.txt").write_text(
            finding.details, "utf-8", errors="backslashreplace"
        )


def limit_memory() -> None:
    """Let a reader that needs too much memory fail with `MemoryError`, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(sys.argv[1:])
