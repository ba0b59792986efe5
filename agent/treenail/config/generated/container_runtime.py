"""CRI-O drop-ins and storage.conf of a pool, from a ContainerRuntimeConfig."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated

from treenail.api import decode
from treenail.config.generated import sources, toml_writer
from treenail.encoding import codec, json_values, quantities
from treenail.errors import ConfigError

STORAGE_CONF = "/etc/containers/storage.conf"
_DROP_IN = "/etc/crio/crio.conf.d/01-ctrcfg-"
_SELECTOR, _CONFIG = "machineConfigPoolSelector", "containerRuntimeConfig"
_LOG_LEVELS = ("fatal", "panic", "error", "warn", "info", "debug", "trace")
_RUNTIMES = ("crun", "runc")
_MIN_PIDS, _CONMON_BUFFER = 20, 8192
_STORE = re.compile(r"(?=.{2,256}$)(?:/[a-zA-Z0-9._-]+)+/?")
_LARGEST = 2**63 - 1
# The fields of containers/storage in the order of its types. Go always writes those with a hash.
_TABLES = {
    "": "additionalimagestores imagestore additionallayerstores size ignore_chown_errors "
    "use_composefs #force_mask root-auto-userns-user #auto-userns-min-size #auto-userns-max-size "
    "skip_mount_home mount_program mountopt disable-volatile",
    "aufs": "mountopt",
    "btrfs": "min_space size",
    "overlay": "ignore_chown_errors mountopt mount_program size inodes skip_mount_home "
    "use_composefs force_mask",
    "vfs": "ignore_chown_errors",
    "zfs": "mountopt fsname size",
}


def _read_quantity(value: object) -> quantities.Quantity:
    size = None if isinstance(value, bool) else quantities.parse_quantity(str(value).strip())
    if size is None:
        raise json_values.Mismatch(problem=f"expected a size such as 10Gi, found {value!r:.60}")
    if size.whole > _LARGEST:
        raise json_values.Mismatch(
            problem=f"expected at most {_LARGEST} bytes, found {size.text:.60}"
        )
    return size


_require = partial(codec.require, shows=True)


def _limit_stores(limit: int) -> codec.Via:
    expected = f"1 to {limit} different directories"
    return _require(expected, lambda paths: 0 < len(set(paths)) == len(paths) <= limit)


@dataclass(frozen=True, slots=True)
class _Store(codec.JsonObject, is_strict=True):
    path: Annotated[str, _require("an absolute path without spaces", _STORE.fullmatch)]


_Stores = tuple[_Store, ...]
_SizeField = Annotated[quantities.Quantity, codec.Via(_read_quantity, wire=object)]
_NO_SIZE = quantities.Quantity(Fraction(), "0")
_IS_LEVEL = _require(f"one of {', '.join(_LOG_LEVELS)}", ("", *_LOG_LEVELS).__contains__)
_IS_RUNTIME = _require(" or ".join(_RUNTIMES), ("", *_RUNTIMES).__contains__)
_IS_PIDS_LIMIT = _require(f"0 or at least {_MIN_PIDS}", lambda pids: pids == 0 or pids >= _MIN_PIDS)
_IS_POSITIVE = _require("a positive size", lambda size: size.whole >= 0)
_IS_LOG_SIZE = _require(
    f"more than {_CONMON_BUFFER}, or -1 for no limit",
    lambda size: not 0 < size.whole <= _CONMON_BUFFER,
)


@dataclass(frozen=True, slots=True)
class _RuntimeSettings(codec.JsonObject, is_strict=True):
    log_level: Annotated[str, _IS_LEVEL] = ""
    pids_limit: Annotated[int | None, _IS_PIDS_LIMIT] = None
    log_size_max: Annotated[_SizeField, _IS_LOG_SIZE] = _NO_SIZE
    overlay_size: Annotated[_SizeField, _IS_POSITIVE] = _NO_SIZE
    default_runtime: Annotated[str, _IS_RUNTIME] = ""
    additional_layer_stores: Annotated[_Stores, _limit_stores(5)] = ()
    additional_image_stores: Annotated[_Stores, _limit_stores(10)] = ()
    additional_artifact_stores: Annotated[_Stores, _limit_stores(10)] = ()


def check_runtime_config(source: sources.SourceObject) -> None:
    """Raise `ConfigError` with field, expected and found."""
    decode.reject_unknown_fields(source.get_spec(), (_SELECTOR, _CONFIG))
    if source.spec.get(_CONFIG) is None:
        raise source.get_spec().make_error(_CONFIG, "an object")
    _read_settings(source)


def generate_runtime_files(
    source: sources.SourceObject, base: sources.BaseFiles
) -> tuple[sources.GeneratedFile, ...]:
    """Return the files in the order of the MCO."""
    settings = _read_settings(source)
    changes: decode.Json = {
        "size": settings.overlay_size.text if settings.overlay_size.whole else "",
        # containers/storage finds layers by their reference with this suffix alone.
        "additionallayerstores": [f"{each.path}:ref" for each in settings.additional_layer_stores],
        "additionalimagestores": [each.path for each in settings.additional_image_stores],
    }
    contents = {}
    if any(changes.values()):
        contents[STORAGE_CONF] = _merge_storage(base.find_text(STORAGE_CONF), changes)
    artifacts = [each.path for each in settings.additional_artifact_stores]
    for name, key, value in (
        ("logLevel", "log_level", settings.log_level or None),
        ("pidsLimit", "pids_limit", settings.pids_limit),
        ("logSizeMax", "log_size_max", settings.log_size_max.whole or None),
        ("defaultRuntime", "default_runtime", settings.default_runtime or None),
        ("additionalArtifactStores", "additional_artifact_stores", artifacts or None),
    ):
        if value is not None:
            contents[f"{_DROP_IN}{name}"] = {"crio": {"runtime": {key: value}}}
    return tuple(
        sources.GeneratedFile(path, toml_writer.format_toml(document))
        for path, document in contents.items()
    )


def _read_settings(source: sources.SourceObject) -> _RuntimeSettings:
    return source.get_spec().get_object(_CONFIG).read(_RuntimeSettings)


def _merge_storage(base: str | None, changes: decode.Json) -> decode.Json:
    if base is None:
        raise ConfigError(
            f"{STORAGE_CONF}: expected it in a MachineConfig of the pool, found none",
            remedy="add a MachineConfig that writes the file of the nodes",
        )
    storage = toml_writer.parse_toml(base, STORAGE_CONF).get_object("storage")
    options = storage.get_object("options")
    table = _read_table(options, _TABLES[""])
    table |= {name: value for name, value in changes.items() if value}
    for name, keys in _TABLES.items():
        if name:
            table[name] = _read_table(options.get_object(name), keys)
    table["pull_options"] = dict(sorted(options.get_text_map("pull_options").items()))
    top = {name: storage.get_text(name) for name in ("driver", "runroot", "graphroot")}
    return {"storage": {**top, "options": table}}


def _read_table(fields: decode.Fields, keys: str) -> decode.Json:
    """Return the values in the order of the keys; None for an empty one, which Go omits."""
    table: decode.Json = {}
    for key in keys.split():
        if key.startswith("#"):
            table[key[1:]] = fields.get_optional_integer(key[1:]) or 0
        elif key.endswith("stores"):
            table[key] = fields.get_text_list(key) or None
        else:
            read = fields.get_bool if key == "disable-volatile" else fields.get_text
            table[key] = read(key) or None
    return table if any(value is not None for value in table.values()) else {}
