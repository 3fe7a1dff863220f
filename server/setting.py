"""One setting: a row in `server/settings.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.server.values import boolean

ENVIRONMENT_PREFIX = "OCTAVO_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `name` is the field it fills; flag and variable follow from it."""

    name: str
    group: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    """The only words it accepts; empty: whatever `parse` does."""
    repeatable: bool = False
    secret: bool = False
    """Never logged."""

    @property
    def flag(self) -> str:
        """How it is given on the command line."""
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """How it is given in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def negated(self) -> str:
        """The variable that turns a yes-or-no setting off; empty for others."""
        return ENVIRONMENT_PREFIX + "NO_" + self.name.upper() if self.parse is boolean else ""

    def read(self, text: str) -> Any:
        """Parse a value. Raises ValueError."""
        value = self.parse(text)
        if self.choices and value not in self.choices:
            raise ValueError(f"give one of {', '.join(self.choices)}")
        return value
