"""From flags and environment variables to settings, by the rows in `server/settings.py`.

A flag wins over its environment variable, which wins over the default. Both are parsed by the same function,
so an error reads the same wherever the value came from.
"""

import argparse
import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from octavo.scheduler.messages import EngineConfig
from octavo.server.settings import ENVIRONMENT_PREFIX, FOREIGN_VARIABLES, SETTINGS, ServerSettings, Setting, Settings
from octavo.server.values import OptionError, boolean


def add_arguments(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add every setting, or those of some names, to a parser, in groups. They stay text until `resolve` reads them."""
    groups: dict[str, Any] = {}
    for setting in (setting for setting in SETTINGS if names is None or setting.name in names):
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        text = setting.help
        if setting.default not in (None, ()):
            text += f" Default: {_spelled(setting.default)}."
        options: dict[str, Any] = {"default": None, "help": f"{text} [{setting.variable}]".replace("%", "%%")}
        if setting.parse is boolean:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = setting.metavar or "{" + ",".join(setting.choices) + "}"
        if setting.repeatable:
            options["action"] = "append"
        if setting.name == "model":
            groups[setting.group].add_argument("model", nargs="?", **options)
        else:
            groups[setting.group].add_argument(setting.flag, dest=setting.name, **options)


def resolve(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Turn parsed arguments and the environment into settings. Raises OptionError."""
    _refuse_unknown_variables(environment)
    values: dict[str, Any] = {}
    changed: dict[str, str] = {}
    for setting in SETTINGS:
        source, given = _given(setting, arguments, environment)
        if source is None:
            values[setting.name] = setting.default
            continue
        values[setting.name] = value = _parse(setting, source, given)
        if value != setting.default:
            changed[setting.flag] = "***" if setting.secret else _spelled(value)
    if values["fault"] and not values["enable_faults"]:
        raise OptionError("--fault breaks requests on purpose: it needs --enable-faults")
    values["served_model_name"] = values["served_model_name"] or (_default_name(values["model"]),)
    return Settings(
        server=ServerSettings(**{name: values[name] for name in ServerSettings.__dataclass_fields__}),
        engine=msgspec.convert({"type": "EngineConfig", **values}, EngineConfig),
        changed=changed,
    )


def _given(setting: Setting, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str | None, Any]:
    """Where a setting was given, as an error should call it, and what was given."""
    if arguments.get(setting.name) is not None:
        return setting.flag, arguments[setting.name]
    if setting.negated and environment.get(setting.negated):
        if environment.get(setting.variable):
            raise OptionError(f"{setting.variable} and {setting.negated} are both set: keep one")
        return setting.negated, environment[setting.negated]
    if environment.get(setting.variable):  # an empty variable is an unset one, as in most shells and manifests
        text = environment[setting.variable]
        return setting.variable, text.split(",") if setting.repeatable else text
    return None, None


def _parse(setting: Setting, source: str, given: Any) -> Any:
    if isinstance(given, bool):
        return given
    if setting.repeatable:
        return tuple(dict.fromkeys(_read(setting, source, text) for text in given))
    value = _read(setting, source, given)
    return not value if source == setting.negated else value


def _read(setting: Setting, source: str, text: str) -> Any:
    try:
        return setting.read(text)
    except ValueError as error:
        shown = "" if setting.secret else f" {text!r}:"
        raise OptionError(f"{source}:{shown} {error}") from None


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    known = {setting.variable for setting in SETTINGS} | {setting.negated for setting in SETTINGS} | FOREIGN_VARIABLES
    for name in environment:
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known - {""}, n=1, cutoff=0)
            raise OptionError(f"{name}: there is no such setting; the nearest is {near[0]}")


def _default_name(model: str) -> str:
    """MODEL itself, but of a local path only the last part: no path of this machine is shown to clients."""
    path = Path(model)
    return path.resolve().name if path.exists() or path.is_absolute() else model


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
