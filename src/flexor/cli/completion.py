"""`flexor completion`: a script with which a shell completes commands, options, settings and their values.

Everything is in the script: to press Tab starts no Python.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Callable

from flexor.core.console import print_text
from flexor.core.option_parser import OptionParser

Options = dict[str, list[str] | None]
"""option -> its values, as far as they can be listed; None: it takes no value"""

WITH_SETTINGS = ("train", "plan", "resume", "demo")
SHORTEST_OPTION = re.compile(r"^ {2,4}(?:-\w, )?(--[A-Za-z][\w.-]*)(.*)$")
SUBCOMMANDS = re.compile(r"^ {2,4}\{([\w,-]+)\}", re.MULTILINE)
TAKES_VALUE = re.compile(
    r" \S|.*\[(?!flag\])[^\[\]]+\](?: \(default .*\))?$"
)  # --every SECONDS; ... [number]
CHOICES = re.compile(r"\{([\w,.-]+)\}|\[((?:[\w.-]+\|)+[\w.-]+)\]|\[((?:[\w.-]+\|)+[\w.-]+) or null\]")


def run(arguments: list[str]) -> int:
    parser = OptionParser(
        prog="flexor completion",
        description="Print a script that completes commands, options, settings and their values. For bash: "
        'eval "$(flexor completion bash)" in ~/.bashrc. For zsh: the same with zsh in ~/.zshrc, after compinit. For '
        "fish: flexor completion fish > ~/.config/fish/completions/flexor.fish",
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="bash, zsh or fish")
    parsed = parser.parse_args(arguments)
    print_text(SHELLS[parsed.shell](all_options()))
    return 0


def all_options() -> dict[str, tuple[Options, list[str]]]:
    """verb -> its options, and its subcommands."""
    from flexor.cli.launch import PLACES
    from flexor.cli.main import VERBS

    verbs = {verb: _of_help(_help(verb)) for verb in VERBS}
    verbs["launch"] = (verbs["launch"][0], [*PLACES])
    settings = _settings()
    for verb in WITH_SETTINGS:
        verbs[verb] = ({**settings, **verbs[verb][0]}, verbs[verb][1])
    gpus = _gpus()
    for options, _ in verbs.values():
        if "--gpu" in options:
            options["--gpu"] = gpus
    return verbs


def _settings() -> Options:
    """Those of `flexor train`, with those of every policy."""
    from flexor.config.help import train_help
    from flexor.policies import BUILT_IN

    settings: Options = {}
    for policy in BUILT_IN:
        settings |= _of_help(train_help(policy))[0]
    settings["--policy.type"] = list(BUILT_IN)
    return settings


def _gpus() -> list[str]:
    from flexor.plan.site.hardware import load_hardware

    return [name.replace(" ", "") for name in load_hardware().gpus]  # spaces do not matter in a GPU's name


def _help(verb: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        importlib.import_module(f"flexor.cli.{verb}").run(["--help"])
    return text.getvalue()


def _of_help(text: str) -> tuple[Options, list[str]]:
    """The options that a help text explains, with their values, and the subcommands."""
    options: Options = {}
    paragraphs: list[str] = []
    for line in text.splitlines():
        match = SHORTEST_OPTION.match(line)
        if match:
            paragraphs.append(line)
        elif paragraphs and paragraphs[-1] and line.startswith("    "):
            paragraphs[-1] += " " + line.strip()
        else:
            paragraphs.append("")
    for paragraph in filter(None, paragraphs):
        match = SHORTEST_OPTION.match(paragraph)
        assert match
        choices = CHOICES.search(match[2])
        words = next(filter(None, choices.groups()), "") if choices else ""
        options[match[1]] = _values(words) if TAKES_VALUE.match(match[2]) else None
    subcommands = SUBCOMMANDS.search(text)
    return options, subcommands[1].split(",") if subcommands else []


def _values(words: str) -> list[str]:
    return re.split(r"[,|]", words) if words else []


def _words(options: Options, subcommands: list[str]) -> list[str]:
    return [*subcommands, *(name if values is None else f"{name}=" for name, values in options.items())]


# Scripts. Words have no spaces, and values are written after =.

BASH = """_flexor() {{
  local verb="${{COMP_WORDS[1]}}" cur="${{COMP_WORDS[COMP_CWORD]}}" option="" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$cur"))
    return
  fi
  if [ "$cur" = "=" ]; then
    option="${{COMP_WORDS[COMP_CWORD-1]}}" cur=""
  elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ]; then
    option="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  if [ -n "$option" ]; then
    case "$verb $option" in
{values}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    return
  fi
  case "$verb" in
{options}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  case "${{COMPREPLY[*]}}" in *=) compopt -o nospace ;; esac
}}
complete -o default -F _flexor flexor"""

ZSH = """_flexor() {{
  local verb="${{words[2]}}" option="" list=""
  if (( CURRENT == 2 )); then
    compadd -- {verbs}
    return
  fi
  if [[ "$PREFIX" == --*=* ]]; then
    option="${{PREFIX%%=*}}"
    compset -P '*='
    case "$verb $option" in
{values}
    esac
    if [[ -n "$list" ]]; then compadd -- ${{=list}}; else _files; fi
    return
  fi
  case "$verb" in
{options}
  esac
  compadd -S '' -- ${{(M)${{=list}}:#*=}}
  compadd -- ${{${{=list}}:#*=}}
  [[ "$PREFIX" == -* ]] || _files
}}
compdef _flexor flexor"""


def _script(template: str, variable: str) -> Callable[[dict[str, tuple[Options, list[str]]]], str]:
    def script(verbs: dict[str, tuple[Options, list[str]]]) -> str:
        options = [
            f"    {verb}) {variable}={shlex.quote(' '.join(_words(names, subcommands)))} ;;"
            for verb, (names, subcommands) in verbs.items()
        ]
        values = [
            f"      {shlex.quote(f'{verb} {name}')}) {variable}={shlex.quote(' '.join(choices))} ;;"
            for verb, (names, _) in verbs.items()
            for name, choices in names.items()
            if choices
        ]
        return template.format(verbs=" ".join(verbs), options="\n".join(options), values="\n".join(values))

    return script


def _fish(verbs: dict[str, tuple[Options, list[str]]]) -> str:
    from flexor.cli.main import VERBS

    lines = [
        f"complete -c flexor -f -n __fish_use_subcommand -a {verb} -d {shlex.quote(VERBS[verb])}"
        for verb in verbs
    ]
    for verb, (options, subcommands) in verbs.items():
        condition = f"complete -c flexor -n '__fish_seen_subcommand_from {verb}'"
        lines += [f"{condition} -a {shlex.quote(' '.join(subcommands))}"] if subcommands else []
        for name, choices in options.items():
            values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{condition} -l {name.removeprefix('--')}{values}")
    return "\n".join(lines)


SHELLS = {"bash": _script(BASH, "words"), "zsh": _script(ZSH, "list"), "fish": _fish}
