"""Logins of the Secrets that the stage ``prepare`` writes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenail.api import documents
from treenail.api.decode import Fields
from treenail.config.pullsecret import (
    PullSecret,
    find_credential,
    parse_pull_secret,
    read_login_secret,
)
from treenail.controllers.handover.image_mode import NAMESPACE, ImageMode, ImageModePool
from treenail.errors import ConfigError, CredentialError, FileError
from treenail.image.push_spec import PushSpec, parse_push_spec
from treenail.installer.directory.install_config import InstallConfig
from treenail.installer.directory.manifest_checks import is_cluster_registry
from treenail.installer.directory.manifest_files import read_file
from treenail.installer.directory.prepared_manifests import FROM_OPTION, PULL_SECRET, PUSH_SECRET
from treenail.installer.directory.problems import InstallProblem


@dataclass(frozen=True, slots=True)
class PreparedLogins:
    """Logins for pulls and for pushes."""

    pull: PullSecret = field(default_factory=PullSecret, repr=False)
    push: PullSecret = field(default_factory=PullSecret, repr=False)
    from_options: frozenset[str] = frozenset()
    """Names of the Secrets whose logins come from a file of an option."""
    problems: tuple[InstallProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class PushLogins:
    """Logins for the push specs, without those for other registries."""

    logins: PullSecret = field(default_factory=PullSecret, repr=False)
    problems: tuple[InstallProblem, ...] = ()
    notes: tuple[str, ...] = ()


def read_logins(
    pull_file: Path | None, push_file: Path | None, config: InstallConfig, previous: bytes
) -> PreparedLogins:
    """Read the logins of options, else those of options of an earlier run, else of the config.

    ``previous`` are the manifests of the earlier run: a second run needs no option again. Raises
    `FileError` and `CredentialError` for a file of an option.
    """
    earlier = _find_earlier_logins(previous)
    problems = []
    if pull_file is not None:
        earlier[PULL_SECRET] = _read_login_file(pull_file)
    if push_file is not None:
        earlier[PUSH_SECRET] = _read_login_file(push_file)
    own = PullSecret()
    try:
        own = parse_pull_secret(config.pull_secret, where=f"{config.name}: pullSecret")
    except CredentialError as error:
        remedy = error.remedy or "write the JSON of a .dockerconfigjson"
        problems.append(InstallProblem(config.name, str(error), remedy))
    pull = earlier.get(PULL_SECRET, own)
    push = earlier.get(PUSH_SECRET, pull)
    return PreparedLogins(pull, push, frozenset(earlier), tuple(problems))


def select_push_logins(
    config: InstallConfig, pools: Sequence[ImageModePool], logins: PullSecret
) -> PushLogins:
    """Select the logins for the push specs of these pools."""
    settings = config.mode.settings or ImageMode()
    lines = {
        pool.name: line for pool, line in zip(settings.pools, config.mode.pool_lines, strict=True)
    }
    chosen, problems, notes = {}, [], []
    for pool in pools:
        try:
            spec = parse_push_spec(pool.push_spec, where="renderedImagePushSpec")
        except ConfigError:
            continue  # A problem of the field.
        entry = _find_entry(logins, spec)
        if entry:
            chosen[entry] = logins.credentials[entry]
        elif is_cluster_registry(pool.push_spec):
            notes.append(
                f"pool {pool.name}: the login for {spec.registry} exists with the cluster; "
                f"create Secret {NAMESPACE}/{PUSH_SECRET} with it before the hand-over"
            )
        else:
            text = f"pool {pool.name}: there is no login for {spec.registry}, which gets its image"
            remedy = (
                "name a .dockerconfigjson with one: --push-secret FILE, or add it to pullSecret"
            )
            problems.append(InstallProblem(config.name, text, remedy, lines[pool.name]))
    return PushLogins(PullSecret(chosen), tuple(problems), tuple(notes))


def _read_login_file(path: Path) -> PullSecret:
    content = read_file(path)
    if content is None:
        raise FileError(f"cannot read {path}: no such file", remedy="correct the option")
    return parse_pull_secret(content, where=str(path))


def _find_earlier_logins(previous: bytes) -> dict[str, PullSecret]:
    """Return the logins from options in manifests of an earlier run, by name of the Secret."""
    found = {}
    try:
        for document in documents.load_documents(previous, where="the manifests"):
            meta = Fields.from_json(document, "").get_object("metadata")
            if document.get("kind") == "Secret" and meta.get_text_map("annotations").get(
                FROM_OPTION
            ):
                name = meta.get_text("name")
                found[name] = read_login_secret(document, where=name)
    except (ConfigError, CredentialError):
        return {}
    return found


def _find_entry(logins: PullSecret, spec: PushSpec) -> str:
    """Return the name of the login for a repository; empty without one."""
    fitting = [
        name
        for name, login in logins.credentials.items()
        if find_credential(PullSecret({name: login}), spec.registry, spec.repository)
    ]
    return max(fitting, key=len, default="")
