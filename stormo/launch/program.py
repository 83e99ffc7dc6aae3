"""Programs that a variable of the environment may name, with options of theirs: STORMO_SSH."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from stormo.errors import SettingError


def words_of(variable: str, environ: Mapping[str, str]) -> list[str]:
    """The program and its words as a shell would read them; none where the variable is not set."""
    try:
        return shlex.split(environ.get(variable, ""))
    except ValueError as error:
        why = f"a shell could not read that ({str(error).lower()})"
        raise SettingError(f"{variable}={environ[variable]} was set", why, "close its quotes") from None
