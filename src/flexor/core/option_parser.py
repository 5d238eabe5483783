"""Reads a verb's options. What is wrong with them is said in one line, with the option that was meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from flexor.core.errors import ConfigError
from flexor.core.typed import closest

__all__ = ["OptionParser"]


class OptionParser(argparse.ArgumentParser):
    """Options are written in full. Parsers of subcommands, which `add_subparsers` makes, are of this class too."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        self.refuse(parsed, unknown)
        return parsed

    def refuse(self, parsed: argparse.Namespace, unknown: Sequence[str]) -> None:
        """Raise an error if there are arguments that no option and no setting stands for."""
        if not unknown:
            return
        name = unknown[0].partition("=")[0]
        options = sorted({*self._options(parsed)} - {"--help"})
        hint = closest(name, options) if name.startswith("-") else f"`{self.prog} --help` lists all options."
        raise ConfigError(f"Unknown {'option' if name.startswith('-') else 'argument'} {name}. {hint}")

    def _options(self, parsed: argparse.Namespace) -> Iterator[str]:
        """All options, with those of the subcommand that was given."""
        for action in self._actions:
            yield from (option for option in action.option_strings if option.startswith("--"))
            if isinstance(action, argparse._SubParsersAction):
                subcommand = action.choices.get(str(getattr(parsed, action.dest, None)))
                yield from subcommand._options(parsed) if isinstance(subcommand, OptionParser) else ()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is not known. {closest(str(value), map(str, action.choices))}"
            )

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"{message}{end} `{self.prog} --help` lists all options.")
