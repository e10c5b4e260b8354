"""Settings and their precedence: option, then environment, then file, then default.

Every setting has one name in four places: option `--linger-seconds`, variable
`SPOOLD_LINGER_SECONDS`, TOML key `linger_seconds`, and the attribute of `Settings`; that class is
the one table of them, with defaults, bounds and help. An option in seconds may leave its unit out
(`--linger`). A variable that is set but empty counts as not set. A relative path is relative to the
working directory, wherever it comes from.

This is the only module that reads the environment, what a service manager puts there included, and
the only one that loads pydantic. The three places are merged here and not by pydantic-settings,
because an error has to say where a value came from, and because that import would cost each start
another 0.07 s.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)
from pydantic.fields import FieldInfo

from spoold.errors import ConfigError
from spoold.model import NullReward, OnReplaced, PartialGroups, ReadyWhen, Samples
from spoold.policy import WHOLE, Shard
from spoold.urls import masked, refused_as_option

__all__ = [
    "NEEDS_RESTART",
    "Given",
    "Reloaded",
    "SettingOption",
    "Settings",
    "ShownSetting",
    "gather",
    "load",
    "log_settings",
    "make",
    "notify_socket",
    "problems",
    "reloaded",
    "setting_options",
    "shown",
    "stderr_is_journal",
    "token_variable",
    "unknown_variables",
    "variable_of",
    "watchdog_seconds",
]

_PREFIX: Final = "SPOOLD_"
_TOKEN: Final = "SPOOLD_TOKEN"  # noqa: S105 - the name of a variable, which is no setting

NEEDS_RESTART: Final = frozenset(
    {"db", "run_dir", "job", "shard", "ready_when", "samples", "group_size", "null_reward"}
)
"""Settings that say which environments are complete and what becomes of their rows: a running
daemon keeps to them, or a batch would hold two kinds. All others may change while it runs."""

_Count = Annotated[int, Field(ge=1, lt=2**63)]
_CountOrZero = Annotated[int, Field(ge=0, lt=2**63)]
_Size = Annotated[ByteSize, Field(ge=1, lt=2**63)]
_SizeOrZero = Annotated[ByteSize, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, le=10**9)]
_Pause = Annotated[float, Field(gt=0, le=10**9)]
_Text = Annotated[str, Field(min_length=1)]


def _without_slash(path: str) -> str:
    return path.rstrip("/") or "/"


def _shard(value: object) -> Shard:
    if not isinstance(value, str):
        raise ValueError(value)
    return Shard.parse(value)


class Settings(BaseModel):
    """All settings of the daemon. Frozen; made by `load`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    db: _Text = Field(description="URL or path of the rollout database.")
    run_dir: Annotated[_Text, AfterValidator(_without_slash)] = Field(
        description="The run directory; made where it is missing."
    )
    job: _Text | None = Field(
        default=None, description="The job to deliver; default: the only one in the database."
    )
    shard: Annotated[Shard, PlainValidator(_shard), PlainSerializer(str)] = Field(
        default=WHOLE,
        description="Deliver part I of N, counted from 0, into a run directory of its own.",
    )
    ready_when: ReadyWhen = Field(
        default=ReadyWhen.AUTO,
        description="When an environment with a usable terminal row is complete.",
    )
    samples: Samples = Field(
        default=Samples.TERMINAL, description="One sample an environment, or one a step."
    )
    batch_size: _Count = Field(default=64, description="Environments (or groups) in a batch.")
    batch_bytes: _Size = Field(
        default=ByteSize(64 << 20), description="A batch is closed when it would grow past this."
    )
    linger_seconds: _Seconds = Field(
        default=1.0, description="How long a batch that is not full waits for more."
    )
    max_sample_bytes: _Size = Field(
        default=ByteSize(256 << 20),
        description="A longer environment or group is set aside with a note.",
    )
    group_size: _CountOrZero = Field(
        default=0, description="Deliver whole groups of this many; 0: no groups."
    )
    group_timeout_seconds: _Seconds = Field(
        default=1800.0,
        description="After this long without progress, partial_groups decides on a group.",
    )
    partial_groups: PartialGroups = Field(
        default=PartialGroups.WAIT, description="What becomes of a group that timed out."
    )
    max_pending_batches: _Count = Field(
        default=64, description="At this many batches in pending/, reading stops."
    )
    max_pending_bytes: _Size = Field(
        default=ByteSize(4 << 30), description="At this many bytes in pending/, reading stops."
    )
    min_free_bytes: _SizeOrZero = Field(
        default=ByteSize(1 << 30), description="With less free on the disk, reading stops."
    )
    scan_seconds: _Pause = Field(default=2.0, description="Pause between two looks.")
    rescan_seconds: _Pause = Field(default=60.0, description="Pause between two reconciles.")
    missing_row_seconds: _Seconds = Field(
        default=600.0,
        description="After this long, a finished environment without a usable row gets a note.",
    )
    requeue_seconds: _Seconds = Field(
        default=60.0, description="After this long, a dead consumer's batches are pending again."
    )
    max_attempts: _CountOrZero = Field(
        default=0, description="Reject a batch after this many tries; 0: never."
    )
    keep_steps: _CountOrZero | None = Field(
        default=None,
        description="Prune batches acked more than this many steps ago; default: keep all.",
    )
    null_reward: NullReward = Field(
        default=NullReward.FALLBACK,
        description="What becomes of an environment whose reward is null.",
    )
    on_replaced: OnReplaced = Field(
        default=OnReplaced.RETIRE, description="What to do when the database was replaced."
    )
    metrics_dir: Annotated[_Text, AfterValidator(_without_slash)] | None = Field(
        default=None,
        description="Write numbers for Prometheus into this directory; default: none.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least level that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines for people or for machines."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOption:
    """A setting as an option of the command line: `forms` are `--linger-seconds`, `--linger`."""

    name: str
    forms: tuple[str, ...]
    metavar: str
    help: str


_METAVARS: Final = {
    "db": "URL",
    "run_dir": "DIR",
    "metrics_dir": "DIR",
    "job": "JOB",
    "shard": "I/N",
}


def setting_options() -> list[SettingOption]:
    """Return every setting as an option, in the order of the table."""
    return [_option(name, field) for name, field in Settings.model_fields.items()]


def _option(name: str, field: FieldInfo) -> SettingOption:
    forms = [_option_of(name)]
    if name.endswith("_seconds"):
        forms.append(_option_of(name.removesuffix("_seconds")))
    choices, default = _choices(field), field.get_default()
    if choices:
        metavar = "|".join(choices)
    elif name.endswith("_bytes"):
        metavar = "SIZE"
    elif name.endswith("_seconds"):
        metavar = "SECONDS"
    else:
        metavar = _METAVARS.get(name, "N")
    shown = "" if field.is_required() or default is None else f" [default: {_shown(default)}]"
    return SettingOption(
        name=name, forms=tuple(forms), metavar=metavar, help=f"{field.description}{shown}"
    )


def _shown(default: object) -> str:
    if isinstance(default, ByteSize):
        return default.human_readable(separator=" ").replace(".0", "")
    if isinstance(default, enum.Enum):
        return str(default.value)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _choices(field: FieldInfo) -> list[str]:
    kind: Any = field.annotation
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(member.value) for member in kind]
    return list(kind.__args__) if getattr(kind, "__origin__", None) is Literal else []


def _option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return _PREFIX + name.upper()


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, and where: `in FILE`, `in SPOOLD_JOB`, `by --job`."""

    value: object
    origin: str


def load(
    config_file: str | None,
    options: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge options, environment (the process's own by default) and file into settings.

    `options` holds only what was given, by setting name. Raises ConfigError for a file that cannot
    be read, an unknown key in it, a missing setting, and a value that is not possible: with its
    name, where it came from, and what is allowed.
    """
    return make(gather(config_file, options, environ))


def log_settings(options: Mapping[str, object]) -> tuple[str, str]:
    """Return log_level and log_format, for a command without other settings. Raises as `make`."""
    given = {name: one for name, one in gather(None, options).items() if name.startswith("log_")}
    settings = make(given | {name: Given("-", "") for name in ("db", "run_dir")})
    return settings.log_level, settings.log_format


def gather(
    config_file: str | None,
    options: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
) -> dict[str, Given]:
    """Return what was given, by name, the strongest of the three places; nothing is judged yet.

    Raises ConfigError for a file that cannot be read.
    """
    variables = os.environ if environ is None else environ
    given: dict[str, Given] = {}
    if config_file is not None:
        for name, value in _read_file(config_file).items():
            given[name] = Given(value, f"in {config_file}")
    for name in Settings.model_fields:
        if variables.get(variable_of(name)):
            given[name] = Given(variables[variable_of(name)], f"in {variable_of(name)}")
        if name in options:
            given[name] = Given(options[name], f"by {_option_of(name)}")
    return given


def make(given: Mapping[str, Given]) -> Settings:
    """Make settings of what was given. Raises the first of its `problems`."""
    for error in problems(given):
        raise error
    return Settings.model_validate({name: one.value for name, one in given.items()})


def problems(given: Mapping[str, Given]) -> list[ConfigError]:
    """Return all that is wrong with what was given: unknown, impossible, missing."""
    found = [
        ConfigError(f"unknown setting {name!r} {one.origin}", hint=_nearest(name))
        for name, one in given.items()
        if name not in Settings.model_fields
    ]
    known = {name: one for name, one in given.items() if name in Settings.model_fields}
    # pydantic would take true for 1
    odd = [name for name, one in known.items() if isinstance(one.value, bool | list | dict)]
    found += [_impossible(name, known.pop(name)) for name in odd]
    if (db := known.get("db")) is not None and db.origin.startswith("by "):
        found += refused_as_option(str(db.value))
    try:
        Settings.model_validate({name: one.value for name, one in known.items()})
    except ValidationError as error:
        for name in dict.fromkeys(str(each["loc"][0]) for each in error.errors()):
            if name in known:
                found.append(_impossible(name, known[name]))
            elif name not in odd:
                found.append(_missing(name))
    return found


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"no {name} given",
        hint=f"give {_option_of(name)}, set {variable_of(name)}, or put {name} into a file "
        "for --config",
    )


def _read_file(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the settings in {path}: {os.strerror(error.errno or 0).lower()}",
            hint="--config takes a TOML file that this user can read",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no TOML: {error}", hint='a line looks like: db = "rollouts.db"'
        ) from error


def _nearest(name: str, *, write: Callable[[str], str] = str) -> str:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    return f"did you mean {write(near[0])}?" if near else "`spoold run --help` lists the settings"


def _impossible(name: str, given: Given) -> ConfigError:
    value = repr(given.value)
    if len(value) > 60:
        value = value[:60] + "…"
    return ConfigError(
        f"{name} cannot be {value} (given {given.origin})", hint=f"it is {_allowed(name)}"
    )


def _allowed(name: str) -> str:
    """Say what a setting may be, from its declaration."""
    field = Settings.model_fields[name]
    choices = _choices(field)
    if choices:
        return "one of " + ", ".join(choices)
    if name in ("db", "run_dir", "job", "metrics_dir"):
        return "a text that is not empty"
    if name == "shard":
        return "a text I/N, 0 ≤ I < N: of three shards 0/3, 1/3 or 2/3"
    if name.endswith("_seconds"):
        least = "above 0" if _has_bound(field, "gt", 0) else "0 or more"
        return f"a number of seconds, {least}, up to 10^9"
    least = "1 or more" if _has_bound(field, "ge", 1) else "0 or more"
    if name.endswith("_bytes"):
        return f"a number of bytes or a size such as 64MiB or 1.5GiB, {least}"
    return f"an integer, {least}"


def _has_bound(field: FieldInfo, kind: str, bound: int) -> bool:
    return any(getattr(fact, kind, None) == bound for fact in field.metadata)


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SPOOLD_… variables that are no settings, each with a hint."""
    variables = os.environ if environ is None else environ
    known = {_TOKEN, *(variable_of(name) for name in Settings.model_fields)}
    return {
        name: _nearest(name.removeprefix(_PREFIX).lower(), write=variable_of)
        for name in sorted(variables)
        if name.startswith(_PREFIX) and name not in known
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSetting:
    """A setting for people: `value` as TOML writes it, "" where it is not set."""

    name: str
    value: str
    origin: str


def shown(settings: Settings, given: Mapping[str, Given]) -> list[ShownSetting]:
    """Return every setting, what it is and where that comes from; secrets in URLs are masked."""
    return [
        ShownSetting(
            name=name,
            value=_as_toml(getattr(settings, name)),
            origin=given[name].origin.partition(" ")[2] if name in given else "default",
        )
        for name in Settings.model_fields
    ]


def _as_toml(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, ByteSize):
        units = ((unit, 1 << bits) for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)))
        whole = (f'"{value // size}{unit}"' for unit, size in units if value and not value % size)
        return next(whole, str(int(value)))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int):
        return str(value)
    text = str(value.value) if isinstance(value, enum.Enum) else masked(str(value))
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What becomes of settings that were read again while the daemon runs."""

    settings: Settings
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def reloaded(old: Settings, new: Settings) -> Reloaded:
    """Return the settings to go on with: the new ones, but the old where only a restart helps."""
    differ = [n for n in Settings.model_fields if getattr(old, n) != getattr(new, n)]
    kept = {name: getattr(old, name) for name in NEEDS_RESTART}
    return Reloaded(
        settings=new.model_copy(update=kept),
        changed=tuple(name for name in differ if name not in NEEDS_RESTART),
        needs_restart=tuple(name for name in differ if name in NEEDS_RESTART),
    )


def token_variable(environ: Mapping[str, str] | None = None) -> str:
    """Return SPOOLD_TOKEN, "" where it is not set."""
    return (os.environ if environ is None else environ).get(_TOKEN, "")


# --- what a service manager says -----------------------------------------------------------------


def notify_socket(environ: Mapping[str, str] | None = None) -> str:
    """Return the address where the service manager listens, "" where there is none."""
    return (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")


def watchdog_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return how long the service manager waits for a ping of this process; 0 for ever."""
    variables = os.environ if environ is None else environ
    # Inherited by children that nobody watches: the process is named, where the manager says so.
    if variables.get("WATCHDOG_PID", "") not in ("", str(os.getpid())):
        return 0.0
    try:
        return max(0, int(variables.get("WATCHDOG_USEC", ""))) / 1e6
    except ValueError:
        return 0.0


def stderr_is_journal(environ: Mapping[str, str] | None = None) -> bool:
    """Whether standard error goes to journald itself, as JOURNAL_STREAM tells by device and inode.

    The variable alone is not enough: it is inherited by children whose output goes elsewhere.
    """
    stream = (os.environ if environ is None else environ).get("JOURNAL_STREAM", "")
    try:
        facts = os.fstat(2)
    except OSError:
        return False
    return stream == f"{facts.st_dev}:{facts.st_ino}"
