"""Logins of the Secrets that the stage ``prepare`` writes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treenail import errors
from treenail.api import component_names, decode, documents, pullspec
from treenail.config import pullsecret
from treenail.controllers.handover import image_mode
from treenail.installer.directory import (
    install_config,
    install_files,
    manifest_checks,
    prepared_manifests,
)
from treenail.installer.directory.problems import InstallProblem


@dataclass(frozen=True, slots=True)
class PreparedLogins:
    """Logins for pulls and for pushes."""

    pull: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret, repr=False)
    push: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret, repr=False)
    from_options: frozenset[str] = frozenset()
    """Names of the Secrets whose logins come from a file of an option."""
    problems: tuple[InstallProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class PushLogins:
    """Logins for the push specs, without those for other registries."""

    logins: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret, repr=False)
    problems: tuple[InstallProblem, ...] = ()
    notes: tuple[str, ...] = ()


def read_logins(
    pull_file: Path | None,
    push_file: Path | None,
    config: install_config.InstallConfig,
    previous: bytes,
) -> PreparedLogins:
    """Read the logins of options, else those of options of an earlier run, else of the config.

    ``previous`` are the manifests of the earlier run: a second run needs no option again. Raises
    `FileError` and `CredentialError` for a file of an option.
    """
    earlier = _find_earlier_logins(previous)
    problems = []
    if pull_file is not None:
        earlier[prepared_manifests.PULL_SECRET] = _read_login_file(pull_file)
    if push_file is not None:
        earlier[prepared_manifests.PUSH_SECRET] = _read_login_file(push_file)
    own = pullsecret.PullSecret()
    try:
        own = pullsecret.parse_pull_secret(config.pull_secret, where=f"{config.name}: pullSecret")
    except errors.CredentialError as error:
        remedy = error.remedy or "write the JSON of a .dockerconfigjson"
        problems.append(InstallProblem(config.name, str(error), remedy))
    pull = earlier.get(prepared_manifests.PULL_SECRET, own)
    push = earlier.get(prepared_manifests.PUSH_SECRET, pull)
    return PreparedLogins(pull, push, frozenset(earlier), tuple(problems))


def select_push_logins(
    config: install_config.InstallConfig,
    pools: Sequence[image_mode.ImageModePool],
    logins: pullsecret.PullSecret,
) -> PushLogins:
    """Select the logins for the push specs of these pools."""
    settings = config.mode.settings or image_mode.ImageMode()
    lines = {
        pool.name: line for pool, line in zip(settings.pools, config.mode.pool_lines, strict=True)
    }
    chosen, problems, notes = {}, [], []
    for pool in pools:
        try:
            spec = pullspec.parse_push_spec(pool.push_spec, where="renderedImagePushSpec")
        except errors.ConfigError:
            continue  # A problem of the field.
        entry = _find_entry(logins, spec)
        if entry:
            chosen[entry] = logins.credentials[entry]
        elif manifest_checks.is_cluster_registry(pool.push_spec):
            notes.append(
                f"pool {pool.name}: the login for {spec.registry} exists with the cluster; create "
                f"Secret {component_names.NAMESPACE}/{prepared_manifests.PUSH_SECRET} with it "
                "before the hand-over"
            )
        else:
            text = f"pool {pool.name}: there is no login for {spec.registry}, which gets its image"
            remedy = (
                "name a .dockerconfigjson with one: --push-secret FILE, or add it to pullSecret"
            )
            problems.append(InstallProblem(config.name, text, remedy, lines[pool.name]))
    return PushLogins(pullsecret.PullSecret(chosen), tuple(problems), tuple(notes))


def _read_login_file(path: Path) -> pullsecret.PullSecret:
    content = install_files.InstallFiles().read(path, limit=install_files.CONFIG_LIMIT)
    if content is None:
        raise errors.FileError(f"cannot read {path}: no such file", remedy="correct the option")
    return pullsecret.parse_pull_secret(content, where=str(path))


def _find_earlier_logins(previous: bytes) -> dict[str, pullsecret.PullSecret]:
    """Return the logins from options in manifests of an earlier run, by name of the Secret."""
    logins = {}
    try:
        for document in documents.load_documents(previous, where="the manifests"):
            meta = decode.Fields.from_json(document, "").get_object("metadata")
            if document.get("kind") == "Secret" and meta.get_text_map("annotations").get(
                prepared_manifests.FROM_OPTION
            ):
                name = meta.get_text("name")
                logins[name] = pullsecret.read_login_secret(document, where=name)
    except (errors.ConfigError, errors.CredentialError):
        return {}
    return logins


def _find_entry(logins: pullsecret.PullSecret, spec: pullspec.PushSpec) -> str:
    """Return the name of the login for a repository; empty without one."""
    fitting = [
        name
        for name, login in logins.credentials.items()
        if pullsecret.find_credential(
            pullsecret.PullSecret({name: login}), spec.registry, spec.repository
        )
    ]
    return max(fitting, key=len, default="")
